"""Tests of the geometry and the index of copies on other nodes."""

from __future__ import annotations

import json
import random
from functools import reduce
from operator import xor
from pathlib import Path

import pytest

from infinity.checkpoint import parity
from infinity.checkpoint.manifest import checksum_of
from infinity.checkpoint.parity import ParityIndex, Peer, Stream
from infinity.errors import CheckpointError
from infinity.store.extents import Extent
from infinity.store.page_store import Version

IDENTITY = "0123456789ab0123456789ab"


def test_ring_joins_the_ranks_with_the_same_local_rank() -> None:
    nodes = [[0, 2], [1, 4], [3, 5]]
    assert parity.ring_of(nodes, 4) == [2, 4, 5]
    assert parity.peers_of([2, 4, 5], 4, 3) == [5, 2]
    assert parity.holders_of([2, 4, 5], 4, 3) == [2, 5]


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 2), (3, 2), (3, 3), (5, 3), (6, 6)])
def test_holders_and_peers_are_inverse(ranks: int, nodes: int) -> None:
    ring = list(range(ranks))
    for rank in ring:
        for part, holder in enumerate(parity.holders_of(ring, rank, nodes)):
            assert holder != rank
            assert parity.peers_of(ring, holder, nodes)[part] == rank


@pytest.mark.parametrize("nodes", [2, 3, 4, 9])
@pytest.mark.parametrize("length", [0, 1, 4096, 10_000, 40_960])
def test_parts_cover_a_stream_without_overlap(length: int, nodes: int) -> None:
    ranges = [parity.part_range(length, nodes, part) for part in range(nodes - 1)]
    assert [byte for start, stop in ranges for byte in range(start, stop)] == list(range(length))
    assert all(start % 4096 == 0 for start, stop in ranges if start < stop)


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_state_of_any_node_is_computed_from_the_others(nodes: int) -> None:
    """The parities of a ring of 4, computed from whole integers, restore each stream."""
    lengths, ring = [20_480, 4096, 12_288, 28_672], [0, 1, 2, 3]
    streams = [random.Random(rank).randbytes(length) for rank, length in enumerate(lengths)]

    def part_of(rank: int, part: int) -> int:
        start, stop = parity.part_range(lengths[rank], nodes, part)
        return int.from_bytes(streams[rank][start:stop], "little")

    def parity_of(rank: int) -> int:
        return reduce(xor, (part_of(peer, part) for part, peer in enumerate(parity.peers_of(ring, rank, nodes))))

    for lost in ring:
        restored = b""
        for part, holder in enumerate(parity.holders_of(ring, lost, nodes)):
            others = (item for item in enumerate(parity.peers_of(ring, holder, nodes)) if item[1] != lost)
            found = reduce(xor, (part_of(peer, number) for number, peer in others), parity_of(holder))
            start, stop = parity.part_range(lengths[lost], nodes, part)
            restored += found.to_bytes(stop - start, "little")
        assert restored == streams[lost]


def test_stream_is_in_the_order_of_pages() -> None:
    first, second = Version(Extent(1, 8192, 4096), 1), Version(Extent(0, 0, 8192), 2)
    stream = Stream({5: second, 3: first})
    assert stream.length == 12_288
    assert stream.range_of(5) == (4096, 12_288)
    assert list(stream.pieces(0, 12_288)) == [(3, first, 0, 4096), (5, second, 0, 8192)]
    assert list(stream.pieces(4000, 5000)) == [(3, first, 4000, 4096), (5, second, 0, 904)]
    assert list(stream.pieces(4096, 4096)) == list(Stream({}).pieces(0, 0)) == []


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_cells_end_where_a_page_or_a_part_ends(nodes: int) -> None:
    """The cells are compared with the contributions to each 4 KiB of the parity."""
    chance, streams = random.Random(nodes), []
    for number in range(nodes - 1):
        lengths = [4096 * chance.randrange(1, 5) for _ in range(6 + number)]
        streams.append(Stream({page: Version(Extent(0, 0, length), page) for page, length in enumerate(lengths)}))
    expected: dict[int, list[tuple[int, int]]] = {}
    for part, stream in enumerate(streams):
        start, stop = parity.part_range(stream.length, nodes, part)
        for at in range(start, stop, 4096):
            (piece,) = stream.pieces(at, at + 4096)
            expected.setdefault(at - start, []).append((part, piece.page))
    cells = parity.cells_of(streams)
    found = {at: [piece.page for piece in cell.pieces] for cell in cells for at in range(cell.start, cell.stop, 4096)}
    assert found == {at: [page for _, page in pages] for at, pages in expected.items()}
    edges = {at for at in expected if not at or expected[at] != expected[at - 4096]}
    assert {cell.start for cell in cells} == edges
    assert all(piece.stop - piece.start <= cell.stop - cell.start for cell in cells for piece in cell.pieces)


def test_versions_of_a_cell_differ_in_extent_or_checksum() -> None:
    versions = [Version(Extent(0, 0, 4096), 1), Version(Extent(0, 0, 4096), 2), Version(Extent(0, 4096, 4096), 1)]
    assert len({cell for version in versions for cell in parity.cells_of([Stream({0: version})])}) == 3


def index_of(target: Path) -> ParityIndex:
    parity.folder_of(target).mkdir(parents=True)
    peers = tuple(
        Peer(rank=rank, length=10_000, manifest=f"step000000000001.rank{rank:05d}-of-00003.{IDENTITY}.json")
        for rank in (1, 2)
    )
    return ParityIndex(identity=IDENTITY, peers=peers)


def test_index_is_read_back(tmp_path: Path) -> None:
    target = parity.parity_file(tmp_path, 0, "a")
    index = index_of(target)
    parity.write_index(target, index)
    assert parity.read_index(target) == index
    assert (index.nodes, index.length) == (3, 8192)
    parity.remove_index(target)
    parity.remove_index(target)
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read: No such file"):
        parity.read_index(target)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"peers": []}, "must be a list of 1 or more items"),
        ({"format": 2}, "unknown format"),
        ({"identity": "f" * 24}, "is not the manifest of rank 1"),
        ({"more": 1}, "unknown key"),
    ],
)
def test_malformed_index_is_rejected(change: dict[str, object], problem: str, tmp_path: Path) -> None:
    target = parity.parity_file(tmp_path, 0, "b")
    parity.write_index(target, index_of(target))
    file = parity.folder_of(target) / parity.INDEX_NAME
    body = json.dumps({**json.loads(json.loads(file.read_text())["body"]), **change})
    file.write_text(json.dumps({"checksum": "0" * 16, "body": body}))
    with pytest.raises(CheckpointError, match="checksum"):
        parity.read_index(target)
    file.write_text(json.dumps({"checksum": checksum_of(body.encode()), "body": body}))
    with pytest.raises(CheckpointError, match=problem):
        parity.read_index(target)
