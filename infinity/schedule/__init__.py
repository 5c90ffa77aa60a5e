"""Trace, planner and pager: which page is where, and when."""
