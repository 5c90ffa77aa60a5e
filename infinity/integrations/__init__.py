"""Integrations with frameworks that have their own training loop."""
