"""The command line of `infinity`: train, probe, store."""
