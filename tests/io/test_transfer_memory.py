"""Tests of transfer memory in forked processes."""

from __future__ import annotations

import os

from infinity.hugepages import transfer_memory
from infinity.units import MIB


def test_forked_children_do_not_copy_transfer_memory() -> None:
    """Linux would copy pinned memory eagerly for every data loader worker."""
    memory = transfer_memory(2 * MIB)
    memory[:] = b"x" * (2 * MIB)
    child = os.fork()
    if not child:
        os._exit(int(any(memory)))
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(memory) == b"x" * (2 * MIB)
