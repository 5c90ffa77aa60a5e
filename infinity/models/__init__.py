"""Build sharded transformers models from a name or a configuration."""
