"""`infinity doctor`: what this machine can do for infinity, and why not more."""
