"""`infinity top`: the runs of this node, live in a terminal."""
