"""Tests of training on a simulated device: paging changes no bit, and all accesses are ordered.

They cover update schedules, host caches, ranks and interrupted runs. test_planted_defects.py shows that the simulation
finds missing synchronization in each part of the package.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.device.cases import STEPS, compare_on_device, interrupt_and_resume
from support.device.simulation import KINDS
from support.device.tables import ALL, FEW, GPU_RESIDENT_PAGES, PAGINGS, RECIPES
from support.ranks import RankPool
from support.session import Session
from support.tables import WIDE, alternate, one_of, with_kinds
from support.train import Paging, Recipe

ROWS = with_kinds(RECIPES, PAGINGS, KINDS)
GPU_RESIDENT_ROWS = with_kinds(RECIPES, GPU_RESIDENT_PAGES, [kind for kind in KINDS if kind.endswith("updates")])


@pytest.mark.parametrize(("recipe", "paging", "kind"), one_of(3, ROWS))
def test_paging_changes_no_bit_on_a_device(recipe: Recipe, paging: Paging, kind: str, tmp_path: Path) -> None:
    """Every access to a page, a gradient or a number is also ordered after the accesses that it depends on."""
    assert compare_on_device(kind, recipe, paging, str(tmp_path)) == []


@pytest.mark.parametrize(("recipe", "paging", "kind"), one_of(8, GPU_RESIDENT_ROWS))
def test_gpu_resident_modules_change_no_bit(recipe: Recipe, paging: Paging, kind: str, tmp_path: Path) -> None:
    assert compare_on_device(kind, recipe, paging, str(tmp_path)) == []


@pytest.mark.parametrize(("recipe", "paging", "kind"), one_of(9, GPU_RESIDENT_ROWS))
def test_gpu_resident_modules_on_two_ranks(
    recipe: Recipe, paging: Paging, kind: str, tmp_path: Path, pair: RankPool
) -> None:
    paging = replace(paging, device=paging.device // 2)
    assert pair.run(compare_on_device, kind, recipe, paging, str(tmp_path)) == [[], []]


@pytest.mark.parametrize(
    ("paging", "kind"), one_of(2, alternate(("least-auto", "middle-forward", "least-after", "all-auto"), KINDS))
)
def test_full_parameter_updates_change_no_bit(paging: str, kind: str, tmp_path: Path) -> None:
    """Updates of full parameters run on the host or on the device."""
    recipe = Recipe(model="toy", steps=3, optimizer="trust_ratio")
    assert compare_on_device(kind, recipe, PAGINGS[paging], str(tmp_path)) == []


@pytest.mark.parametrize(("recipe", "paging", "kind"), one_of(10, ROWS))
def test_paging_changes_no_bit_on_two_ranks(
    recipe: Recipe, paging: Paging, kind: str, tmp_path: Path, pair: RankPool
) -> None:
    assert pair.run(compare_on_device, kind, recipe, paging, str(tmp_path)) == [[], []]


def test_compiled_layers_change_no_bit(tmp_path: Path) -> None:
    """The layers are compiled, and training in memory compiles them in the same way."""
    paging = PAGINGS["least-auto-prefetched"]
    assert compare_on_device("late-updates", RECIPES["compiled"], paging, str(tmp_path)) == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of an uninterrupted run."""
    with Session(tmp_path_factory.mktemp("undisturbed")) as session:
        return session.run(until=STEPS, every=2)


INTERRUPTED = [
    pytest.param(where, kind, nbytes, marks=[] if (where, kind, nbytes) == ("forward", "order-updates", FEW) else WIDE)
    for where in ("forward", "backward", "step", "between")
    for kind, nbytes in (*dict.fromkeys(KINDS, 0).items(), ("order-updates", FEW), ("late-updates", ALL))
]


@pytest.mark.parametrize(("where", "kind", "device_bytes"), INTERRUPTED)
def test_interrupted_training_is_resumed(
    where: str, kind: str, device_bytes: int, undisturbed: list[float], tmp_path: Path
) -> None:
    """Training resumes bit for bit from the last checkpoint, and closing the run waits for pending copies.

    The checkpoint contains the state of GPU-resident modules, which is loaded once, after the first step.
    """
    assert interrupt_and_resume(kind, where, str(tmp_path), device_bytes) == (undisturbed, [])
