"""Checkpoints: what they hold, how they are published, and how they are read."""
