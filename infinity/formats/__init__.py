"""File formats of other libraries: safetensors with transformers' tensor names, and `torch.distributed.checkpoint`."""
