"""Protect processes that are forked from a rank, such as data loader workers."""

from __future__ import annotations

import ctypes
import os
from functools import cache

from infinity import torch_private


@cache
def keep_process_groups() -> None:
    """Keep forked children from destroying the process groups that they inherit. Takes effect from the next fork on.

    The destructor of a gloo process group waits for its threads, which do not exist in the child, so the child would
    hang.
    """

    def keep() -> None:
        for group in torch_private.process_groups():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    os.register_at_fork(after_in_child=keep)
