"""Tests of the freed memory that the C library keeps during a run and after it."""

from __future__ import annotations

import multiprocessing
import platform
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import infinity
from infinity.heap import resident_bytes
from support import models
from support.processes import fork_server
from support.train import MIB, Paging, Recipe, make_optimizer, settings

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc can limit the freed memory that it keeps"
)
BLOCKS, BLOCK = 24, 8 * MIB
LEAST_KEPT = BLOCKS * BLOCK // 2


def kept() -> int:
    """Return how many freed bytes remain in the process while a later allocation is still in use."""
    held = [torch.ones(BLOCK, dtype=torch.uint8) for _ in range(BLOCKS)]
    last = torch.ones(256)  # without it, the blocks end the heap, which the C library would shrink
    before = resident_bytes()
    del held
    return BLOCKS * BLOCK - (before - resident_bytes()) + 0 * len(last)


def _in_child(pipe: Connection) -> None:
    pipe.send(kept())


def _measure(pipe: Connection, folder: str) -> None:
    torch.set_num_threads(1)  # a forked child has no OpenMP threads, so torch would wait for them forever
    recipe = Recipe(model="toy")
    runs = []
    for number in range(2):
        model = models.build(recipe.model)
        place = Path(folder, str(number))
        place.mkdir()
        runs.append(infinity.offload(model, make_optimizer(recipe, model), settings(place, Paging(), 64 * MIB)))
    found = {"during training": kept()}
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=_in_child, args=(theirs,))
    child.start()
    found["in a forked child"] = ours.recv()
    child.join()
    runs.pop().close()
    found["during another run"] = kept()
    runs.pop().close()
    found["after the last run"] = kept()
    pipe.send(found)


def test_freed_memory_is_returned_when_no_run_is_open(tmp_path: Path) -> None:
    """This matters for data loader workers and for notebooks that continue after a run."""
    context = fork_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(theirs, str(tmp_path)))
    process.start()
    assert ours.poll(120)
    found = ours.recv()
    process.join()
    keeps = {when: nbytes > LEAST_KEPT for when, nbytes in found.items()}
    assert keeps == {
        "during training": True, "in a forked child": False, "during another run": True, "after the last run": False,
    }, found  # fmt: skip
