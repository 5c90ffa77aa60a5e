"""`infinity migrate`: translate a DeepSpeed configuration."""
