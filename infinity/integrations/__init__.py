"""Integrations with frameworks that have a training loop of their own."""
