"""Bandwidth and latency of folders, measured through an I/O engine on real files with O_DIRECT.

`points` defines measurements and their results, `bench` runs measurements, `quick` returns a result in two seconds,
and `sustained` writes until the write cache of a drive is full.
"""
