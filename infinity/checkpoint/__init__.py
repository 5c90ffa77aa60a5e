"""Checkpoints: their contents, the protocol that publishes them, and the readers."""
