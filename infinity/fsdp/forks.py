"""Children that are forked from a process with ranks, such as the workers of a data loader."""

from __future__ import annotations

import ctypes
import os
from functools import cache

from infinity import torch_private


@cache
def keep_process_groups() -> None:
    """Never let a child destroy the process groups that it has from its parent, from the next fork on.

    gloo's would wait for its threads then, which a child has not, and the child would never end.
    """

    def keep() -> None:
        for group in torch_private.process_groups():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    os.register_at_fork(after_in_child=keep)
