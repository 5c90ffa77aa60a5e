"""`infinity plan`: estimates of a run before it starts."""
