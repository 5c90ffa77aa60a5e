"""Memory does not grow with the model."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity import heap
from support.peak import ELEMENTS

MIB = 1 << 20
HOST = 16 * MIB
GROUPS = Path("/sys/fs/cgroup/memory")


def start(
    mode: str, layers: int, folder: Path, joins: Callable[[], None] | None = None, host: int = HOST
) -> subprocess.Popen[str]:
    """Start the training program."""
    command = [sys.executable, "-m", "support.peak", mode, str(layers), str(host), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=joins
    )


def outcome(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
    """Return exit status, what the program printed, and its errors."""
    out, err = process.communicate(timeout=900)
    return process.returncode, json.loads(out) if out.strip() else {}, err


def peak(mode: str, layers: int, folder: Path) -> int:
    """Return the peak resident memory of a training, in bytes."""
    status, found, errors = outcome(start(mode, layers, folder))
    assert status == 0, errors
    return found["peak"]


@pytest.mark.wide
def test_three_times_the_layers_need_no_more_memory(tmp_path: Path) -> None:
    """At a fixed host cache;

    20 MiB are allowed for objects and what the heap creeps; the bf16 weights would be 32 more.
    """
    layers = 8
    grown = 3 * layers * ELEMENTS - layers * ELEMENTS
    assert 2 * grown >= 32 * MIB
    small, large = (peak("paged", number, tmp_path) for number in (layers, 3 * layers))
    assert large - small < 20 * MIB


@pytest.mark.wide
def test_formats_are_streamed(tmp_path: Path) -> None:
    """To write a folder of DCP takes a part of what is in it; to begin a run with it, not more than to train.

    So does a save from a run that trains.
    """
    layers = 16
    of_training = peak("checkpoint", layers, tmp_path)
    of_saves = peak("save", layers, tmp_path / "apart")
    exported = peak("export", layers, tmp_path) - peak("nothing", 0, tmp_path)
    state = sum(file.stat().st_size for file in (tmp_path / "dcp").iterdir())
    assert state > 12 * layers * ELEMENTS
    assert exported < state / 6
    assert peak("load", layers, tmp_path) < of_training + state / 12
    assert sum(file.stat().st_size for file in (tmp_path / "apart" / "saved-dcp").iterdir()) > 12 * layers * ELEMENTS
    assert of_saves < of_training + state / 12


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """Make a memory cgroup; skip where that is not possible."""
    group = GROUPS / f"infinity-test-{os.getpid()}"
    if os.geteuid() != 0 or not (GROUPS / "memory.limit_in_bytes").exists():
        pytest.skip("needs root and the memory controller of cgroup v1")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))
    except OSError as error:
        pytest.skip(f"cannot make a memory cgroup: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def test_training_works_under_a_memory_limit(tmp_path: Path) -> None:
    """Imports + host cache + some FSDP modules, half of the state; the same model in memory is killed there.

    So it would be with the host cache that suits the whole machine: one whose size is not set is as small as it must
    be.
    """
    layers = 12
    state = 14 * layers * ELEMENTS
    limit = peak("nothing", 0, tmp_path) + HOST + 64 * MIB
    assert state / 2 > HOST + 64 * MIB
    with memory_group(limit) as group:

        def joins() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        status, limited, errors = outcome(start("paged", layers, tmp_path, joins))
        assert status == 0, errors
        status, chosen, errors = outcome(start("paged", layers, tmp_path, joins, host=0))
        assert status == 0, errors
        assert chosen["losses"] == limited["losses"]
        assert outcome(start("memory", layers, tmp_path, joins))[0] != 0
    assert len(set(limited["losses"])) == 2


def use(blocks: int) -> None:
    """Write to so many blocks of 64 MiB, and free them."""
    held = [torch.ones(16 * MIB) for _ in range(blocks)]
    assert len(held) == blocks


@pytest.fixture
def little_creep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the heap creep by half a block."""
    monkeypatch.setattr(heap, "CREEP_BYTES", 32 * MIB)


def measured(blocks: int) -> heap.FreedMemory:
    """Return what bounds freed memory, after a step of FSDP modules that need no, and so many blocks."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("only glibc can be told what to keep")
    freed = heap.FreedMemory()
    freed.bound(measure=True)  # what tests before have left
    for number in (0, blocks, 0):
        use(number)
        freed.bound(measure=True)
    freed.bound()
    return freed


def kept(freed: heap.FreedMemory, blocks: int) -> int:
    """Return by how many bytes the process has grown after an FSDP module that needs so many blocks."""
    before = heap.resident_bytes()
    use(blocks)
    freed.bound()
    return heap.resident_bytes() - before


@pytest.mark.usefixtures("little_creep")
def test_freed_memory_is_kept_as_far_as_a_fsdp_module_needs_it() -> None:
    """However large its blocks are."""
    assert kept(measured(4), 4) > 4 * 64 * MIB - 16 * MIB


@pytest.mark.usefixtures("little_creep")
def test_freed_memory_beyond_that_is_given_back() -> None:
    """And what the next FSDP module needs by itself is kept from then on."""
    freed = measured(1)
    assert kept(freed, 4) < 16 * MIB
    assert kept(freed, 4) > 4 * 64 * MIB - 16 * MIB


@pytest.mark.usefixtures("little_creep")
def test_memory_of_before_the_first_step_says_nothing() -> None:
    """A model that was in memory once leaves no room for a heap as large."""
    held = torch.ones(64 * MIB)
    freed = measured(1)
    del held
    freed.bound(measure=True)
    freed.bound()
    assert kept(freed, 4) < 16 * MIB


@pytest.mark.usefixtures("little_creep")
def test_what_a_larger_fsdp_module_cannot_use_is_given_back_before_it() -> None:
    """FSDP modules of one size go on with what the one before has freed."""
    freed = measured(0)
    for fsdp_module, blocks in (("layer", 2), ("head", 6), ("layer", 2)):
        freed.bound(fsdp_module, measure=True)
        use(blocks)
    freed.bound("end", measure=True)
    base = heap.resident_bytes()
    freed.bound("layer")
    for following in ("layer", "layer", "head"):
        use(2)
        freed.bound(following)
        kept = heap.resident_bytes() - base
        assert kept < 16 * MIB if following == "head" else kept > 2 * 64 * MIB - 16 * MIB
    use(6)
    freed.bound("layer")
    assert heap.resident_bytes() - base > 6 * 64 * MIB - 16 * MIB, "the process is as large as it has to be"


@pytest.mark.usefixtures("little_creep")
@pytest.mark.parametrize("first", [False, True])
def test_a_step_begins_with_little(first: bool) -> None:
    """What the largest FSDP module has freed behind the others is given back where the first may not find a
    use for it.
    """
    freed = measured(0)
    for fsdp_module, blocks in (("first", 2), ("head", 6)):
        freed.bound(fsdp_module, measure=True)
        use(blocks)
    freed.bound("first", measure=True)
    base = heap.resident_bytes()
    use(2)
    freed.bound("head")
    use(6)
    freed.bound("first", first=first)
    kept = heap.resident_bytes() - base
    assert kept < 16 * MIB if first else kept > 6 * 64 * MIB - 16 * MIB
