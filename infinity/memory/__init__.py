"""Host memory: the host cache, what the C library keeps, and how much there is to take."""
