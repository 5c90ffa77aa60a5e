"""Drives that fail while activations are on them: a clear error, nothing lost, and nothing left."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from infinity.errors import BudgetError, CorruptPageError, InfinityError, StorageError
from infinity.io import Op
from infinity.run import space_reservation
from infinity.store import folder
from support import models
from support.fault_engine import Fault, FaultKind
from support.train import Paging, Recipe, batch, faulty, offloaded

RECIPE = Recipe(model="toy", sequences=300, checkpointing=True)
PAGING = Paging(activations="nvme")


class OnlyActivations:
    """What makes an engine's faults strike transfers of activations alone."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._submit = engine, engine.submit
        engine.submit = self._choose

    def _choose(self, op: Op, file: Any, offset: int, memory: memoryview) -> Any:
        self._engine.on = file.path.endswith(".activations")
        return self._submit(op, file, offset, memory)


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        (Fault(kind=FaultKind.EIO, op=Op.READ), StorageError, r"read of .*rank00000\.activations failed: EIO"),
        (Fault(kind=FaultKind.EIO, op=Op.WRITE), StorageError, r"write of .*rank00000\.activations failed: EIO"),
        (Fault(kind=FaultKind.ENOSPC, op=Op.WRITE), StorageError, r"write of .*\.activations failed: ENOSPC"),
        (Fault(kind=FaultKind.FLIP), CorruptPageError, r"page activations/activation\[\d+\]"),
        (Fault(kind=FaultKind.SHORT), StorageError, "short transfer"),
    ],
    ids=["EIO-read", "EIO-write", "ENOSPC", "flipped", "short"],
)
def test_a_fault_ends_the_run_and_the_checkpoint_is_good(
    fault: Fault, error: type[InfinityError], says: str, tmp_path: Path
) -> None:
    """The error names the file, and another run goes on with the losses that this one would have had."""
    expected = losses(tmp_path / "undisturbed", steps=4)
    with faulty(fault, on=False) as engines, pytest.raises(error, match=says):
        losses(tmp_path / "disturbed", steps=4, begin=lambda: OnlyActivations(engines[-1]))
    assert losses(tmp_path / "disturbed", steps=4, run={"resume": "latest"}) == expected[2:]


def losses(folder: Path, steps: int, begin: Any = None, **sections: Any) -> list[float]:
    """Train with a checkpoint behind two steps; return the losses."""
    folder.mkdir(exist_ok=True)
    found = []
    with offloaded(RECIPE, PAGING, folder, **sections) as (model, optimizer):
        for step in range(optimizer.steps, steps):
            if step == 2 and begin is not None:
                begin()
            loss = models.loss_of(model, batch(model, step, RECIPE.sequences))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            if step == 1:
                optimizer.save_checkpoint()
    return found


def test_faults_that_pass_are_gone_over(tmp_path: Path) -> None:
    """Each transfer is tried again, as those of the state are."""
    expected = losses(tmp_path / "undisturbed", steps=4)
    with faulty(Fault(kind=FaultKind.EIO, every=7), on=False) as engines:
        assert losses(tmp_path / "disturbed", steps=4, begin=lambda: OnlyActivations(engines[-1])) == expected
        assert engines[-1].struck > 3


def test_a_full_drive_is_told_in_the_first_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both sizes, and nothing is lost."""

    def full(descriptor: int, file: Path, begin: int, end: int) -> None:
        raise folder._no_room(file, end - begin, 4096, os.strerror(28))

    monkeypatch.setattr(space_reservation, "extend", full)
    with pytest.raises(BudgetError, match=r"nvme0/\S+ has 4 KiB free, but this run needs .* there \(No space left"):
        losses(tmp_path, steps=1)


def open_files() -> list[str]:
    """Return what this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return found


def test_files_have_no_name_and_go_with_the_run(tmp_path: Path) -> None:
    """Whoever looks into the folders finds none, and the space is free behind the end."""
    with offloaded(RECIPE, PAGING, tmp_path) as (model, optimizer):
        models.loss_of(model, batch(model, 0, RECIPE.sequences)).backward()
        optimizer.step()
        assert not list(tmp_path.rglob("*.activations"))
        assert any(name.endswith(".activations (deleted)") for name in open_files())
        kept, state = optimizer.run.activations.traffic.kept, optimizer.run.layout.state_bytes
        reserved = optimizer.run.stats.snapshot().value("tier_capacity_bytes", tier="nvme")
        assert reserved >= state + kept
    assert not any(".activations" in name for name in open_files())
