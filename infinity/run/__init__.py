"""A run from `infinity.offload` to `close`: everything below, composed."""
