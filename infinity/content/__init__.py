"""What lies in pages: state formats, the layout of pages, and the bytes of a page as tensors. No I/O, no FSDP."""
