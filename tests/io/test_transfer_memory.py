"""Tests of transfer memory: forked processes, NUMA nodes, and threads that populate it."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from pathlib import Path

import pytest

from infinity import hugepages
from infinity.hugepages import transfer_memory
from infinity.units import KIB, MIB

NUMA_MAPS = Path("/proc/self/numa_maps")


def test_forked_children_do_not_copy_transfer_memory() -> None:
    """Linux would copy pinned memory eagerly for every data loader worker."""
    memory = transfer_memory(2 * MIB)
    memory[:] = b"x" * (2 * MIB)
    child = os.fork()
    if not child:
        os._exit(int(any(memory)))
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(memory) == b"x" * (2 * MIB)


def test_threads_populate_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread populates one slice at a time. A slice that fails is touched page by page instead."""
    monkeypatch.setattr(hugepages, "_POPULATED", 64 * KIB)
    parts: list[tuple[int, int]] = []
    both, calls = threading.Barrier(2), itertools.count()

    def madvise(address: ctypes.c_void_p, size: ctypes.c_size_t, advice: int) -> int:
        assert advice == 23
        if next(calls) < 2:
            both.wait(300)  # two threads are in the call at the same time
        parts.append((address.value or 0, size.value))
        return 0

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    hugepages._populate(madvise, 4096, 200 * KIB)
    assert sorted(parts) == [(4096 + i * 64 * KIB, (64 if i < 3 else 8) * KIB) for i in range(4)]
    with pytest.raises(OSError, match="madvise"):
        hugepages._populate(lambda *_: -1, 4096, 200 * KIB)


@pytest.mark.skipif(not NUMA_MAPS.exists(), reason="this kernel does not support NUMA")
def test_memory_is_allocated_on_the_given_node() -> None:
    for node, policy in ((0, "prefer:0"), (-1, "default")):
        memory = transfer_memory(2 * MIB, node)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        lines = [line.split() for line in NUMA_MAPS.read_text().splitlines()]
        ends = [(int(line[0], 16), line[1]) for line in lines]
        assert max(end for end in ends if end[0] <= start)[1] == policy


def test_memory_policy_of_the_process_takes_precedence() -> None:
    """For example, one that `numactl --membind` has set."""
    calls: list[int] = []

    def syscall(policy: int, number: int, *arguments: object) -> int:
        calls.append(number)
        if number == hugepages._GET_MEMPOLICY:
            arguments[0]._obj.value = policy  # type: ignore[attr-defined]
        return 0

    hugepages._prefer(lambda *arguments: syscall(2, *arguments), 4096, 4096, 0)
    assert calls == [hugepages._GET_MEMPOLICY]
    hugepages._prefer(lambda *arguments: syscall(0, *arguments), 4096, 4096, 0)
    assert calls[1:] == [hugepages._GET_MEMPOLICY, hugepages._MBIND]


def test_unsupported_numa_calls_are_ignored() -> None:
    calls: list[int] = []
    hugepages._prefer(lambda number, *_: calls.append(number) or -1, 4096, 4096, 0)
    assert calls == [hugepages._GET_MEMPOLICY]
