"""Frameworks that bring a training loop of their own: what connects each with `infinity.offload`."""
