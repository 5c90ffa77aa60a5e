"""Training on several nodes gives the same losses as the same number of ranks on one node."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.node_training import train, uninterrupted
from support.nodes import Nodes, start_ranks
from support.ranks import RankPool

SHAPES = [(2, 1), (2, 2), (4, 1), pytest.param(4, 2, marks=pytest.mark.wide)]


@pytest.fixture(scope="module")
def on_one_node(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[list[float]]]:
    """Losses of a number of ranks on one node, by rank, computed once."""

    @functools.cache
    def losses(world_size: int) -> list[list[float]]:
        pool = RankPool(world_size)
        try:
            return pool.run(uninterrupted, tmp_path_factory.mktemp("one-node"))
        finally:
            pool.close()

    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("count", "ranks"), SHAPES)
def test_losses_equal_those_on_one_node(
    count: int, ranks: int, on_one_node: Callable[[int], list[list[float]]], tmp_path: Path
) -> None:
    """Each node has its own drive, and the run is resumed after its first checkpoint."""
    (results := tmp_path / "results").mkdir()
    with Nodes(tmp_path, count) as nodes:
        for program in start_ranks(nodes, ranks, train, str(nodes.local), str(results)):
            program.wait()
        for node in nodes:
            assert len(list(node.folder.glob("nvme0/*/rank*.pages"))) == ranks
    found = [json.loads((results / f"rank{rank}.json").read_text()) for rank in range(count * ranks)]
    assert found == on_one_node(count * ranks)
    assert len({losses[0] for losses in found}) == count * ranks  # each rank has its own data
