"""Paged shards and gradients of a model on which `fully_shard` was called, and the hooks that connect them to FSDP2."""
