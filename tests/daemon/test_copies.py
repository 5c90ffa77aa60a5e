"""Tests of copies of checkpoints between daemons, over real sockets."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import tempfile
import threading
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.checkpoint import parity
from infinity.checkpoint.parity import INDEX_NAME, folder_of, part_range, peers_of
from infinity.errors import ConfigError
from infinity_daemon import copy_pull, copy_source
from infinity_daemon.copy_server import address_of
from support.copies import IDENTITY, LATER, OWNER, PAGE_BYTES, RUN, Node, Rank, check_copy, copied

STEP = 2 * 4096
"""Bytes of a request in these tests, so that a copy has many."""


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Request few bytes at a time, record the progress often, and retry at once."""
    monkeypatch.setattr(copy_pull, "MAX_DATA_BYTES", STEP)
    monkeypatch.setattr(copy_pull, "_SYNC_BYTES", 4 * STEP)
    monkeypatch.setattr(copy_pull, "_PAUSE_SECONDS", 0.01)


def run(work):
    """Run a coroutine, which must end within minutes."""
    return asyncio.run(asyncio.wait_for(work, 300))


@pytest.mark.parametrize("nodes", [2, 3])
def test_every_rank_stores_the_parity_of_its_peers(tmp_path, nodes):
    """The streams have different lengths, and one of them is empty."""
    ranks = [
        Rank(tmp_path / str(number), rank, pages, world=7)
        for number, (rank, pages) in enumerate([(0, 5), (3, 9), (6, 0)])
    ]
    for rank, progress in zip(ranks, run(copied(ranks, nodes)), strict=True):
        check_copy(ranks, rank, nodes)
        assert progress["copied"] == IDENTITY
        assert (progress["busy"], progress["error"]) == (False, "")


@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(0, 12), min_size=2, max_size=5), st.data())
def test_parity_of_any_lengths(pages, data):
    nodes = data.draw(st.integers(2, len(pages)))
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            Rank(Path(folder, str(rank)), rank, number, world=len(pages), page_bytes=8192)
            for rank, number in enumerate(pages)
        ]
        run(copied(ranks, nodes))
        for rank in ranks:
            check_copy(ranks, rank, nodes)


class Pair:
    """Rank 0, which copies the checkpoint of rank 1. Use as an async context manager."""

    def __init__(self, place, pages=20):
        self.ranks = [Rank(place / str(number), number, pages) for number in range(2)]
        self.own, self.peer = self.ranks
        self.holder, self.server = Node(0), Node(1)
        self.address = ""

    async def __aenter__(self):
        self.stack = AsyncExitStack()
        await self.stack.enter_async_context(self.holder)
        await self.stack.enter_async_context(self.server)
        await self.holder.join()
        self.address = await self.server.join()
        return self

    async def __aexit__(self, *_):
        await self.stack.aclose()

    def use_later_checkpoint(self, place):
        """Replace the checkpoints of both ranks."""
        self.ranks = self.own, self.peer = [Rank(place / str(rank), rank, 9, identity=LATER) for rank in range(2)]

    async def serve(self):
        """Serve the checkpoint of rank 1. Its copy of rank 0 waits for an address without a daemon."""
        await self.server.ask("start", **self.peer.job([(0, "127.0.0.1:1")]))
        await served(self.server)

    async def copy(self, **more):
        """Start the copy of rank 1."""
        await self.holder.ask("start", **{**self.own.job([(1, self.address)]), **more})


@pytest.fixture
def pair(tmp_path):
    return Pair(tmp_path)


def with_pair(test):
    """Run a coroutine function as a test, while the nodes of its argument `pair` are open."""

    @wraps(test)
    def call(pair, **fixtures):
        async def main():
            async with pair:
                await test(pair, **fixtures)

        run(main())

    return call


async def served(node):
    """Wait until a node serves its checkpoint."""
    while node.copies._ranks[(RUN, node.rank)].source is None:
        await asyncio.sleep(0.005)


class Gate:
    """Reading of pages that blocks after some requests, until it is opened."""

    def __init__(self, monkeypatch, allowed):
        self.offsets, self.reached, self._open = [], asyncio.Event(), asyncio.Event()
        read = copy_source.SourceReader.read

        async def gated(reader, name, offset, length):
            if name == "pages":
                if len(self.offsets) >= allowed and not self._open.is_set():
                    self.reached.set()
                    await self._open.wait()
                self.offsets.append(offset)
            return await read(reader, name, offset, length)

        monkeypatch.setattr(copy_source.SourceReader, "read", gated)

    def open(self):
        self._open.set()


def flip(file, at):
    """Flip a bit of a file."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@with_pair
async def test_a_restarted_daemon_continues_an_interrupted_copy(pair, monkeypatch):
    await pair.serve()
    monkeypatch.setattr(copy_pull, "_SYNC_BYTES", 3 * STEP)
    gate = Gate(monkeypatch, 10)
    await pair.copy()
    await gate.reached.wait()
    await pair.holder.until(lambda progress: progress["bytes"] == 10 * STEP)
    await pair.holder.copies.stop()
    assert not (folder_of(pair.own.target) / INDEX_NAME).exists()
    gate.open()
    pair.holder.copies = Node(0).copies
    await pair.holder.copies.start()
    await pair.holder.join()
    del gate.offsets[:]
    await pair.copy()
    progress = await pair.holder.ended()
    assert progress["copied"] == IDENTITY, progress
    done = 8 * STEP  # the progress was recorded after 9 requests, which complete 4 pages
    assert min(gate.offsets) == done
    assert progress["bytes"] == len(pair.peer.stream) - done
    check_copy(pair.ranks, pair.own, 2)


@with_pair
async def test_a_copy_of_a_complete_checkpoint_needs_no_peer(pair):
    await pair.serve()
    await pair.copy()
    assert (await pair.holder.ended())["copied"] == IDENTITY
    await pair.server.copies.stop()
    await pair.copy()
    progress = await pair.holder.ended()
    assert (progress["copied"], progress["bytes"], progress["error"]) == (IDENTITY, 0, "")
    check_copy(pair.ranks, pair.own, 2)


@with_pair
async def test_a_peer_that_returns_is_copied_from_where_it_ended(pair, monkeypatch):
    await pair.serve()
    gate = Gate(monkeypatch, 6)
    await pair.copy()
    await gate.reached.wait()
    await pair.holder.until(lambda progress: progress["bytes"] == 6 * STEP)
    await pair.server.copies.stop()
    gate.open()
    pair.server.copies = Node(1, port=int(pair.address.rpartition(":")[2])).copies
    await pair.server.copies.start()
    assert await pair.server.join() == pair.address
    await pair.serve()
    progress = await pair.holder.ended()
    assert (progress["copied"], progress["bytes"]) == (IDENTITY, len(pair.peer.stream))
    assert (progress["busy"], progress["waited"], progress["error"]) == (False, 0.0, "")
    check_copy(pair.ranks, pair.own, 2)


@with_pair
async def test_a_copy_waits_for_a_peer_that_starts_later(pair, monkeypatch):
    connect, attempts = pair.holder.copies._server.connect, []

    async def counted(*arguments):
        attempts.append(arguments)
        return await connect(*arguments)

    monkeypatch.setattr(pair.holder.copies._server, "connect", counted)
    await pair.copy()
    await pair.holder.until(lambda _: len(attempts) >= 3)
    assert (await pair.holder.ask("progress"))["busy"]
    await pair.serve()
    assert (await pair.holder.ended())["copied"] == IDENTITY
    check_copy(pair.ranks, pair.own, 2)


@with_pair
async def test_a_copy_fails_if_a_peer_does_not_return(pair, monkeypatch):
    monkeypatch.setattr(copy_pull, "_PATIENCE_SECONDS", 0.2)
    await pair.server.copies.stop()
    await pair.copy()
    error = (await pair.holder.ended())["error"]
    assert error.startswith("no progress for ")
    assert f"rank 1 at {pair.address}" in error


@with_pair
async def test_a_copy_fails_with_another_token_or_rank(pair, monkeypatch):
    monkeypatch.setattr(copy_pull, "_PATIENCE_SECONDS", 0.2)
    await pair.serve()
    await pair.holder.join(token="cd" * 32)
    await pair.copy()
    wrong_token = (await pair.holder.ended())["error"]
    await pair.holder.join()
    await pair.copy(peers=[{"rank": 5, "address": pair.address}])
    wrong_rank = (await pair.holder.ended())["error"]
    assert f"handshake with rank 1 at {pair.address} failed: the daemon does not serve rank 1" in wrong_token
    assert "certificate" not in wrong_token
    assert "does not serve rank 5" in wrong_rank
    assert pair.own.target.read_bytes()[:4096] == b"\xff" * 4096


@with_pair
async def test_a_peer_with_a_later_checkpoint_ends_the_copy(pair, tmp_path, monkeypatch):
    """The index of the earlier copy is removed before the first byte changes, and the incomplete copy has none."""
    await pair.serve()
    gate = Gate(monkeypatch, 5)
    await pair.copy()
    await gate.reached.wait()
    later = Rank(tmp_path / "1", 1, 20, identity=LATER)
    await pair.server.ask("start", **later.job([(0, "127.0.0.1:1")]))
    await served(pair.server)
    gate.open()
    assert f"later checkpoint {LATER}" in (await pair.holder.ended())["error"]
    assert not (folder_of(pair.own.target) / INDEX_NAME).exists()


@with_pair
async def test_the_index_of_an_earlier_copy_is_removed_first(pair, monkeypatch):
    await pair.serve()
    await pair.copy()
    await pair.holder.ended()
    pair.ranks = pair.own, pair.peer = later(pair.ranks, [{3}, {3}])
    folder = folder_of(pair.own.target)
    names, events = set(os.listdir(folder)), []
    assert INDEX_NAME in names
    sync, write = parity.sync_folder, copy_pull._write_all

    def synced(place):
        events.append(("sync", names - set(os.listdir(place)) if place == folder else None))
        sync(place)

    def written(*arguments):
        events.append("write")
        write(*arguments)

    monkeypatch.setattr(parity, "sync_folder", synced)
    monkeypatch.setattr(copy_pull, "_write_all", written)
    await pair.serve()
    await pair.copy()
    assert (await pair.holder.ended())["copied"] == LATER
    assert events[0] == ("sync", {INDEX_NAME})  # the other files are not removed before that is durable
    assert events.count("write") > 1
    check_copy(pair.ranks, pair.own, 2)


@with_pair
async def test_a_new_checkpoint_ends_the_copy_of_the_earlier_one(pair, tmp_path, monkeypatch):
    await pair.serve()
    gate = Gate(monkeypatch, 5)
    await pair.copy()
    await gate.reached.wait()
    pair.use_later_checkpoint(tmp_path)
    await pair.copy()
    await pair.copy()  # a repeated request does not start again
    gate.open()
    await pair.serve()
    assert (await pair.holder.ended())["copied"] == LATER
    check_copy(pair.ranks, pair.own, 2)


@pytest.mark.parametrize("suffix", [".a", ".json", ".safetensors"])
def test_a_write_that_was_cancelled_twice_ends_before_the_next_copy(tmp_path, monkeypatch, suffix):
    write, prepare, events = copy_pull._write_all, copy_pull.Pull._prepare, []
    opened = threading.Event()

    def gated(descriptor, *arguments):
        if not opened.is_set() and os.readlink(f"/proc/self/fd/{descriptor}").endswith(suffix):
            events.append("begins")
            assert opened.wait(300)
            write(descriptor, *arguments)
            events.append("ends")
        else:
            write(descriptor, *arguments)

    def prepared(pull):
        if pull._job.target.name == "rank00000.a":
            events.append("copy")
        return prepare(pull)

    monkeypatch.setattr(copy_pull, "_write_all", gated)
    monkeypatch.setattr(copy_pull.Pull, "_prepare", prepared)

    async def main():
        async with Pair(tmp_path) as pair:
            await pair.serve()
            await pair.copy()
            await pair.holder.until(lambda _: "begins" in events)
            task = pair.holder.copies._ranks[(RUN, 0)].task
            await pair.holder.ask("stop")
            pair.use_later_checkpoint(tmp_path)
            await pair.serve()
            await pair.copy()
            await served(pair.holder)
            await asyncio.sleep(0.05)  # an abandoned write would let the next copy start
            assert not task.done()
            opened.set()
            assert (await pair.holder.ended())["copied"] == LATER
            assert events == ["copy", "begins", "ends", "copy"]
            check_copy(pair.ranks, pair.own, 2)

    try:
        run(main())
    finally:
        opened.set()


@with_pair
async def test_a_copy_ends_with_the_process_of_the_rank(pair, monkeypatch, caplog):
    await pair.serve()
    gate = Gate(monkeypatch, 5)
    await pair.copy()
    await gate.reached.wait()
    tasks = [node.copies._ranks[(RUN, node.rank)].task for node in (pair.holder, pair.server)]
    pair.server.alive = False
    pair.server.copies.expire()
    gate.open()
    pair.holder.alive = False
    pair.holder.copies.expire()
    await asyncio.wait(tasks)
    assert len(gate.offsets) <= 6  # the blocked request, whose result was discarded
    for node in (pair.holder, pair.server):
        with pytest.raises(ConfigError, match="has not joined"):
            await node.ask("progress")
    assert not (folder_of(pair.own.target) / INDEX_NAME).exists()


@with_pair
async def test_a_stopped_copy_is_not_served(pair, monkeypatch):
    monkeypatch.setattr(copy_pull, "_PATIENCE_SECONDS", 0.2)
    await pair.serve()
    gate = Gate(monkeypatch, 5)
    await pair.copy()
    await gate.reached.wait()
    await pair.server.ask("stop")
    gate.open()
    assert "does not serve checkpoint" in (await pair.holder.ended())["error"]
    assert len(gate.offsets) <= 6  # the blocked request, whose result was discarded


def test_damaged_files_end_the_copy(tmp_path):
    async def copy(name, damage):
        async with Pair(tmp_path / name) as pair:
            damage(pair)
            await pair.serve()
            await pair.copy()
            return (await pair.holder.ended())["error"]

    def state(pair):
        return pair.peer.file.with_name(pair.peer.manifest.state_file)

    for name, damage, expected in [
        ("page", lambda pair: flip(pair.peer.files[0], 100), "of rank 1 does not match its checksum"),
        ("state", lambda pair: flip(state(pair), 100), "state file of rank 1 does not match its checksum"),
        ("short", lambda pair: os.truncate(pair.peer.files[0], PAGE_BYTES), "unexpected end of file"),
    ]:
        assert expected in run(copy(name, damage)), name


def later(ranks, changed, slot="a"):
    """Return the ranks with their next checkpoint. `changed` has the pages of each rank that differ."""
    identity = f"{int(ranks[0].identity, 16) + 1:024x}"
    settings = {"world": ranks[0].manifest.world_size, "identity": identity, "slot": slot}
    return [
        Rank(rank.root.parent, rank.rank, len(rank.contents), **settings, before=rank, changed=pages)
        for rank, pages in zip(ranks, changed, strict=True)
    ]


def bytes_to_send(ranks, rank, nodes, changed):
    """Return the number of bytes that a rank receives: those of all peers where the part of any has changed."""
    by_rank, columns = {each.rank: (each, pages) for each, pages in zip(ranks, changed, strict=True)}, {}
    for part, (peer, pages) in enumerate(map(by_rank.get, peers_of(list(by_rank), rank.rank, nodes))):
        start, stop = part_range(len(peer.stream), nodes, part)
        for at in range(start, stop, 4096):
            columns.setdefault(at - start, []).append(at // PAGE_BYTES in pages)
    return sum(4096 * len(column) for column in columns.values() if any(column))


@pytest.mark.parametrize(("nodes", "sizes"), [(2, (7, 12)), (3, (9, 12, 8)), (4, (9, 5, 12, 1))])
def test_only_changes_are_sent(tmp_path, nodes, sizes):
    """The first two copies, one per file, are complete. Each later one is compared with the copy before the last one.

    The state of each node, computed from the other nodes, is the same as after a complete copy.
    """
    every = [set(range(pages)) for pages in sizes]
    some = [{0, 4, pages - 1} for pages in sizes]
    ranks = [Rank(tmp_path / str(rank), rank, pages, world=nodes) for rank, pages in enumerate(sizes)]
    sent, history = [], [every, every, some, [{2}, *[set()] * (nodes - 1)], [set()] * nodes, [set()] * nodes, every]
    for number, changed in enumerate(history):
        if number:
            ranks = later(ranks, changed, slot="ab"[number % 2])
        since = [one | other for one, other in zip(changed, history[number - 1], strict=True)] if number > 1 else every
        progress = run(copied(ranks, nodes))
        sent.append([each["bytes"] for each in progress])
        assert sent[-1] == [bytes_to_send(ranks, rank, nodes, since) for rank in ranks]
        for rank in ranks:
            check_copy(ranks, rank, nodes)
    assert sent[0] == sent[1]
    assert sum(sent[3]) < sum(sent[0])
    assert sum(sent[5]) == 0


@pytest.mark.parametrize(
    ("damage", "sent"),
    [
        ("parity", 1 + 1),
        ("checksum", 1 + 1),
        ("unreadable", 1 + 1),
        ("checksums missing", 20),
        ("checksums short", 20),
        ("manifest", 20),
        ("index", 20),
    ],
)
def test_damaged_cells_are_replaced(tmp_path, damage, sent, caplog, monkeypatch):
    """One of 20 pages has changed since the last copy. Another one, or the information about all, is damaged."""
    ranks = [Rank(tmp_path / str(rank), rank, 20) for rank in range(2)]
    run(copied(ranks, 2))
    target = ranks[0].target
    folder = folder_of(target)
    file, at = {
        "parity": (target, 5 * PAGE_BYTES + 100),
        "checksum": (folder / "checksums", 5 * 8),
        "manifest": (folder / ranks[1].manifest.file_name, 1000),
        "index": (folder / INDEX_NAME, 50),
    }.get(damage, (folder / "checksums", 0))
    if damage == "checksums missing":
        file.unlink()
    elif damage == "checksums short":
        os.truncate(file, 19 * 8 + 3)
    elif damage == "unreadable":
        read = os.pread

        def failing(descriptor, count, offset):
            if offset == 5 * PAGE_BYTES and os.readlink(f"/proc/self/fd/{descriptor}") == str(target):
                raise OSError(errno.EIO, "Input/output error")
            return read(descriptor, count, offset)

        monkeypatch.setattr(os, "pread", failing)
    else:
        flip(file, at)
    ranks = later(ranks, [{3}, {3}])
    with caplog.at_level("WARNING", "infinityd"):
        progress = run(copied(ranks, 2))[0]
    assert (progress["error"], progress["bytes"]) == ("", sent * PAGE_BYTES)
    found = f"copy.damaged file={target} offset={5 * PAGE_BYTES} until={6 * PAGE_BYTES}"
    assert [record.getMessage() for record in caplog.records] == [found] * (sent == 2)
    check_copy(ranks, ranks[0], 2)


async def second_copy(pair, monkeypatch):
    """Copy a checkpoint, and start to copy the next one, in which two pages have changed. Return its blocked gate."""
    await pair.serve()
    await pair.copy()
    await pair.holder.ended()
    pair.ranks = pair.own, pair.peer = later(pair.ranks, [{3}, {3, 9}])
    gate = Gate(monkeypatch, 2)
    await pair.serve()
    await pair.copy()
    await gate.reached.wait()
    return gate


@with_pair
async def test_nothing_is_skipped_after_an_interruption(pair, monkeypatch):
    """The interrupted copy may have written bytes of another checkpoint."""
    gate = await second_copy(pair, monkeypatch)
    assert gate.offsets == [3 * PAGE_BYTES, 3 * PAGE_BYTES + STEP]
    await pair.holder.ask("stop")
    gate.open()
    assert not (folder_of(pair.own.target) / INDEX_NAME).exists()
    pair.ranks = pair.own, pair.peer = later(pair.ranks, [{3}, {9}])
    await pair.serve()
    await pair.copy()
    progress = await pair.holder.ended()
    assert (progress["error"], progress["bytes"]) == ("", len(pair.peer.stream))
    check_copy(pair.ranks, pair.own, 2)


@with_pair
async def test_a_lost_connection_does_not_repeat_what_was_skipped(pair, monkeypatch):
    gate = await second_copy(pair, monkeypatch)
    await pair.holder.until(lambda progress: progress["bytes"] == 2 * STEP)
    await pair.server.copies.stop()
    gate.open()
    pair.server.copies = Node(1, port=int(pair.address.rpartition(":")[2])).copies
    await pair.server.copies.start()
    await pair.server.join()
    await pair.serve()
    progress = await pair.holder.ended()
    assert (progress["error"], progress["bytes"]) == ("", 2 * PAGE_BYTES)
    check_copy(pair.ranks, pair.own, 2)


@pytest.mark.parametrize("change", ["peers", "nodes", "pages", "page size"])
def test_other_parts_are_sent_completely(tmp_path, change):
    def ranks_with(**values):
        return [Rank(tmp_path / str(rank), rank, **{"pages": 6 + rank, "world": 3, **values}) for rank in range(3)]

    ranks, nodes = ranks_with(), 2
    run(copied(ranks, nodes))
    if change == "peers":
        ranks = [ranks[0], ranks[2], ranks[1]]
    elif change == "nodes":
        nodes = 3
    else:
        ranks = ranks_with(identity=LATER, **({"pages": 5} if change == "pages" else {"page_bytes": 2 * PAGE_BYTES}))
    progress = run(copied(ranks, nodes))
    for rank, each in zip(ranks, progress, strict=True):
        check_copy(ranks, rank, nodes)
        every = [set(range(100)) for _ in ranks]
        assert each["bytes"] == bytes_to_send(ranks, rank, nodes, every)


@pytest.mark.parametrize(("page", "used"), [(3, True), (4, True), (5, False)])
def test_an_unchanged_page_that_is_sent_in_part_is_verified(tmp_path, page, used):
    """The parity of rank 0 combines page 0 of rank 1, which has changed, with halves of pages 3 and 4 of rank 2."""
    ranks = [Rank(tmp_path / str(rank), rank, 7, world=3) for rank in range(3)]
    run(copied(ranks, 3))
    ranks = later(ranks, [set(), {0}, set()])
    extent = ranks[2].manifest.pages[page].extent
    flip(ranks[2].files[extent.path], extent.offset + (100 if page == 3 else PAGE_BYTES - 100))
    errors = [progress["error"] for progress in run(copied(ranks, 3))]
    assert ["does not match its checksum" in error for error in errors] == [used, False, False], errors


@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_damaged_page_in_two_parts_ends_the_copies(tmp_path, page):
    """With three pages and nodes, page 1 is in both parts."""
    ranks = [Rank(tmp_path / str(number), number, 3, world=3) for number in range(3)]
    extent = ranks[0].manifest.pages[page].extent
    with ranks[0].files[extent.path].open("r+b") as file:
        file.seek(extent.offset + PAGE_BYTES // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    errors = [progress["error"] for progress in run(copied(ranks, 3))]
    damaged = ["does not match its checksum" in error for error in errors]
    assert damaged == [False, page != 0, page != 2], errors


@with_pair
async def test_a_page_at_the_position_of_a_reconnection_is_verified(pair, monkeypatch):
    await pair.serve()
    gate = Gate(monkeypatch, 7)
    await pair.copy()
    await gate.reached.wait()
    await pair.holder.until(lambda progress: progress["bytes"] == 7 * STEP)
    extent = pair.peer.manifest.pages[3].extent  # the copy has the first half of the page
    data = bytearray(pair.peer.files[extent.path].read_bytes())
    data[extent.offset + STEP] ^= 1
    pair.peer.files[extent.path].write_bytes(data)
    await pair.server.copies.stop()
    gate.open()
    pair.server.copies = Node(1, port=int(pair.address.rpartition(":")[2])).copies
    await pair.server.copies.start()
    await pair.server.join()
    await pair.serve()
    assert "does not match its checksum" in (await pair.holder.ended())["error"]


def test_targets_that_cannot_be_written_end_the_copy(tmp_path):
    async def copy(name, damage):
        async with Pair(tmp_path / name) as pair:
            damage(pair.own.target)
            await pair.serve()
            await pair.copy()
            return (await pair.holder.ended())["error"]

    def linked(target):
        target.rename(target.with_name("other"))
        target.symlink_to("other")

    def shared(target):
        folder_of(target).mkdir()
        folder_of(target).chmod(0o777)

    for name, damage, expected in [
        ("missing", Path.unlink, "No such file"),
        ("short", lambda target: os.truncate(target, 9000), "has 9000 bytes, but the copy needs 327680"),
        ("link", linked, "it is a link"),
        ("shared", shared, "other users can write to it"),
    ]:
        assert expected in run(copy(name, damage)), name


@with_pair
async def test_a_full_drive_ends_the_copy(pair):
    """A limit of the file size has the same effect as a full drive: a write fails."""
    await pair.serve()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        await pair.copy()
        progress = await pair.holder.ended()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in progress["error"]
    await pair.copy()
    assert (await pair.holder.ended())["copied"] == IDENTITY
    check_copy(pair.ranks, pair.own, 2)


def test_wrong_manifests_end_the_copy(tmp_path):
    async def copy(**values):
        async with Pair(tmp_path) as pair:
            await pair.copy(**values)
            return (await pair.holder.ended())["error"]

    other = Rank(tmp_path / "other", 1, 3)
    link = tmp_path / "link.json"
    link.symlink_to(other.file)
    for values, expected in [
        ({"manifest": "/no/such/file"}, "No such file"),
        ({"manifest": str(other.file)}, "is not the manifest of rank 0"),
        ({"manifest": str(link)}, "it is a link"),
        ({"identity": LATER}, f"is not the manifest of rank 0 of checkpoint {LATER}"),
        ({"roots": ["/nvme"]}, "1 data files were given"),
    ]:
        assert expected in run(copy(**values)), values


def test_a_limited_copy_requests_at_most_a_second_at_a_time(tmp_path, monkeypatch):
    asked = []

    class Recorded(copy_pull.Pace):
        def delay(self, nbytes):
            assert self._rate == 5000
            asked.append(nbytes)
            return 0.0

    monkeypatch.setattr(copy_pull, "Pace", Recorded)

    async def main():
        async with Pair(tmp_path, pages=2) as pair:
            await pair.serve()
            await pair.copy(rate=5000)
            assert (await pair.holder.ended())["copied"] == IDENTITY
            pages = len(pair.peer.stream)
            assert asked[-pages // 4096 :] == [4096] * (pages // 4096)
            files = pair.peer.file, pair.peer.file.with_name(pair.peer.manifest.state_file)
            assert max(asked) == 4096
            assert sum(asked) == pages + sum(file.stat().st_size for file in files)

            asked.clear()
            pair.ranks = pair.own, pair.peer = later(pair.ranks, [(), ()])
            await pair.serve()
            await pair.copy(rate=5000)
            progress = await pair.holder.ended()
            assert (progress["copied"], progress["bytes"]) == (LATER, 0)
            assert asked[-2:] == [PAGE_BYTES] * 2  # verified

    run(main())


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_memory_does_not_grow_with_the_number_of_peers(tmp_path, monkeypatch, nodes):
    monkeypatch.setattr(copy_pull, "MAX_DATA_BYTES", 4 * 4096)
    combined, received = copy_pull._combined, []

    def recorded(links, contents, at):
        received.append(sum(map(len, contents)))
        return combined(links, contents, at)

    monkeypatch.setattr(copy_pull, "_combined", recorded)
    ranks = [Rank(tmp_path / str(rank), rank, 16, world=nodes) for rank in range(nodes)]
    run(copied(ranks, nodes))
    assert max(received) == 4 * 4096 // (nodes - 1) // 4096 * 4096 * (nodes - 1)
    for rank in ranks:
        check_copy(ranks, rank, nodes)


def test_requests_are_validated(tmp_path):
    async def rejected(node, op, **values):
        with pytest.raises(ConfigError) as caught:
            await node.ask(op, **values)
        return str(caught.value)

    async def main():
        async with Pair(tmp_path) as pair, Node(0, host="") as off:
            holder, job = pair.holder, pair.own.job([(1, pair.address)])
            assert "copies.host of infinityd is not set" in await rejected(off, "join", token="ab" * 32)
            holder.copies._several = True
            assert "server.group" in await rejected(holder, "join", token="ab" * 32)
            holder.copies._several = False
            other = replace(OWNER, pid=1)
            assert f"already joined (pid {OWNER.pid})" in await rejected(holder, "join", owner=other, token="cd" * 32)
            hidden = replace(OWNER, pid=0, connection=1)
            assert "--pid=host" in await rejected(holder, "join", owner=hidden, rank=9, token="ab" * 32)
            for op, values in (("start", job), ("progress", {}), ("stop", {})):
                assert "has not joined" in await rejected(holder, op, owner=other, **values)
                assert "has not joined" in await rejected(holder, op, rank=9, **values)
            for changed, message in [
                ({"nodes": 3}, "needs 2 different peers"),
                ({"peers": [{"rank": 0, "address": pair.address}]}, "needs 1 different peers"),
                ({"peers": [{"rank": 1, "address": "10.0.0.1"}]}, "not an address with a port"),
                ({"peers": [{"rank": 1, "address": "10.0.0.1:99999"}]}, "not an address with a port"),
            ]:
                assert message in await rejected(holder, "start", **{**job, **changed})
            holder.alive = False  # the process of another rank may have ended a moment ago
            await holder.ask("join", owner=other, token="cd" * 32)

    run(main())


def test_the_host_is_one_interface():
    assert address_of("lo") == address_of("127.0.0.1") == "127.0.0.1"
    assert address_of("::1") == "::1"
    for host in ("0.0.0.0", "::", "::0"):
        with pytest.raises(ConfigError, match="all interfaces"):
            address_of(host)
    for host in ("no-such-interface", "example.org", "localhost"):
        with pytest.raises(ConfigError, match=r"neither an address nor an interface .* interfaces: .*lo"):
            address_of(host)


def test_an_ipv6_address_is_given_in_brackets(tmp_path):
    async def main():
        with suppress(ConfigError):  # a machine may have no IPv6
            async with Node(0, host="::1") as node:
                assert (await node.join()).startswith("[::1]:")

    run(main())
