"""Estimates of a run before it starts, computed from parameter shapes by the planner and its timing model.

This package does not import torch or perform I/O.
"""
