"""Tests of activation paging on failing drives."""

from __future__ import annotations

import os
import shutil
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
from support.tables import WIDE
from support.train import Paging, Recipe, batch, faulty, offloaded

RECIPE = Recipe(model="toy", policy="fp32", sequences=150, checkpointing=True)
PAGING = Paging(activations="nvme")


class OnlyActivations:
    """Limit the faults of an engine to transfers of activations."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._submit = engine, engine.submit
        engine.submit = self._choose

    def _choose(self, op: Op, file: Any, offset: int, memory: memoryview) -> Any:
        self._engine.on = file.path.endswith(".activations")
        return self._submit(op, file, offset, memory)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run without faults."""
    return losses(tmp_path_factory.mktemp("undisturbed"), steps=4)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (Fault(kind=FaultKind.EIO, op=Op.READ), StorageError, r"read of .*rank00000\.activations failed: EIO"),
        (Fault(kind=FaultKind.EIO, op=Op.WRITE), StorageError, r"write of .*rank00000\.activations failed: EIO"),
        pytest.param(
            Fault(kind=FaultKind.ENOSPC, op=Op.WRITE),
            StorageError,
            r"write of .*\.activations failed: ENOSPC",
            marks=WIDE,
        ),
        (Fault(kind=FaultKind.FLIP), CorruptPageError, r"page activations/activation\[\d+\]"),
        pytest.param(Fault(kind=FaultKind.SHORT), StorageError, "short transfer", marks=WIDE),
    ],
    ids=["EIO-read", "EIO-write", "ENOSPC", "flipped", "short"],
)
def test_activation_fault_stops_the_run_but_keeps_the_checkpoint(
    fault: Fault, error: type[InfinityError], message: str, expected: list[float], tmp_path: Path
) -> None:
    """The error names the file or page, and a resumed run has the losses of a run without faults."""
    with faulty(fault, on=False) as engines, pytest.raises(error, match=message):
        losses(tmp_path / "disturbed", steps=4, begin=lambda: OnlyActivations(engines[-1]))
    assert losses(tmp_path / "disturbed", steps=4, run={"resume": "latest"}) == expected[2:]


def losses(folder: Path, steps: int, begin: Any = None, **sections: Any) -> list[float]:
    """Train and save a checkpoint after the second step; return the losses."""
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


def test_transient_activation_faults_are_retried(expected: list[float], tmp_path: Path) -> None:
    with faulty(Fault(kind=FaultKind.EIO, every=7), on=False) as engines:
        assert losses(tmp_path / "disturbed", steps=4, begin=lambda: OnlyActivations(engines[-1])) == expected
        assert engines[-1].struck > 3


def test_full_drive_raises_budget_error_in_the_first_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error reports the free and the required space."""

    def no_space(*arguments: Any) -> None:
        used = shutil.disk_usage(tmp_path)._replace(free=4096)
        with monkeypatch.context() as patch:
            patch.setattr(folder.shutil, "disk_usage", lambda _: used)
            extend(*arguments)

    extend = space_reservation.extend
    monkeypatch.setattr(space_reservation, "extend", no_space)
    found = (
        r"nvme0/\S+ has \S+ MiB free, including \S+ MiB that this run occupies, but this run needs .* \(No space left"
    )
    with pytest.raises(BudgetError, match=found):
        losses(tmp_path, steps=1)


def open_files() -> list[str]:
    """Return the paths of the files that this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return found


def test_activation_files_are_unlinked_and_freed_with_the_run(tmp_path: Path) -> None:
    """The files are not visible in the directory, and closing the run frees their space."""
    with offloaded(RECIPE, PAGING, tmp_path) as (model, optimizer):
        models.loss_of(model, batch(model, 0, RECIPE.sequences)).backward()
        optimizer.step()
        assert not list(tmp_path.rglob("*.activations"))
        assert any(name.endswith(".activations (deleted)") for name in open_files())
        kept, state = optimizer.run.activations.traffic.kept, optimizer.run.layout.state_bytes
        reserved = optimizer.run.stats.snapshot().value("tier_capacity_bytes", tier="nvme")
        assert reserved >= state + kept
    assert not any(".activations" in name for name in open_files())
