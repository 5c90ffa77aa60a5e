"""Page store: versions of pages in the data files on the NVMe paths, and the checkpoints that refer to them."""
