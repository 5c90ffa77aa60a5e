"""The host cache, compute devices, and limits on memory use."""
