"""`infinity probe`: measurement of drives, and settings recommended for them."""
