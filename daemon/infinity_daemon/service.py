"""The running daemon: puts the parts together and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from infinity import __version__
from infinity.access import own_folder
from infinity.errors import ConfigError
from infinity.telemetry.exporter import serve_registry
from infinity_daemon.bandwidth import Profiles
from infinity_daemon.collect_build import BuildCollector
from infinity_daemon.collect_devices import DevicesCollector
from infinity_daemon.collect_ranks import RanksCollector
from infinity_daemon.collection import Collection
from infinity_daemon.log import event
from infinity_daemon.pages import StatsPages
from infinity_daemon.requests import Requests
from infinity_daemon.reservations import Reservations
from infinity_daemon.server import SocketServer
from infinity_daemon.wear import WearWatch

SOCKET_NAME: Final = "infinityd.sock"
_SWEEP_SECONDS: Final = 2.0


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
    wear = WearWatch({})
    devices = DevicesCollector(
        paths=options.device_paths,
        pages=pages,
        reserved=reservations.by_drive,
        bandwidth=profile.of,
        wear=wear,
    )
    collection = Collection([BuildCollector(started), devices, RanksCollector(pages)])
    about: dict[str, object] = {"version": __version__, "pid": os.getpid(), "started": started}
    server: SocketServer

    requests = Requests(
        pages=pages,
        profile=profile,
        reservations=reservations,
        known_paths=devices.known_paths,
        wear=wear,
        is_alive=lambda owner: server.is_alive(owner),
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
            await _sweep_until(stop, pages, reservations, server)
    finally:
        await server.stop()
    event(logging.INFO, "stopped")


async def _sweep_until(
    stop: asyncio.Event, pages: StatsPages, reservations: Reservations, server: SocketServer
) -> None:
    """Until told to stop: end reservations of the dead and remove old pages, also when nobody scrapes."""
    while not stop.is_set():
        for entry in reservations.expire(server.is_alive):
            event(logging.INFO, "space.expired", run=entry.run_id, bytes=entry.size, pid=entry.owner.pid)
        await asyncio.to_thread(pages.scan)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _SWEEP_SECONDS)


def _make_folder(folder: Path) -> None:
    try:
        own_folder(folder, parents=True)
    except OSError as error:
        raise ConfigError(
            f"runtime folder {str(folder)!r} cannot be used: {error.strerror}; choose another --runtime-dir"
        ) from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"runtime folder {str(folder)!r} is not yours to write; choose another --runtime-dir")
