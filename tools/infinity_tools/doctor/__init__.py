"""`infinity doctor`: checks that a machine is ready for infinity, with suggested fixes."""
