"""The pinned host arena and its frames."""
