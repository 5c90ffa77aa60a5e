"""Tests of training on a simulated device: paging changes no bit, and all accesses are ordered.

They cover update schedules, host caches, ranks and interrupted runs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.device.cases import STEPS, compare_on_device, interrupt_and_resume
from support.device.simulation import KINDS
from support.device.tables import ALL, FEW, GPU_RESIDENT_PAGES, PAGINGS, RECIPES
from support.ranks import RankPool
from support.session import Session
from support.tables import alternate, one_of, variants
from support.train import Paging, Recipe


def rows(every: int) -> list[Any]:
    """Return (recipe, paging, kind) for all recipes and pagings; the kinds are chosen so that all pairs occur."""
    kinds, listed = list(KINDS), []
    for number, row in enumerate(variants(RECIPES, PAGINGS)):
        recipe, paging = divmod(number, len(PAGINGS))
        kind = kinds[(recipe + paging + paging // 2) % len(kinds)]
        listed.append(pytest.param(*row.values, kind, id=f"{row.id}-{kind}", marks=row.marks))
    return one_of(every, listed)


@pytest.mark.parametrize(("recipe", "paging", "kind"), rows(3))
def test_paging_changes_no_bit_on_a_device(recipe: Recipe, paging: Paging, kind: str, tmp_path: Path) -> None:
    """Every access to a page, a gradient or a number is also ordered after the accesses that it depends on."""
    assert compare_on_device(kind, recipe, paging, str(tmp_path)) == []


def with_gpu_resident_pages(every: int) -> list[Any]:
    """Return (recipe, paging, kind) for all recipes and all of `GPU_RESIDENT_PAGES`; the two kinds alternate."""
    kinds = [kind for kind in KINDS if kind.endswith("updates")]
    listed = [
        pytest.param(*row.values, kinds[number % 2], id=f"{row.id}-{kinds[number % 2]}", marks=row.marks)
        for number, row in enumerate(variants(RECIPES, GPU_RESIDENT_PAGES))
    ]
    return one_of(every, listed)


@pytest.mark.parametrize(("recipe", "paging", "kind"), with_gpu_resident_pages(5))
def test_gpu_resident_modules_change_no_bit(recipe: Recipe, paging: Paging, kind: str, tmp_path: Path) -> None:
    assert compare_on_device(kind, recipe, paging, str(tmp_path)) == []


@pytest.mark.parametrize(("recipe", "paging", "kind"), with_gpu_resident_pages(7))
def test_gpu_resident_modules_on_two_ranks(
    recipe: Recipe, paging: Paging, kind: str, tmp_path: Path, pair: RankPool
) -> None:
    paging = replace(paging, device=paging.device // 2)
    assert pair.run(compare_on_device, kind, recipe, paging, str(tmp_path)) == [[], []]


@pytest.mark.parametrize(
    ("paging", "kind"), alternate(("least-auto", "middle-forward", "least-after", "least-auto"), KINDS)
)
def test_full_parameter_updates_change_no_bit(paging: str, kind: str, tmp_path: Path) -> None:
    """Updates of full parameters run on the host or on the device."""
    recipe = Recipe(model="toy", steps=4, optimizer="trust_ratio")
    assert compare_on_device(kind, recipe, PAGINGS[paging], str(tmp_path)) == []


@pytest.mark.parametrize(("recipe", "paging", "kind"), rows(5))
def test_paging_changes_no_bit_on_two_ranks(
    recipe: Recipe, paging: Paging, kind: str, tmp_path: Path, pair: RankPool
) -> None:
    assert pair.run(compare_on_device, kind, recipe, paging, str(tmp_path)) == [[], []]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of an uninterrupted run."""
    with Session(tmp_path_factory.mktemp("undisturbed")) as session:
        return session.run(until=STEPS, every=2)


@pytest.mark.parametrize(("where", "kind"), one_of(2, alternate(("forward", "backward", "step", "between"), KINDS)))
def test_interrupted_training_is_resumed(where: str, kind: str, undisturbed: list[float], tmp_path: Path) -> None:
    """Training resumes bit for bit from the last checkpoint, and closing the run waits for pending copies."""
    assert interrupt_and_resume(kind, where, str(tmp_path)) == (undisturbed, [])


@pytest.mark.parametrize(
    ("where", "residency"),
    one_of(2, alternate(("forward", "backward", "step", "between"), (("order-updates", FEW), ("late-updates", ALL)))),
)
def test_gpu_resident_modules_are_resumed(
    where: str, residency: tuple[str, int], undisturbed: list[float], tmp_path: Path
) -> None:
    """The checkpoint contains their state, which is loaded once, after the first step."""
    kind, nbytes = residency
    assert interrupt_and_resume(kind, where, str(tmp_path), nbytes) == (undisturbed, [])
