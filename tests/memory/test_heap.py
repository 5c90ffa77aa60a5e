"""What the C library keeps of freed memory while a run goes on, and behind it."""

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
from support.processes import ready_made
from support.train import MIB, Paging, Recipe, make_optimizer, settings

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told what to keep")
BLOCKS, BLOCK = 24, 8 * MIB
LEAST_KEPT = BLOCKS * BLOCK // 2


def kept() -> int:
    """Return how many bytes stay in the process of tensors that were freed, with one behind them that was not."""
    held = [torch.ones(BLOCK, dtype=torch.uint8) for _ in range(BLOCKS)]
    behind = torch.ones(256)  # else they are the end of the heap, which is cut off
    before = resident_bytes()
    del held
    return BLOCKS * BLOCK - (before - resident_bytes()) + 0 * len(behind)


def _in_child(pipe: Connection) -> None:
    pipe.send(kept())


def _measure(pipe: Connection, folder: str) -> None:
    torch.set_num_threads(1)  # a child has no OpenMP threads, and torch would wait for them for ever
    recipe = Recipe(model="toy")
    runs = []
    for number in range(2):
        model = models.build(recipe.model)
        place = Path(folder, str(number))
        place.mkdir()
        runs.append(infinity.offload(model, make_optimizer(recipe, model), settings(place, Paging(), 64 * MIB)))
    found = {"while it trains": kept()}
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=_in_child, args=(theirs,))
    child.start()
    found["in a child"] = ours.recv()
    child.join()
    runs.pop().close()
    found["while another one trains"] = kept()
    runs.pop().close()
    found["behind the last"] = kept()
    pipe.send(found)


def test_what_is_freed_goes_back_when_nobody_trains(tmp_path: Path) -> None:
    """In workers that load data, and in a notebook that goes on behind a run."""
    context = ready_made()
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(theirs, str(tmp_path)))
    process.start()
    assert ours.poll(120)
    found = ours.recv()
    process.join()
    keeps = {when: nbytes > LEAST_KEPT for when, nbytes in found.items()}
    assert keeps == {
        "while it trains": True, "in a child": False, "while another one trains": True, "behind the last": False,
    }, found  # fmt: skip
