"""Keep processes that are forked from a rank, such as data loader workers, from hanging when they exit."""

from __future__ import annotations

import ctypes
import os
from functools import cache

from infinity import torch_private


@cache
def keep_process_groups() -> None:
    """Prevent processes that are forked from now on from destroying the process groups that they inherit.

    The destructor of a gloo process group waits for threads that do not exist in the child, so the child would hang.
    """

    def keep() -> None:
        for group in torch_private.process_groups():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    os.register_at_fork(after_in_child=keep)
