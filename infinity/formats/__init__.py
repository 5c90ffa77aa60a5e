"""Formats of other tools: safetensors with the names of transformers, and `torch.distributed.checkpoint`."""
