"""Layer-major accumulation: each FSDP module runs all slices of a batch before the next FSDP module starts."""
