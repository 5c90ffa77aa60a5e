"""Memory for transfers, in a child that was forked."""

from __future__ import annotations

import os

from infinity.hugepages import transfer_memory
from infinity.units import MIB


def test_children_have_no_copy() -> None:
    """The kernel would copy memory that is pinned, all of it, for every worker of a data loader."""
    memory = transfer_memory(2 * MIB)
    memory[:] = b"x" * (2 * MIB)
    child = os.fork()
    if not child:
        os._exit(int(any(memory)))
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(memory) == b"x" * (2 * MIB)
