"""Trace, planner and pager, which determine where each page is stored at any time."""
