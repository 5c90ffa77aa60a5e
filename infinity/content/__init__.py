"""Content of pages: state formats, the layout of pages, and page bytes as tensors. No I/O, no FSDP."""
