"""Estimates of a run before it starts, made by the planner and its timing model from shapes. No torch, no I/O."""
