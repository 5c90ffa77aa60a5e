"""Copying of parts of the checkpoints of other nodes into a parity file. `infinity.checkpoint.parity` has the geometry.

The parity is written from its first byte to its last one, so its first bytes are complete at any time, and an
interrupted copy of the same checkpoint continues after them. Each part is requested once per byte of the parity, in the
same order, from the daemon of its node. Cells that are unchanged since the complete copy in the same file are not
requested, but read and verified. [Note: unchanged cells]
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import struct
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import aiofiles
import xxhash

from infinity.checkpoint.manifest import Manifest, Published, decode_manifest
from infinity.checkpoint.parity import (
    CHECKSUM,
    CHECKSUMS_NAME,
    Cell,
    ParityIndex,
    Peer,
    Piece,
    Stream,
    cells_of,
    folder_of,
    parity_length,
    part_range,
    read_index,
    remove_index,
    stream_of,
    write_index,
    xor,
)
from infinity.errors import CheckpointError, InfinityError
from infinity.io.pace import Pace
from infinity.schema import integer, record
from infinity.units import MIB
from infinity.untrusted_files import open_own, own_folder, read_own, sync_folder, write_own
from infinity_daemon.copy_channel import LATER, MAX_DATA_BYTES, OK, Channel, ChannelError, parsed
from infinity_daemon.copy_source import MAX_MANIFEST_BYTES, Source, in_thread, until_done
from infinity_daemon.log import event

_PATIENCE_SECONDS: Final = 300.0
"""Time without any progress after which a copy fails. The ranks start their copies within a few seconds."""
_PAUSE_SECONDS: Final = 0.5
"""Time before a failed connection is repeated."""
_AHEAD: Final = 2
"""Number of requests per peer that are under way, so that reading, hashing and writing overlap."""
_SYNC_BYTES: Final = 64 * MIB
"""Number of bytes after which the parity file is flushed, and the progress recorded."""
_PROGRESS_NAME: Final = "progress.json"
_MOST_PROGRESS: Final = 1 << 20
_SIZES = record(manifest=integer(0, MAX_MANIFEST_BYTES), state=integer(0, 1 << 40), pages=integer(0))
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Contributor:
    """Rank on another node whose part is copied."""

    rank: int
    address: str
    """Host and port of its daemon."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Request of a rank to copy parts of a checkpoint. `nodes` is the number of nodes over which a copy is spread."""

    identity: str
    target: Path
    """Parity file, which exists and is long enough."""
    contributors: Sequence[Contributor]
    """Contributors, in the order of their parts."""
    nodes: int
    rate: int
    """Maximum number of bytes per second, or 0 for no limit."""


Connect = Callable[[Contributor], Awaitable[Channel]]
"""Function that opens a channel to the daemon of a contributor. Raises `ChannelError`."""


class Pull:
    """One copy. `run` returns once it is complete and durable."""

    def __init__(self, job: Job, own: Source, connect: Connect, threads: Executor) -> None:
        """Initialize without a connection. `own` is the same checkpoint of the rank that stores the copy."""
        self.received = 0
        """Bytes of pages that have arrived."""
        self._job, self._own, self._connect, self._threads = job, own.manifest, connect, threads
        self._folder = folder_of(job.target)
        self._position = 0  # length of the parity that has been written
        self._synced = 0  # length of the parity that survives a power loss
        self._pace = Pace(job.rate)
        # With a limit, a request is for at most a second, so that no message times out. The memory does not grow with
        # the number of peers.
        total = min(job.rate or MAX_DATA_BYTES, MAX_DATA_BYTES)
        self._step = max(total // len(job.contributors) // 4096 * 4096, 4096)
        self._moved = time.monotonic()  # time of the last progress
        self._verified: set[tuple[int, int]] = set()  # rank and index of pages that their peers have verified
        self._manifests: dict[int, Manifest] = {}  # manifests whose files are complete, by rank
        self._earlier: dict[Cell, int] = {}  # cells of the complete copy in the parity file, and their checksums
        self._cells: Sequence[Cell] = ()
        self._changed: list[tuple[int, int]] = []  # ranges of the parity that are copied
        self._checksums: dict[int, int] = {}  # checksums of the cells that are written or verified, by first byte
        self._recorded = 0  # number of checksums that survive a power loss
        self._digests = PageDigests(Stream({}))  # of the cells

    @property
    def waited(self) -> float:
        """Seconds since the last progress."""
        return max(0.0, time.monotonic() - self._moved)

    async def _paced(self, nbytes: int) -> None:
        """Wait as long as the rate requires for a number of bytes. This time does not count as a stall."""
        delay = self._pace.delay(nbytes)
        self._moved = min(self._moved, time.monotonic()) + delay
        await asyncio.sleep(delay)

    async def run(self) -> None:
        """Copy all parts.

        Raises:
            InfinityError: if a peer does not serve the checkpoint in time, or has corrupt data.
            OSError: if a local file cannot be written.
        """
        opened = aiofiles.open(self._job.target, "r+b", buffering=0, opener=open_own, executor=self._threads)
        async with opened as file:
            if await self._in_thread(self._is_complete):
                return
            self._position = self._synced = await self._in_thread(self._prepare)
            await self._connected(self._files)
            await self._compare(file.fileno())  # without connections, which would time out meanwhile
            await self._connected(partial(self._pages, file))
            await self._in_thread(self._sync, file.fileno())
        await self._in_thread(self._publish)

    async def _connected(self, act: Callable[[Sequence[Channel]], Awaitable[None]]) -> None:
        """Call a function with channels to all peers until no connection fails.

        Raises:
            InfinityError: if there has been no progress for too long.
        """
        while True:
            try:
                async with AsyncExitStack() as stack:
                    channels = []
                    for peer in self._job.contributors:
                        channels.append(await self._connect(peer))
                        stack.callback(channels[-1].close)
                    return await act(channels)
            except ChannelError as error:
                if self.waited > _PATIENCE_SECONDS:
                    raise InfinityError(f"no progress for {self.waited:.0f} s: {error}") from error
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _in_thread(self, act: Callable[..., _T], *arguments: Any) -> _T:
        return await in_thread(self._threads, act, *arguments)

    async def _ask(self, channel: Channel, **request: object) -> None:
        await channel.send(OK, json.dumps({"identity": self._job.identity, **request}).encode())

    async def _answer(self, peer: Contributor, channel: Channel, length: int | None = None) -> bytes:
        kind, content = await channel.receive(MAX_DATA_BYTES)
        if kind != OK:
            why = content.decode(errors="replace")
            raise (ChannelError if kind == LATER else InfinityError)(f"rank {peer.rank} at {peer.address}: {why}")
        if length not in (None, len(content)):
            raise ChannelError(f"rank {peer.rank} sent {len(content)} bytes instead of {length}")
        return content

    # State of the local files; these methods run in threads #

    def _key(self) -> tuple[str, int, list[int]]:
        return self._job.identity, self._job.nodes, [peer.rank for peer in self._job.contributors]

    def _index(self) -> ParityIndex | None:
        """Return the index of the parity file if it contains a complete copy of a checkpoint of the same peers."""
        with suppress(CheckpointError):
            index = read_index(self._job.target)
            if [peer.rank for peer in index.peers] == [peer.rank for peer in self._job.contributors]:
                return index
        return None

    def _is_complete(self) -> bool:
        return (index := self._index()) is not None and index.identity == self._job.identity

    def _prepare(self) -> int:
        """Return the length that an interrupted copy of the same checkpoint has written, or remove its files."""
        earlier = self._complete_cells()
        remove_index(self._job.target)
        own_folder(self._folder, parents=False)
        with suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads(read_own(self._folder / _PROGRESS_NAME, _MOST_PROGRESS))
            if (found["identity"], found["nodes"], found["peers"]) == self._key():
                return int(found["written"])
        self._earlier = earlier
        for name in os.listdir(self._folder):
            (self._folder / name).unlink()
        write_own(self._folder / CHECKSUMS_NAME, b"")
        return 0

    def _complete_cells(self) -> dict[Cell, int]:
        """Return the cells of the complete copy in the parity file and their checksums, or nothing if there is none."""
        if (index := self._index()) is None:
            return {}
        with suppress(CheckpointError, OSError, ValueError, struct.error):
            streams = []
            for name in (peer.manifest for peer in index.peers):
                content = read_own(self._folder / name, MAX_MANIFEST_BYTES)
                streams.append(Stream(decode_manifest(self._place(name), content, decode=False).pages))
            cells = cells_of(streams)
            content = read_own(self._folder / CHECKSUMS_NAME, CHECKSUM.size * len(cells))
            return {cell: checksum for cell, (checksum,) in zip(cells, CHECKSUM.iter_unpack(content), strict=True)}
        return {}

    def _place(self, name: str) -> Path:
        """Return a path of a manifest of the run, for the check of the run id."""
        return Path(self._own.run_id, "checkpoints", name)

    def _sync(self, descriptor: int) -> None:
        """Flush the written data, drop it from the page cache, and record the progress."""
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        first, end = self._recorded, bisect_right(self._cells, self._position, key=lambda cell: cell.stop)
        content = b"".join(CHECKSUM.pack(self._checksums[cell.start]) for cell in self._cells[first:end])
        _change(self._folder / CHECKSUMS_NAME, content, first * CHECKSUM.size)
        self._recorded = end
        progress = dict(zip(("identity", "nodes", "peers"), self._key(), strict=True)) | {"written": self._position}
        write_own(self._folder / _PROGRESS_NAME, json.dumps(progress).encode(), durable=True)
        self._synced = self._position

    def _publish(self) -> None:
        job = self._job
        peers = tuple(
            Peer(rank=peer.rank, length=self._stream(peer).length, manifest=self._name(peer).file_name)
            for peer in job.contributors
        )
        sync_folder(self._folder)
        write_index(job.target, ParityIndex(identity=job.identity, peers=peers))
        (self._folder / _PROGRESS_NAME).unlink()

    def _name(self, peer: Contributor) -> Published:
        return self._own.name.checkpoint.of(peer.rank)

    def _stream(self, peer: Contributor) -> Stream:
        return Stream(self._manifests[peer.rank].pages)

    # Copying #

    async def _files(self, channels: Sequence[Channel]) -> None:
        for peer, channel in zip(self._job.contributors, channels, strict=True):
            if peer.rank not in self._manifests:
                self._manifests[peer.rank] = await self._files_of(peer, channel)

    async def _files_of(self, peer: Contributor, channel: Channel) -> Manifest:
        """Copy the manifest and the state file of a peer, and return the manifest."""
        name = self._name(peer)
        await self._ask(channel, op="sizes")
        sizes = parsed(await self._answer(peer, channel), _SIZES)
        content = bytearray()
        await self._file(peer, channel, "manifest", sizes["manifest"], name.file_name, content.extend)
        decode = partial(decode_manifest, decode=False)
        manifest = await self._in_thread(decode, self._place(name.file_name), content)
        digest = xxhash.xxh3_64()
        await self._file(peer, channel, "state", sizes["state"], name.state_file, digest.update)
        if digest.hexdigest() != manifest.state_checksum:
            raise CheckpointError(f"the state file of rank {peer.rank} does not match its checksum")
        return manifest

    async def _file(
        self, peer: Contributor, channel: Channel, kind: str, size: int, name: str, use: Callable[[bytes], object]
    ) -> None:
        """Copy a file to the folder of the parity file, and call `use` with its contents."""
        file = self._folder / name
        await self._in_thread(write_own, file, b"")
        for offset in range(0, size, self._step):
            length = min(self._step, size - offset)
            await self._paced(length)
            await self._ask(channel, op="read", file=kind, offset=offset, length=length)
            data = await self._answer(peer, channel, length)
            await self._in_thread(_change, file, data, offset)
            use(data)
            self._moved = time.monotonic()

    async def _compare(self, descriptor: int) -> None:
        """Determine the ranges to copy: the cells that are not unchanged, or are damaged on the drive."""
        self._cells = await self._in_thread(cells_of, [self._stream(peer) for peer in self._job.contributors])
        self._digests = PageDigests(stream_of(self._cells))
        await self._in_thread(self._continue)
        for cell in islice(self._cells, self._recorded, None):
            if (expected := self._earlier.get(cell)) is not None:
                await self._paced(cell.stop - cell.start)
                found = await self._in_thread(_checksum_on_drive, descriptor, cell.start, cell.stop)
                self._moved = time.monotonic()
                if found == expected:
                    self._checksums[cell.start] = found
                    continue
                event(logging.WARNING, "copy.damaged", file=self._job.target, offset=cell.start, until=cell.stop)
            if self._changed and self._changed[-1][1] == cell.start:
                self._changed[-1] = self._changed[-1][0], cell.stop
            else:
                self._changed.append((cell.start, cell.stop))
        self._earlier = {}

    def _continue(self) -> None:
        """Move the position of an interrupted copy back to the end of a cell whose checksum was recorded."""
        content = read_own(self._folder / CHECKSUMS_NAME, CHECKSUM.size * len(self._cells))
        recorded = CHECKSUM.iter_unpack(content[: len(content) // CHECKSUM.size * CHECKSUM.size])
        position, self._position = self._position, 0
        for cell, (checksum,) in zip(self._cells, recorded, strict=False):
            if cell.stop > position:
                break
            self._checksums[cell.start], self._position = checksum, cell.stop
            self._recorded += 1
        self._synced = self._position

    def _left(self) -> list[tuple[int, int]]:
        """Return the ranges that remain to be copied from the current position on."""
        return [(max(start, self._position), stop) for start, stop in self._changed if stop > self._position]

    async def _pages(self, file: Any, channels: Sequence[Channel]) -> None:
        """Copy changed ranges from the current position on."""
        job, streams = self._job, [self._stream(peer) for peer in self._job.contributors]
        length = parity_length([stream.length for stream in streams], job.nodes)
        if (size := os.fstat(file.fileno()).st_size) < length:
            raise InfinityError(f"{job.target} has {size} bytes, but the copy needs {length}")
        links = []
        for part, (peer, channel, stream) in enumerate(zip(job.contributors, channels, streams, strict=True)):
            start, stop = part_range(stream.length, job.nodes, part)
            manifest, digests = self._manifests[peer.rank], PageDigests(stream)
            links.append(_Link(peer, channel, manifest, stream, start, stop, digests))
        await asyncio.gather(*(self._verify(link) for link in links))
        rounds = (
            (at, min(self._step, stop - at)) for start, stop in self._left() for at in range(start, stop, self._step)
        )
        asked: deque[tuple[int, int]] = deque()
        writing: asyncio.Task[None] | None = None
        try:
            while True:
                for further in islice(rounds, (1 if job.rate else _AHEAD) - len(asked)):
                    await self._request(links, *further)
                    asked.append(further)
                if not asked:
                    break
                at, step = asked.popleft()
                contents = await asyncio.gather(*(self._content(link, at, step) for link in links))
                data = await self._in_thread(_combined, links, contents, at)
                if writing is not None:
                    await writing
                writing = asyncio.create_task(self._write(file, at, data))
            if writing is not None:
                await writing
            self._position = length
        finally:
            if writing is not None:  # after an error, the position must be final, and no write may be left over
                await until_done(writing)
                writing.exception()

    async def _verify(self, link: _Link) -> None:
        """Let the peer verify the pages that are only received in part, at the ends of the ranges."""
        offsets = {}
        for at in {min(link.start + end, link.stop) for ends in self._left() for end in ends}:
            for piece in link.stream.pieces(at, min(at + 1, link.stream.length)):
                if piece.start and (link.peer.rank, piece.page) not in self._verified:
                    offsets[piece.page] = at, piece.version.extent.length
        for page, (at, nbytes) in offsets.items():
            await self._paced(nbytes)
            await self._ask(link.channel, op="verify", file="pages", offset=at, length=1)
            await self._answer(link.peer, link.channel, 0)
            self._verified.add((link.peer.rank, page))
            self._moved = time.monotonic()

    async def _request(self, links: Sequence[_Link], at: int, step: int) -> None:
        await self._paced(sum(link.length(at, step) for link in links))
        for link in links:
            if count := link.length(at, step):
                await self._ask(link.channel, op="read", file="pages", offset=link.start + at, length=count)

    async def _content(self, link: _Link, at: int, step: int) -> bytes:
        if not (count := link.length(at, step)):
            return b""
        content = await self._answer(link.peer, link.channel, count)
        self.received += count
        return content

    def _put(self, descriptor: int, data: memoryview, at: int) -> None:
        _write_all(descriptor, data, at)
        for cell, checksum in self._digests.feed(at, data):
            self._checksums[cell.page] = checksum

    async def _write(self, file: Any, at: int, data: memoryview) -> None:
        await self._in_thread(self._put, file.fileno(), data, at)
        self._position, self._moved = at + len(data), time.monotonic()
        if self._position - self._synced >= _SYNC_BYTES:
            await self._in_thread(self._sync, file.fileno())


class PageDigests:
    """Checksums of pages whose bytes arrive in the order of a stream, possibly with gaps."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._at = stream, 0
        self._digest: xxhash.xxh3_64 | None = None  # of the page at the current position, if it has no gaps

    def feed(self, at: int, content: bytes | memoryview) -> list[tuple[Piece, int]]:
        """Continue with the bytes at a position. Return the last piece and the checksum of each complete page."""
        view, done, complete = memoryview(content), 0, []
        if at != self._at:
            self._digest = None
        for piece in self._stream.pieces(at, at + len(view)):
            end = done + piece.stop - piece.start
            if piece.start == 0:
                self._digest = xxhash.xxh3_64(seed=piece.page)
            if self._digest is not None:
                self._digest.update(view[done:end])
                if piece.stop == piece.version.extent.length:
                    complete.append((piece, self._digest.intdigest()))
            done = end
        self._at = at + len(view)
        return complete


class _Link(NamedTuple):
    """Connection to a peer, and the range of its part in its stream."""

    peer: Contributor
    channel: Channel
    manifest: Manifest
    stream: Stream
    start: int
    stop: int
    digests: PageDigests

    def length(self, at: int, step: int) -> int:
        """Return how many bytes the part has at position `at` of the parity, up to `step`."""
        return max(0, min(step, self.stop - self.start - at))


def _write_all(descriptor: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, at)
        view, at = view[done:], at + done


def _change(file: Path, data: bytes, at: int) -> None:
    """Durably write bytes at a position of a file."""
    descriptor = open_own(file, os.O_WRONLY)
    try:
        _write_all(descriptor, data, at)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum_on_drive(descriptor: int, start: int, stop: int) -> int | None:
    """Return the checksum of a cell of a parity file, or None if it cannot be read."""
    digest, at = xxhash.xxh3_64(seed=start), start
    with suppress(OSError):
        os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)  # not the page cache
        while at < stop and (data := os.pread(descriptor, min(stop - at, MAX_DATA_BYTES), at)):
            digest.update(data)
            at += len(data)
        os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)
    return digest.intdigest() if at == stop else None


def _combined(links: Sequence[_Link], contents: Sequence[bytes], at: int) -> memoryview:
    """Return the XOR of contents at a position of the parity, padded with zeros to the longest one.

    Complete pages are verified. The peers verify the other ones.

    Raises:
        CheckpointError: if a page does not match its checksum.
    """
    for link, content in zip(links, contents, strict=True):
        for piece, found in link.digests.feed(link.start + at, content):
            if found != piece.version.checksum:
                name, rank = link.manifest.layout.page_name(piece.page), link.manifest.rank
                raise CheckpointError(f"{name} of rank {rank} does not match its checksum on its node")
    return xor(*contents)
