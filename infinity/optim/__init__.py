"""Optimizer updates on pages, and their schedule within a training step."""
