"""`infinity top`: live view of the runs of this node in a terminal."""
