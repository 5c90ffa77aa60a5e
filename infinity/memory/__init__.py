"""Host memory: the arena, what the C library keeps, and how much there is to take."""
