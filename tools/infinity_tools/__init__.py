"""Command line of `infinity`."""
