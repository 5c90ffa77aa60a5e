"""Checkpoints: their contents, the protocol that publishes them, and readers."""
