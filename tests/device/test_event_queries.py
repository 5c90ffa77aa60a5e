"""Test that threads block in device events instead of querying them repeatedly."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.device.simulation import simulation
from support.train import Outcome, Paging, Recipe, offloaded, train


@pytest.mark.parametrize("kind", ["late", "late-updates"])
def test_number_of_queries_does_not_depend_on_how_late_copies_are(kind: str, tmp_path: Path) -> None:
    """A use or wait queries an event once and, if it has not passed, at most once more after it has."""
    recipe, queries = Recipe(model="toy", steps=4), {}
    for looks in (1, 5, 80):
        (folder := tmp_path / str(looks)).mkdir()
        with simulation(kind, looks=looks) as device:
            with offloaded(recipe, Paging(host_cache="least"), folder) as (model, optimizer):
                train(recipe, model, optimizer, Outcome())
            queries[looks] = device.streams.queries
    assert queries[1]
    assert max(queries.values()) <= 2 * queries[1], queries  # the number of uses depends slightly on their timing
