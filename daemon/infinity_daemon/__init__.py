"""`infinityd`, the daemon of a node.

The daemon reads the stats files of the ranks, exports them to Prometheus, and answers requests about the drives over a
Unix socket. Training does not depend on it. This package does not import torch.
"""
