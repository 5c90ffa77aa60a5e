"""The running daemon: puts the parts together and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from infinity import __version__
from infinity.access import own_folder
from infinity.errors import ConfigError
from infinity.io.drives import locate
from infinity.telemetry.exporter import serve_registry
from infinity_daemon.bandwidth import Profiles
from infinity_daemon.collect_build import BuildCollector
from infinity_daemon.collect_devices import DevicesCollector
from infinity_daemon.collect_ranks import RanksCollector
from infinity_daemon.collection import Collection
from infinity_daemon.fairness import Fairness, usages
from infinity_daemon.log import event
from infinity_daemon.pages import StatsPages
from infinity_daemon.requests import Requests
from infinity_daemon.reservations import Reservations
from infinity_daemon.server import SocketServer

_SWEEP_SECONDS: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a daemon runs; how long pages of ranks that died, or ended in order, are still served."""

    runtime_dir: Path
    socket: Path
    host: str
    port: int
    device_paths: tuple[str, ...] = ()
    keep_dead_seconds: float = 900.0
    keep_ended_seconds: float = 120.0


async def run(options: Options) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: a folder, port or socket that cannot be used.
        FolderBusyError: another daemon holds the socket.
    """
    _make_folder(options.runtime_dir)
    started = time.time()
    pages = StatsPages(options.runtime_dir, options.keep_dead_seconds, options.keep_ended_seconds)
    reservations = Reservations()
    profile = Profiles(options.runtime_dir)
    await profile.load()
    devices = DevicesCollector(
        paths=options.device_paths, pages=pages, reserved=reservations.by_drive, bandwidth=profile.of
    )
    collection = Collection([BuildCollector(started), devices, RanksCollector(pages)])
    about: dict[str, object] = {"version": __version__, "pid": os.getpid(), "started": started}
    fairness = Fairness({})
    server: SocketServer

    requests = Requests(
        pages=pages,
        profile=profile,
        reservations=reservations,
        known_paths=devices.known_paths,
        is_alive=lambda owner: server.is_alive(owner),
        rates_of=fairness.rates_of,
        about=lambda: {**about, "collectors": collection.health},
    )
    server = SocketServer(options.socket, requests.answer)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await server.start()
    try:
        registry = CollectorRegistry()
        registry.register(collection)
        with serve_registry(
            options.port, registry, lambda: {**about, "collectors": collection.health}, options.host
        ) as http:
            about["metrics_port"] = http.port
            event(logging.INFO, "started", pid=os.getpid(), port=http.port, socket=options.socket)
            await _sweep_until(stop, pages, reservations, server, fairness)
    finally:
        await server.stop()
    event(logging.INFO, "stopped")


async def _sweep_until(
    stop: asyncio.Event, pages: StatsPages, reservations: Reservations, server: SocketServer, fairness: Fairness
) -> None:
    """Until told to stop: end reservations of the dead, remove old pages, and share drives out among the living."""
    while not stop.is_set():
        for entry in reservations.expire(server.is_alive):
            event(logging.INFO, "space.expired", run=entry.run_id, bytes=entry.size, pid=entry.owner.pid)
        found = await asyncio.to_thread(pages.scan)
        fairness.observe(await asyncio.to_thread(usages, found.live, _drive_of), time.monotonic())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _SWEEP_SECONDS)


@lru_cache(maxsize=256)
def _drive_of(path: str) -> str | None:
    """Return the name of the drive that a path of a live rank is on; it stays there as long as the rank lives."""
    try:
        return locate(path).drive.name
    except OSError:
        return None


def _make_folder(folder: Path) -> None:
    try:
        own_folder(folder, parents=True)
    except OSError as error:
        raise ConfigError(
            f"runtime folder {str(folder)!r} cannot be used: {error.strerror}; choose another --runtime-dir"
        ) from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"runtime folder {str(folder)!r} is not yours to write; choose another --runtime-dir")
