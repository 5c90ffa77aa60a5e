"""Layer-major accumulation: each unit runs all slices of a batch before the next unit starts."""
