"""The update of one page, and where in the step updates run."""
