"""Trace, planner and pager: the location of each page over time."""
