"""Bandwidth and latency of folders, measured through an engine on real files with O_DIRECT.

`points` has what is measured and found, `bench` measures, `quick` answers in two seconds, `sustained` writes until a
drive's cache is full.
"""
