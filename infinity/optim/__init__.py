"""Optimizer updates of pages, and their schedule within a training step."""
