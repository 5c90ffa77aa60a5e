"""Geometry and index of the copies of checkpoints on other nodes. This module does not import torch.

[Note: copies on other nodes] The *stream* of a rank is the concatenation of the pages of its checkpoint, in the order
of their indices. Ranks with the same local rank form a *ring*, in the order of their nodes. A copy is spread over
`nodes` consecutive positions of the ring: the stream of a rank is divided into ``nodes - 1`` parts, and part j of the
rank at position k belongs to the *parity* of the rank at position ``k - 1 - j``. A parity is the XOR of ``nodes - 1``
parts of different ranks, each padded with zeros to the length of the longest one. Therefore a part can be computed from
the parity and the other parts in it, and the state of any one node can be computed from the other nodes. With 2 nodes,
the parity is a full copy of the next rank's stream.

A rank has two parity files, which are used alternately, so that an interrupted copy leaves the earlier one intact:

    <path>/RUN_ID/parity/rankR.a, rankR.b
    <path>/RUN_ID/parity/rankR.a.d/       manifests and state files of the other ranks, checksums, and the index

The index is written last. A parity file without an index is incomplete.

[Note: unchanged cells] A copy replaces only the cells of a parity file that have changed since the complete copy in
this file. A cell is unchanged if the same bytes of the same page versions contribute to it. Versions are the same if
their extents and checksums are. The extent alone proves nothing, because it may have been reused for a later version.
The 64-bit checksum is strong enough, because two contents of a page have the same one with a probability of 2**-64,
and readers of a page verify nothing else. The bytes of an unchanged cell are read and verified with a checksum of the
cell, because otherwise a bit flip on the drive would remain in every later copy, and be found when the copy is needed.
"""

from __future__ import annotations

import json
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from infinity.checkpoint.durable import write_durably
from infinity.checkpoint.manifest import (
    checksum_of,
    content_of,
    decode_manifest,
    published_among,
    read_state_file,
    using,
)
from infinity.content.layout import PAGE_ALIGNMENT
from infinity.errors import CheckpointError
from infinity.schema import at, brief, integer, record, sequence, text
from infinity.store.extents import Extent
from infinity.store.page_store import Version, read_version
from infinity.untrusted_files import read_regular, sync_folder

FOLDER = "parity"
"""Folder of the parity files in a run folder."""
SLOTS = ("a", "b")
"""Ends of the names of the two parity files of a rank."""
INDEX_NAME = "index.json"
CHECKSUMS_NAME = "checksums"
"""File with the checksum of every cell."""
CHECKSUM = struct.Struct("<Q")
"""Checksum in this file."""
_NAME = re.compile(rf"rank(\d{{5,}})\.({'|'.join(SLOTS)})", re.ASCII)
_FORMAT = 1
_MOST = 1 << 24  # maximum bytes of an index, which uses about 200 per peer


def parity_file(root: Path, rank: int, slot: str) -> Path:
    """Return the path of a parity file.

    Args:
        root: run folder on the path that contains the file.
        rank: rank that stores the parity.
        slot: one of `SLOTS`.
    """
    return root / FOLDER / f"rank{rank:05d}.{slot}"


def folder_of(target: Path) -> Path:
    """Return the folder for the index, the manifests and the state files that belong to a parity file."""
    return target.with_name(f"{target.name}.d")


def ring_of(nodes: Sequence[Sequence[int]], rank: int) -> list[int]:
    """Return the ring of a rank.

    Args:
        nodes: ranks of each node, in increasing order; nodes in the order of their first ranks. All nodes have the same
            number of ranks.
        rank: one of these ranks.
    """
    (local,) = (ranks.index(rank) for ranks in nodes if rank in ranks)
    return [ranks[local] for ranks in nodes]


def peers_of(ring: Sequence[int], rank: int, nodes: int) -> list[int]:
    """Return the ranks whose parts are in the parity of a rank: the first one contributes its part 0, and so on."""
    position = ring.index(rank)
    return [ring[(position + 1 + part) % len(ring)] for part in range(nodes - 1)]


def holders_of(ring: Sequence[int], rank: int, nodes: int) -> list[int]:
    """Return the ranks whose parities contain the parts of a rank: the first one contains part 0, and so on."""
    position = ring.index(rank)
    return [ring[(position - 1 - part) % len(ring)] for part in range(nodes - 1)]


def part_range(length: int, nodes: int, part: int) -> tuple[int, int]:
    """Return the first byte of a part of a stream, and the byte after its last one. They are equal for an empty part.

    Args:
        length: length of the stream.
        nodes: number of nodes over which the copy is spread.
        part: index of the part.
    """
    nbytes = -(-length // (nodes - 1))
    nbytes += -nbytes % PAGE_ALIGNMENT
    return min(part * nbytes, length), min((part + 1) * nbytes, length)


def parity_length(lengths: Sequence[int], nodes: int) -> int:
    """Return the length of a parity.

    Args:
        lengths: lengths of the streams of its peers, in the order of `peers_of`.
        nodes: number of nodes over which the copy is spread.
    """
    ranges = (part_range(length, nodes, part) for part, length in enumerate(lengths))
    return max(stop - start for start, stop in ranges)


class Piece(NamedTuple):
    """Consecutive bytes of a page."""

    page: int
    version: Version
    start: int
    """First byte in the page."""
    stop: int
    """Byte in the page after the last one."""


class Stream:
    """Pages of a rank's checkpoint as one sequence of bytes. [Note: copies on other nodes]

    Args:
        pages: version of every page, as in the manifest.
    """

    def __init__(self, pages: Mapping[int, Version]) -> None:
        self._pages = sorted(pages.items())
        self._starts = list(accumulate((version.extent.length for _, version in self._pages), initial=0))
        self._positions = {page: position for position, (page, _) in enumerate(self._pages)}

    @property
    def length(self) -> int:
        """Length of the stream in bytes."""
        return self._starts[-1]

    def range_of(self, page: int) -> tuple[int, int]:
        """Return the first byte of a page in the stream, and the byte after its last one."""
        position = self._positions[page]
        return self._starts[position], self._starts[position + 1]

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces of pages that form bytes [start, stop) of the stream."""
        position = bisect_right(self._starts, start) - 1
        while start < stop:
            first, last = self._starts[position], self._starts[position + 1]
            end = min(stop, last)
            yield Piece(*self._pages[position], start - first, end - first)
            start, position = end, position + 1


class Cell(NamedTuple):
    """Range of a parity to which each peer contributes bytes of at most one page. [Note: unchanged cells]"""

    start: int
    """First byte in the parity."""
    stop: int
    """Byte in the parity after the last one."""
    pieces: tuple[Piece, ...]
    """Contributions, whose XOR the range contains."""


def cells_of(streams: Sequence[Stream]) -> list[Cell]:
    """Return the cells of a parity, in order.

    Args:
        streams: streams of its peers, in the order of `peers_of`.
    """
    nodes = len(streams) + 1
    parts = [(stream, *part_range(stream.length, nodes, part)) for part, stream in enumerate(streams)]
    edges = {
        edge
        for stream, start, stop in parts
        for edge in accumulate((piece.stop - piece.start for piece in stream.pieces(start, stop)), initial=0)
    }
    return [
        Cell(
            low,
            high,
            tuple(
                piece
                for stream, start, stop in parts
                for piece in stream.pieces(min(start + low, stop), min(start + high, stop))
            ),
        )
        for low, high in pairwise(sorted(edges))
    ]


def stream_of(cells: Iterable[Cell]) -> Stream:
    """Return a parity as a stream of its cells. The index of a cell is the position of its first byte."""
    return Stream({start: Version(Extent(0, start, stop - start), 0) for start, stop, _ in cells})


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Rank that contributes to a parity."""

    rank: int
    length: int
    """Length of its stream."""
    manifest: str
    """File name of its manifest."""


@dataclass(frozen=True, kw_only=True)
class ParityIndex:
    """Contents of a complete parity file."""

    identity: str
    """Identity of the checkpoint."""
    peers: tuple[Peer, ...]
    """Contributors, in the order of their parts."""

    @property
    def nodes(self) -> int:
        """Number of nodes over which the copy is spread."""
        return len(self.peers) + 1

    @property
    def length(self) -> int:
        """Length of the parity in bytes."""
        return parity_length([peer.length for peer in self.peers], self.nodes)


_INDEX = record(
    ParityIndex,
    identity=text("[0-9a-f]{24}"),
    peers=sequence(record(Peer, rank=integer(0), length=integer(0), manifest=text()), least=1),
)
_ENVELOPE = record(checksum=text("[0-9a-f]{16}"), body=text())


def write_index(target: Path, index: ParityIndex) -> None:
    """Mark a parity file as complete. Its contents and folder must be durable. Raises `OSError`."""
    body = json.dumps({"format": _FORMAT, **asdict(index)}, sort_keys=True, separators=(",", ":"))
    envelope = json.dumps({"checksum": checksum_of(body.encode()), "body": body})
    write_durably(folder_of(target) / INDEX_NAME, envelope.encode())


def remove_index(target: Path) -> None:
    """Durably mark a parity file as incomplete, before its contents change. Raises `OSError`."""
    folder = folder_of(target)
    if (folder / INDEX_NAME).exists():
        (folder / INDEX_NAME).unlink()
        sync_folder(folder)


def read_index(target: Path) -> ParityIndex:
    """Read and validate the index of a parity file.

    Raises:
        CheckpointError: if the index cannot be read or is malformed. `__cause__` is a `FileNotFoundError` if the parity
            file is incomplete.
    """
    file = folder_of(target) / INDEX_NAME
    with using(file):
        outer = _ENVELOPE(json.loads(read_regular(file, _MOST)))
        if checksum_of(outer["body"].encode()) != outer["checksum"]:
            raise CheckpointError(f"{file} does not match its checksum")
        body = json.loads(outer["body"])
        if not isinstance(body, dict) or (found := body.pop("format", None)) != _FORMAT or type(found) is not int:
            raise CheckpointError(f"{file} has an unknown format: {brief(body)}")
        index: ParityIndex = at("the index", _INDEX, body)
        if len({peer.rank for peer in index.peers}) < len(index.peers):
            raise ValueError("a rank contributes twice")
        for peer in index.peers:
            names = published_among([peer.manifest])
            if [(name.rank, name.identity) for name in names] != [(peer.rank, index.identity)]:
                raise ValueError(f"{brief(peer.manifest)} is not the manifest of rank {peer.rank}")
        return index


class Parity(NamedTuple):
    """Complete parity file."""

    rank: int
    """Rank that stores the parity."""
    target: Path
    """Parity file."""
    contents: ParityIndex


def parities_in(roots: Iterable[Path], damaged: dict[Path, tuple[int, str]] | None = None) -> list[Parity]:
    """Return the complete parity files of a run, in order of their names.

    Args:
        roots: run folders on this node.
        damaged: receives the rank and the reason for every file that is ignored because it is too short, or because its
            index is damaged. An interrupted copy has no index.
    """
    found, ignored = [], {} if damaged is None else damaged
    for target in sorted(file for root in roots for file in (root / FOLDER).glob("rank*.?")):
        if match := _NAME.fullmatch(target.name):
            rank = int(match[1])
            try:
                index = read_index(target)
            except CheckpointError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    ignored[target] = rank, str(error)
                continue
            if (size := target.stat().st_size) >= index.length:
                found.append(Parity(rank, target, index))
            else:
                ignored[target] = rank, f"it has {size} bytes instead of {index.length}"
    return found


def xor(*contents: bytes | bytearray | memoryview) -> memoryview:
    """Return the XOR of contents, each padded with zeros to the length of the longest one."""
    longest, *others = sorted(contents, key=len, reverse=True)
    if not others:
        return memoryview(longest)
    import numpy as np  # commands that only list runs do not import it

    total = np.frombuffer(bytearray(longest), np.uint8)
    for content in others:
        total[: len(content)] ^= np.frombuffer(content, np.uint8)
    return total.data


def verify(parity: Parity, run_id: str, advance: Callable[[int], None]) -> None:
    """Verify a complete parity file, and the manifests and state files next to it.

    Args:
        parity: parity file.
        run_id: run that it belongs to.
        advance: function that is called before each read of the parity file with the number of bytes.

    Raises:
        CheckpointError, StorageError: if a file cannot be read or does not match its checksum.
    """
    folder, streams = folder_of(parity.target), []
    for peer in parity.contents.peers:
        content, name = content_of(folder / peer.manifest), Path(run_id, "checkpoints", peer.manifest)
        manifest = decode_manifest(name, content, decode=False)
        read_state_file(folder, manifest)
        streams.append(Stream(manifest.pages))
    cells = cells_of(streams)
    with using(folder / CHECKSUMS_NAME):
        content = read_regular(folder / CHECKSUMS_NAME, CHECKSUM.size * len(cells))
        if len(content) < CHECKSUM.size * len(cells):
            raise ValueError(f"it has {len(content)} bytes instead of {CHECKSUM.size * len(cells)}")
    for (start, stop, _), (expected,) in zip(cells, CHECKSUM.iter_unpack(content), strict=True):
        advance(stop - start)
        read_version(parity.target, start, Version(Extent(0, start, stop - start), expected), f"at byte {start}")
