"""Sharded models, made from a name or a configuration."""
