"""Page versions in extents over the NVMe paths, and the commits that name them."""
