"""On a simulated device paging changes no bit, and nothing is unordered:

update schedules, host caches, ranks and ends.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.device.cases import STEPS, compared, ended_and_resumed
from support.device.simulation import KINDS
from support.device.tables import ALL, FEW, GPU_RESIDENT_PAGES, PAGINGS, RECIPES
from support.ranks import RankPool
from support.session import Session
from support.tables import alternate, one_of, variants
from support.train import Paging, Recipe, compare

EDITS = {name: RECIPES[name] for name in ("clip-by-torch", "edit", "edit-clip")}
"""What no other test compares on the CPU itself."""


def rows(every: int) -> list[Any]:
    """Return (recipe, paging, kind): all recipes with all pagings, and a kind so that all pairs of two occur."""
    kinds, listed = list(KINDS), []
    for number, row in enumerate(variants(RECIPES, PAGINGS)):
        recipe, paging = divmod(number, len(PAGINGS))
        kind = kinds[(recipe + paging + paging // 2) % len(kinds)]
        listed.append(pytest.param(*row.values, kind, id=f"{row.id}-{kind}", marks=row.marks))
    return one_of(every, listed)


@pytest.mark.parametrize(("recipe", "paging", "kind"), rows(2))
def test_paging_changes_no_bit_on_a_device(recipe: Recipe, paging: Paging, kind: str, tmp_path: Path) -> None:
    """And every access of a page, a gradient or a number is ordered behind those that it has to be."""
    assert compared(kind, recipe, paging, str(tmp_path)) == []


def with_gpu_resident_pages(every: int) -> list[Any]:
    """Return (recipe, paging, kind) of all recipes with all pagings of `GPU_RESIDENT_PAGES`; both kinds in turn."""
    kinds = [kind for kind in KINDS if kind.endswith("updates")]
    listed = [
        pytest.param(*row.values, kinds[number % 2], id=f"{row.id}-{kinds[number % 2]}", marks=row.marks)
        for number, row in enumerate(variants(RECIPES, GPU_RESIDENT_PAGES))
    ]
    return one_of(every, listed)


@pytest.mark.parametrize(("recipe", "paging", "kind"), with_gpu_resident_pages(5))
def test_fsdp_modules_that_live_on_the_device_change_no_bit(
    recipe: Recipe, paging: Paging, kind: str, tmp_path: Path
) -> None:
    """All of them, or some, and what is done with them there is in one order."""
    assert compared(kind, recipe, paging, str(tmp_path)) == []


@pytest.mark.parametrize(("recipe", "paging", "kind"), with_gpu_resident_pages(7))
def test_fsdp_modules_that_live_on_the_devices_of_two_ranks(
    recipe: Recipe, paging: Paging, kind: str, tmp_path: Path, pair: RankPool
) -> None:
    """On every rank, each of which has half of every FSDP module."""
    paging = replace(paging, device=paging.device // 2)
    assert pair.run(compared, kind, recipe, paging, str(tmp_path)) == [[], []]


@pytest.mark.parametrize(
    ("paging", "kind"), alternate(("least-auto", "middle-forward", "least-after", "least-auto"), KINDS)
)
def test_parameters_that_are_updated_whole(paging: str, kind: str, tmp_path: Path) -> None:
    """Put together where they are updated: on the host, or on the device."""
    recipe = Recipe(model="toy", steps=4, optimizer="trust_ratio")
    assert compared(kind, recipe, PAGINGS[paging], str(tmp_path)) == []


@pytest.mark.parametrize(("recipe", "paging"), one_of(3, variants(EDITS, PAGINGS)))
def test_paging_changes_no_bit_on_the_cpu(recipe: Recipe, paging: Paging, tmp_path: Path) -> None:
    """The same trainings where nothing is asynchronous."""
    assert compare(recipe, paging, str(tmp_path)) == []


@pytest.mark.parametrize(("recipe", "paging", "kind"), rows(5))
def test_two_ranks(recipe: Recipe, paging: Paging, kind: str, tmp_path: Path, pair: RankPool) -> None:
    """On every rank."""
    assert pair.run(compared, kind, recipe, paging, str(tmp_path)) == [[], []]


@pytest.mark.parametrize(("where", "kind"), one_of(2, alternate(("forward", "backward", "step", "between"), KINDS)))
def test_a_training_that_ends_early_is_resumed(where: str, kind: str, tmp_path: Path) -> None:
    """From its last checkpoint, bit for bit; what is closed while it is being copied is waited for."""
    (tmp_path / "undisturbed").mkdir()
    with Session(tmp_path / "undisturbed") as session:
        expected = session.run(until=STEPS, every=2)
    losses, troubles = ended_and_resumed(kind, where, str(tmp_path))
    assert troubles == []
    assert losses == expected


@pytest.mark.parametrize(
    ("where", "home"),
    one_of(2, alternate(("forward", "backward", "step", "between"), (("order-updates", FEW), ("late-updates", ALL)))),
)
def test_fsdp_modules_that_live_on_the_device_are_resumed(where: str, home: tuple[str, int], tmp_path: Path) -> None:
    """From what a checkpoint has sent to the drives; they are loaded once, behind the first step."""
    (tmp_path / "undisturbed").mkdir()
    with Session(tmp_path / "undisturbed") as session:
        expected = session.run(until=STEPS, every=2)
    kind, nbytes = home
    losses, troubles = ended_and_resumed(kind, where, str(tmp_path), nbytes)
    assert troubles == []
    assert losses == expected
