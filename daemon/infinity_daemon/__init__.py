"""`infinityd`, a daemon that runs once per node.

The daemon reads the stats files of the ranks, exports their metrics to Prometheus, and answers requests about drives
over a Unix socket. Training also works without it. This package does not import torch.
"""
