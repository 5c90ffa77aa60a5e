"""A run from `infinity.offload` to `close`, composed of the packages below."""
