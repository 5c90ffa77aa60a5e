"""`infinity probe`: bandwidth measurement of drives, with recommended settings."""
