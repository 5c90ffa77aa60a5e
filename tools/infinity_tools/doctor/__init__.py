"""`infinity doctor`: check whether a machine is ready for infinity, and suggest fixes."""
