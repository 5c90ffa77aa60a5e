"""Page versions in extents over the NVMe paths, and the checkpoints that name them."""
