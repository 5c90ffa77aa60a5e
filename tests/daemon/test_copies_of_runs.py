"""Runs whose checkpoints are copied by daemons that fail."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from infinity.checkpoint.parity import Parity, parities_in, verify
from infinity_daemon.copy_source import SourceReader
from support.daemon_process import daemon, start, until
from support.ranks import RankPool
from support.separate_nodes import RECIPE, node
from support.train import Outcome, Paging, Recipe, offloaded, train


@pytest.fixture
def runtimes(tmp_path: Path) -> list[Path]:
    """Runtime folders of the daemons of two nodes."""
    folders = [tmp_path / f"runtime{rank}" for rank in range(2)]
    for folder in folders:
        folder.mkdir(0o700)
        (folder / "infinityd.toml").write_text('[copies]\nhost = "127.0.0.1"\nport = 0\n')
    return folders


def start_with_copies(folder: Path) -> Any:
    """Start a daemon, which must be killed."""
    return start(folder, "--config", str(folder / "infinityd.toml"))


@contextmanager
def start_blocked(folder: Path, reached: Path) -> Iterator[Any]:
    """Yield a daemon that never answers requests for pages. It creates the file `reached` at the first one."""
    read = SourceReader.read

    async def blocked(reader: SourceReader, name: str, offset: int, length: int) -> bytearray:
        if name == "pages":
            reached.touch()
            await asyncio.Event().wait()
        return await read(reader, name, offset, length)

    with patch.object(SourceReader, "read", blocked):
        process = start_with_copies(folder)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def train_with_copies(folder: str, steps: int, **run: Any) -> list[str]:
    """Train with copies on other nodes, and save each step, once the file `go` with its number exists.

    Return the warnings of this rank. Called on every rank.
    """
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("infinity").addHandler(handler)
    telemetry = {"runtime_dir": f"{folder}/runtime{dist.get_rank()}"}
    try:
        with (
            node(folder) as place,
            patch.dict(os.environ, LOCAL_RANK="0"),
            offloaded(RECIPE, Paging(host_cache="least"), place, run={"copies": 1, **run}, telemetry=telemetry) as (
                model,
                optimizer,
            ),
        ):
            for step in range(1, steps + 1):
                until(Path(folder, f"go{step}").exists, 900)
                train(Recipe(**{**RECIPE.__dict__, "steps": step}), model, optimizer, Outcome(), first=step - 1)
                optimizer.save_checkpoint()
                Path(folder, f"saved{step} by {dist.get_rank()}").touch()
    finally:
        logging.getLogger("infinity").removeHandler(handler)
    return messages


def copies(folder: Path, rank: int) -> dict[int, Parity]:
    """Return the verified copies on a node, by the steps of their checkpoints."""
    (run,) = folder.glob(f"node{rank}/nvme0/2*")
    found = {int(each.contents.peers[0].manifest[4:16]): each for each in parities_in([run])}
    for each in found.values():
        verify(each, run.name, lambda _: None)
    return found


def test_daemon_that_is_killed_during_a_copy_is_replaced(pair: RankPool, tmp_path: Path, runtimes: list[Path]) -> None:
    """It starts again on another port. The copy fails with a warning, and the next checkpoint is copied."""
    first, second = runtimes
    with (
        ThreadPoolExecutor(1) as thread,
        daemon(first, "--config", str(first / "infinityd.toml")),
        start_blocked(second, tmp_path / "reached") as killed,
    ):
        run = thread.submit(pair.run, train_with_copies, str(tmp_path), 2)
        (tmp_path / "go1").touch()
        files = [tmp_path / "reached", *(tmp_path / f"saved1 by {rank}" for rank in range(2))]
        until(lambda: run.done() or all(file.exists() for file in files), 900)
        killed.kill()
        killed.wait()
        port = int(killed.log.read_text().partition("address=127.0.0.1:")[2].split()[0])
        with (
            socket.create_server(("127.0.0.1", port)),
            daemon(second, "--config", str(second / "infinityd.toml")) as restarted,
        ):
            assert f"address=127.0.0.1:{port} " not in restarted.log.read_text()
            (tmp_path / "go2").touch()
            warnings = run.result()
    failed = [message for message in warnings[1] if "of step 1 could not be copied to this node" in message]
    assert len(failed) == 1, warnings
    assert not [message for of_rank in warnings for message in of_rank if "of step 2" in message]
    assert 1 not in copies(tmp_path, 0)
    assert 2 in copies(tmp_path, 0)
    assert 2 in copies(tmp_path, 1)


def test_run_ends_although_the_daemons_are_disconnected(pair: RankPool, tmp_path: Path, runtimes: list[Path]) -> None:
    """The ranks are connected, and each daemon answers its rank."""
    first, second = runtimes
    (tmp_path / "go1").touch()
    with (
        daemon(first, "--config", str(first / "infinityd.toml")),
        start_blocked(second, tmp_path / "reached"),
    ):
        found = pair.run(_train_once, str(tmp_path))
    assert any(
        "of step 1 could not be copied to this node: no progress for 5 s from node1" in text for text in found[0]
    )
    assert not copies(tmp_path, 0)


def _train_once(folder: str) -> list[str]:
    return train_with_copies(folder, 1, heartbeat_timeout_seconds=5)
