"""Memory: the host cache, compute devices, and the limits on memory use."""
