"""Build sharded models of transformers from a name or a configuration."""
