"""The paged shard tensor and its attachment to a model on which `fully_shard` was called."""
