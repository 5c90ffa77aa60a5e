"""Checkpoints of ranks that never trained, and nodes of one process that copy them from each other."""

from __future__ import annotations

import asyncio
import os
import random
import struct
from collections.abc import Sequence
from functools import reduce
from operator import xor
from pathlib import Path

import xxhash

from infinity.checkpoint.description import RunDescription, TensorSpec
from infinity.checkpoint.manifest import Manifest, checksum_of, write_manifest
from infinity.checkpoint.parity import FOLDER, Parity, Stream, cells_of, part_range, peers_of, read_index, verify
from infinity.checkpoint.parts import Part
from infinity.content.format import StateFormat
from infinity.content.layout import FSDPModuleSpec, ShardSpec, build_layout
from infinity.store.extents import Extent
from infinity.store.page_store import Version
from infinity.telemetry.stats_file import process_start
from infinity_daemon.copy_service import Copies
from infinity_daemon.daemon_config import CopiesConfig
from infinity_daemon.reservations import Owner

RUN = "20260101-000000-abcdef"
IDENTITY, LATER = "0" * 23 + "1", "0" * 23 + "2"
TOKEN = "ab" * 32
PAGE_BYTES = 16_384
OWNER = Owner(uid=os.getuid(), pid=os.getpid(), process_started=process_start(os.getpid()))


class Rank:
    """A rank with a checkpoint in the folder of its node, and a file for the parity that it stores."""

    def __init__(
        self, root, rank, pages, *, world=2, identity=IDENTITY, page_bytes=PAGE_BYTES, paths=2, slot="a", before=None,
        changed=(),
    ):  # fmt: skip
        """Write the checkpoint. If it follows another one (`before`), only the pages in `changed` are written."""
        self.root, self.rank, self.identity = Path(root) / RUN, rank, identity
        folder = self.root / "checkpoints"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        numel = pages * page_bytes // 4
        spec = FSDPModuleSpec(
            name="m",
            shards=(ShardSpec(name="w", numel=numel, padded=numel, segment_key="k", trainable=False),),
        )
        layout = build_layout((spec,), {"k": StateFormat(param="float32")}, page_bytes)
        tensor = TensorSpec(names=("w",), shape=(numel,), spans=(((0, numel),),))
        chance = random.Random(f"{rank} {identity}")
        self.files = [self.root / f"path{path}.pages" for path in range(paths)]
        versions, self.contents = (dict(before.manifest.pages), dict(before.contents)) if before else ({}, {})
        for file in self.files:
            file.touch()
            if before is None:
                os.truncate(file, 0)
        order = [page for page in layout.pages if before is None or page.index in changed]
        chance.shuffle(order)  # the order in the files differs from the stream
        for page in order:
            path = chance.randrange(paths)
            self.contents[page.index] = data = chance.randbytes(page.nbytes)
            extent = Extent(path, self.files[path].stat().st_size, page.nbytes)
            with self.files[path].open("ab") as file:
                file.write(data)
            versions[page.index] = Version(extent, xxhash.xxh3_64_intdigest(data, seed=page.index))
        self.stream = b"".join(data for _, data in sorted(self.contents.items()))
        self.state = chance.randbytes(50_000 if rank == 1 else 300)
        digest = "0" * 16
        self.manifest = Manifest(
            run_id=RUN,
            step=7,
            identity=identity,
            rank=rank,
            world_size=world,
            created=1.0,
            description=RunDescription(layout=layout, tensors=(tensor,), buffers=()),
            optimizer="None",
            stripe_weights=(1.0,) * paths,
            pages=versions,
            scalars={},
            groups=(),
            random={"python": [3, [0] * 625, None], "numpy": ["MT19937", 0, 0, 0.0]},
            state_checksum=checksum_of(self.state),
            extra={},
            parts=(Part("host", digest, digest, None),) * world,
        )
        (folder / self.manifest.state_file).write_bytes(self.state)
        write_manifest(folder, self.manifest)
        self.file = folder / self.manifest.file_name
        self.target = self.root / FOLDER / f"rank{rank:05d}.{slot}"
        self.target.parent.mkdir(mode=0o700, exist_ok=True)
        if not self.target.exists():
            self.target.write_bytes(b"\xff" * 4096)
            os.truncate(self.target, 1 << 20)

    def job(self, peers, *, nodes=2, rate=0):
        """Return the values of a request to copy. `peers` has the rank and the address of each peer."""
        return {
            "identity": self.identity,
            "manifest": str(self.file),
            "roots": [str(file) for file in self.files],
            "target": str(self.target),
            "peers": [{"rank": rank, "address": address} for rank, address in peers],
            "nodes": nodes,
            "rate": rate,
        }


class Node:
    """Daemon of a node, without its other parts. `ask` sends a request as the only rank of the node."""

    def __init__(self, rank, **settings):
        self.rank = rank
        self.alive = True
        settings = CopiesConfig(**{"host": "127.0.0.1", "port": 0, **settings})
        self.copies = Copies(settings, lambda owner: self.alive, several=False)

    async def __aenter__(self):
        await self.copies.start()
        return self

    async def __aexit__(self, *_):
        await self.copies.stop()

    async def ask(self, op, *, owner=OWNER, rank=None, **values):
        rule, act = self.copies.ops[f"copies_{op}"]
        return await act(owner, **rule({"run_id": RUN, "rank": self.rank if rank is None else rank, **values}))

    async def join(self, token=TOKEN, **values):
        return (await self.ask("join", token=token, **values))["address"]

    async def ended(self, **values):
        """Wait for the end of the copy, and return its progress."""
        while (progress := await self.ask("progress", **values))["busy"]:
            await asyncio.sleep(0.005)
        return progress

    async def until(self, condition):
        while not condition(await self.ask("progress")):
            await asyncio.sleep(0.005)


async def copied(ranks: Sequence[Rank], nodes: int, **settings):
    """Copy the checkpoints of all ranks, which form a ring, and return the progress of each rank."""
    ring = [rank.rank for rank in ranks]
    daemons = [Node(rank.rank, **settings) for rank in ranks]
    addresses = {}
    for daemon in daemons:
        await daemon.__aenter__()
        addresses[daemon.rank] = await daemon.join()
    try:
        for daemon, rank in zip(daemons, ranks, strict=True):
            peers = [(peer, addresses[peer]) for peer in peers_of(ring, rank.rank, nodes)]
            await daemon.ask("start", **rank.job(peers, nodes=nodes))
        return [await daemon.ended() for daemon in daemons]
    finally:
        for daemon in daemons:
            await daemon.__aexit__()


def expected_parity(ranks: Sequence[Rank], rank: Rank, nodes: int) -> bytes:
    """Return the parity that a rank of a ring must store, computed from whole integers."""
    by_rank = {each.rank: each for each in ranks}
    parts = []
    for part, peer in enumerate(peers_of(list(by_rank), rank.rank, nodes)):
        start, stop = part_range(len(by_rank[peer].stream), nodes, part)
        parts.append(by_rank[peer].stream[start:stop])
    length = max(map(len, parts))
    return reduce(xor, (int.from_bytes(part, "little") for part in parts)).to_bytes(length, "little")


def check_copy(ranks: Sequence[Rank], rank: Rank, nodes: int) -> None:
    """Check the parity file, the index, the checksums, and the copied manifests and state files of a rank."""
    index = read_index(rank.target)
    parity = expected_parity(ranks, rank, nodes)
    assert (index.identity, index.nodes, index.length) == (rank.identity, nodes, len(parity))
    assert rank.target.read_bytes()[: len(parity)] == parity
    folder = rank.target.with_name(f"{rank.target.name}.d")
    by_rank = {each.rank: each for each in ranks}
    names = {"index.json", "checksums"}
    verify(Parity(rank.rank, rank.target, index), RUN, lambda _: None)
    streams = [Stream(by_rank[peer.rank].manifest.pages) for peer in index.peers]
    checksums = b"".join(
        struct.pack("<Q", xxhash.xxh3_64_intdigest(parity[start:stop], seed=start))
        for start, stop, _ in cells_of(streams)
    )
    assert (folder / "checksums").read_bytes() == checksums
    for peer in index.peers:
        source = by_rank[peer.rank]
        assert peer.length == len(source.stream) == Stream(source.manifest.pages).length
        assert (folder / peer.manifest).read_bytes() == source.file.read_bytes()
        assert (folder / source.manifest.state_file).read_bytes() == source.state
        names |= {peer.manifest, source.manifest.state_file}
    assert {entry.name for entry in folder.iterdir()} == names
