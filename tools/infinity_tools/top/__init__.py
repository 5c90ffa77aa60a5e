"""`infinity top`: live view of the runs on this node in a terminal."""
