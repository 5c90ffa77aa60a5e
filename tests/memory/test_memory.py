"""Tests of host memory: it does not grow with the model, and freed memory is returned to the operating system."""

from __future__ import annotations

import gc
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from infinity import heap
from support.peak import ELEMENTS, train
from support.processes import fork_server

MIB = 1 << 20
HOST = 16 * MIB
GROUPS = Path("/sys/fs/cgroup/memory")


def peak(mode: str, layers: int, folder: Path) -> int:
    """Return the peak resident memory of a training process in bytes."""
    done = subprocess.run(
        [sys.executable, "-m", "support.peak", mode, str(layers), str(HOST), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["peak"]


@pytest.mark.wide
def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    """20 MiB are allowed for objects and heap growth; the bf16 weights would add 32 MiB."""
    layers = 8
    grown = 3 * layers * ELEMENTS - layers * ELEMENTS
    assert 2 * grown >= 32 * MIB
    small, large = (peak("paged", number, tmp_path) for number in (layers, 3 * layers))
    assert large - small < 20 * MIB


@pytest.mark.wide
def test_dcp_export_load_and_save_are_streamed(tmp_path: Path) -> None:
    """An export needs a fraction of its size; starting a run from it and saving in a run need no more than training."""
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
    """Create a memory cgroup, or skip the test if that is not possible."""
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


def train_in_group(mode: str, layers: int, folder: Path, group: Path) -> None:
    """Train in a memory cgroup, which is charged for all memory that this process allocates."""
    gc.freeze()  # otherwise the collector would copy the pages that this process shares with its parent
    (group / "cgroup.procs").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    losses = train(mode, layers, 0, folder)
    (folder / "losses").write_text(json.dumps(losses))


def test_training_fits_a_memory_limit_that_kills_training_in_memory(tmp_path: Path) -> None:
    """The limit is below half of the state, and the default size of the host cache fits."""
    layers, limit = 24, 160 * MIB
    assert 14 * layers * ELEMENTS / 2 > limit
    statuses = {}
    with memory_group(limit) as group:
        for mode in ("paged", "memory"):
            process = fork_server().Process(target=train_in_group, args=(mode, layers, tmp_path, group))
            process.start()
            process.join(900)
            statuses[mode] = process.exitcode
    assert statuses["paged"] == 0
    assert statuses["memory"] == -signal.SIGKILL
    assert len(set(json.loads((tmp_path / "losses").read_text()))) == 2


def allocate_and_free(blocks: int) -> None:
    """Write to blocks of 64 MiB, and free them."""
    held = [torch.ones(16 * MIB) for _ in range(blocks)]
    assert len(held) == blocks


@pytest.fixture
def little_creep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the tolerated heap growth to half a block."""
    monkeypatch.setattr(heap, "CREEP_BYTES", 32 * MIB)


def measured_freed_memory(blocks: int) -> heap.FreedMemory:
    """Return the bound of freed memory, measured in a step whose FSDP module needs the given number of blocks."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("only glibc can limit the freed memory that it keeps")
    freed = heap.FreedMemory()
    freed.bound(measure=True)  # memory that earlier tests have freed
    for number in (0, blocks, 0):
        allocate_and_free(number)
        freed.bound(measure=True)
    freed.bound()
    return freed


def kept(freed: heap.FreedMemory, blocks: int) -> int:
    """Return by how many bytes the process grows after an FSDP module that needs the given number of blocks."""
    before = heap.resident_bytes()
    allocate_and_free(blocks)
    freed.bound()
    return heap.resident_bytes() - before


@pytest.mark.usefixtures("little_creep")
def test_freed_memory_that_an_fsdp_module_needs_is_kept() -> None:
    assert kept(measured_freed_memory(4), 4) > 4 * 64 * MIB - 16 * MIB


@pytest.mark.usefixtures("little_creep")
def test_freed_memory_beyond_the_bound_is_returned() -> None:
    """Memory that the next FSDP module needs is kept from then on."""
    freed = measured_freed_memory(1)
    assert kept(freed, 4) < 16 * MIB
    assert kept(freed, 4) > 4 * 64 * MIB - 16 * MIB


@pytest.mark.usefixtures("little_creep")
def test_memory_before_the_first_step_is_not_counted() -> None:
    """A model that was loaded into memory does not raise the bound."""
    held = torch.ones(64 * MIB)
    freed = measured_freed_memory(1)
    del held
    freed.bound(measure=True)
    freed.bound()
    assert kept(freed, 4) < 16 * MIB


@pytest.mark.usefixtures("little_creep")
def test_freed_memory_is_returned_before_a_larger_fsdp_module() -> None:
    """FSDP modules of equal size reuse the memory that the previous one freed."""
    freed = measured_freed_memory(0)
    for fsdp_module, blocks in (("layer", 2), ("head", 6), ("layer", 2)):
        freed.bound(fsdp_module, measure=True)
        allocate_and_free(blocks)
    freed.bound("end", measure=True)
    base = heap.resident_bytes()
    freed.bound("layer")
    for following in ("layer", "layer", "head"):
        allocate_and_free(2)
        freed.bound(following)
        kept = heap.resident_bytes() - base
        assert kept < 16 * MIB if following == "head" else kept > 2 * 64 * MIB - 16 * MIB
    allocate_and_free(6)
    freed.bound("layer")
    assert heap.resident_bytes() - base > 6 * 64 * MIB - 16 * MIB, "the memory of the largest module must be kept"


@pytest.mark.usefixtures("little_creep")
@pytest.mark.parametrize("first", [False, True])
def test_freed_memory_is_returned_at_the_start_of_a_step(first: bool) -> None:
    """Memory that the largest FSDP module freed last is returned if the first module may not reuse it."""
    freed = measured_freed_memory(0)
    for fsdp_module, blocks in (("first", 2), ("head", 6)):
        freed.bound(fsdp_module, measure=True)
        allocate_and_free(blocks)
    freed.bound("first", measure=True)
    base = heap.resident_bytes()
    allocate_and_free(2)
    freed.bound("head")
    allocate_and_free(6)
    freed.bound("first", first=first)
    kept = heap.resident_bytes() - base
    assert kept < 16 * MIB if first else kept > 6 * 64 * MIB - 16 * MIB
