"""`infinityd`: the daemon of one node.

It reads the stats pages of the ranks, serves Prometheus, and answers questions about the drives over a Unix
socket. Training never depends on it. Nothing here imports torch.
"""
