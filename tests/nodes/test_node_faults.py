"""Faults of a node: a message names them, and the run resumes from the checkpoint that its mode guarantees.

`make fault-matrix` tests all combinations of fault, mode, moment and node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import node_faults
from support.nodes import Nodes

PER_TEST = (
    "drive removed/full shard/checkpoint/node1",
    "power loss, drive wiped/mirror/copy/node0",
    "drive removed, wiped/copies/copy/node1",
    "daemon killed/copies/training/node1",
)
WIDE = (
    "(link cut|60 % packet loss|long pause|full drive)/full shard|wiped/(full shard|HSDP|copies)|"
    "daemon killed/.*/training"
)


@pytest.fixture(scope="module")
def expected() -> Iterator[node_faults.Expected]:
    """Losses of uninterrupted runs."""
    found = node_faults.Expected()
    yield found
    found.close()


def rows() -> list[object]:
    """Return the combinations to test."""
    return [
        pytest.param(each, id=each.name, marks=() if each.name in PER_TEST else pytest.mark.wide)
        for each in node_faults.trials()
        if each.name in PER_TEST or re.search(WIDE, each.name)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("result", rows())
def test_faults_lose_nothing(result: node_faults.Result, expected: node_faults.Expected, tmp_path: Path) -> None:
    with Nodes(tmp_path, 2) as nodes:
        node_faults.run(result, expected, nodes)
    assert not result.problems, "\n".join(result.problems)
