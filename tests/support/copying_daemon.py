"""Daemons that copy checkpoints between ranks in the folders of `support.separate_nodes`, in the calling process."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from unittest.mock import patch

from infinity.checkpoint.manifest import Manifest, read_manifest
from infinity.checkpoint.parity import (
    CHECKSUM,
    CHECKSUMS_NAME,
    ParityIndex,
    Peer,
    Stream,
    cells_of,
    folder_of,
    part_range,
    remove_index,
    write_index,
    xor,
)
from infinity.daemon_client import NodeDaemon
from infinity.run import checkpointing
from infinity.store.page_store import checksum, read_version
from support.copies import Node

_MOST_REQUESTS = 10
"""Requests for the progress of a copy after which it counts as never stopped."""


class CopyingDaemon(NodeDaemon):
    """Daemon of one rank. It copies a checkpoint when it is asked to start."""

    steps: ClassVar[list[int]]
    """Steps of the checkpoints that were copied."""
    fails: ClassVar[set[int]]
    """Steps of the checkpoints whose copies fail halfway. The daemon of rank 0 then waits until it is asked to stop."""
    _asked = 0

    _copied = ""

    def answer(self, op: str, **values: Any) -> dict[str, Any]:
        """Return the response to a request."""
        if op == "copies_join":
            assert re.fullmatch("[0-9a-f]{64}", values["token"])
            return {"ok": True, "address": f"node{values['rank']}:9471"}
        if op == "copies_start":
            step = self._copy(**values)
            self._copied = "" if step in self.fails else values["identity"]
            self._asked = 0
            return {"ok": True}
        if op == "copies_progress" and values["rank"] == 0 and not self._copied:
            self._asked += 1
            assert self._asked < _MOST_REQUESTS, "the copy is not stopped, although another rank has failed"
            return {"ok": True, "busy": True, "copied": "", "error": ""}
        if op == "copies_progress":
            return {"ok": True, "busy": False, "copied": self._copied, "error": "" if self._copied else "no network"}
        return {"ok": True} if op == "copies_stop" else super().answer(op, **values)

    def _copy(
        self, run_id: str, rank: int, identity: str, manifest: str, roots: list[str], target: str,
        peers: list[dict[str, Any]], nodes: int, rate: int,
    ) -> int:  # fmt: skip
        def on(peer: int, path: str) -> Path:
            return Path(path.replace(f"/node{rank}/", f"/node{peer}/").replace(f"rank{rank:05d}", f"rank{peer:05d}"))

        assert [peer["address"] for peer in peers] == [f"node{peer['rank']}:9471" for peer in peers]
        remove_index(Path(target))
        found: list[Manifest] = []
        for peer in (peer["rank"] for peer in peers):
            found.append(read_manifest(on(peer, manifest)))
            for name in (found[-1].file_name, found[-1].state_file):
                shutil.copy(on(peer, manifest).with_name(name), folder_of(Path(target)))
        streams = [
            b"".join(
                read_version(on(each.rank, roots[version.extent.path]), page, version, "")
                for page, version in sorted(each.pages.items())
            )
            for each in found
        ]
        lengths = [Stream(each.pages).length for each in found]
        parts = [
            stream[slice(*part_range(length, nodes, part))]
            for part, (stream, length) in enumerate(zip(streams, lengths, strict=True))
        ]
        parity = xor(*parts)
        failing = found[0].step in self.fails
        with open(target, "r+b") as file:
            file.write(parity[: len(parity) // 2] if failing else parity)
        if not failing:
            cells = cells_of([Stream(each.pages) for each in found])
            checksums = (CHECKSUM.pack(checksum(start, parity[start:stop])) for start, stop, _ in cells)
            (folder_of(Path(target)) / CHECKSUMS_NAME).write_bytes(b"".join(checksums))
            everyone = tuple(
                Peer(rank=each.rank, length=length, manifest=each.file_name)
                for each, length in zip(found, lengths, strict=True)
            )
            write_index(Path(target), ParityIndex(identity=identity, peers=everyone))
            self.steps.append(found[0].step)
        return found[0].step


def copying(fails: tuple[int, ...] = ()) -> Any:
    """Return a context in which runs copy their checkpoints with a `CopyingDaemon`."""
    daemon = type("Daemon", (CopyingDaemon,), {"steps": [], "fails": set(fails)})
    return patch.object(checkpointing, "NodeDaemon", daemon)


@contextmanager
def copying_over_sockets() -> Iterator[list[int]]:
    """Copy the checkpoints of a run with the code of infinityd. Yield the number of bytes that each copy has received.

    A copy is complete when the rank has started it on all nodes.
    """
    loop, node, received = asyncio.new_event_loop(), Node(0), list[int]()
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def done(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    class Daemon(NodeDaemon):
        def answer(self, op: str, **values: Any) -> dict[str, Any]:
            if not op.startswith("copies_"):
                return super().answer(op, **values)
            answer = {"ok": True, **done(node.ask(op.removeprefix("copies_"), **values))}
            if op == "copies_start":
                progress = done(node.ended(run_id=values["run_id"], rank=values["rank"]))
                assert not progress["error"], progress
                received.append(progress["bytes"])
            return answer

    done(node.copies.start())
    try:
        with patch.object(checkpointing, "NodeDaemon", Daemon):
            yield received
    finally:
        done(node.copies.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
