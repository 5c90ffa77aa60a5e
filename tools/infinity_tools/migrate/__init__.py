"""`infinity migrate`: what becomes of a DeepSpeed configuration."""
