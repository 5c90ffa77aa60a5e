"""Trace, planner and pager, which determine where each page is stored at any time.

Functions that plan a step share these arguments:

- `events`, `trace`: events or accesses of one step. See `trace`.
- `layout`: pages of this rank.
- `cache_slots`: number of cache slots of the host cache.
- `update_schedule`: when updates run, and which pages stay on the device.
- `threaded`: whether updates run on their own thread.
- `update_on_device`: whether updates run on the compute device.
- `exchanges`: whether ranks exchange data during updates. If so, updates run as soon as gradients have arrived or in
  `step()`, so that all ranks run them in the same order.
- `components`: number of stored components of the gradients of an FSDP module.
"""
