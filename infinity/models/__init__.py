"""Sharded models, made from a name or a configuration: what becomes of transformers' models before `offload`."""
