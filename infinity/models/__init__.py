"""Sharded models of transformers, made from a name or a configuration."""
