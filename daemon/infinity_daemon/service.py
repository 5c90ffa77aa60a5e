"""Construction, main loop and shutdown of the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from infinity import __version__
from infinity.errors import ConfigError, InfinityError
from infinity.io.block_devices import Drive, locate
from infinity.telemetry.exporter import serve_registry
from infinity.untrusted_files import own_folder, read_own
from infinity_daemon import configured_drives, drive_measurement, stale
from infinity_daemon.background import Background
from infinity_daemon.collection import Collection
from infinity_daemon.collectors import DeviceFamilies, build_families, rank_families, stale_families
from infinity_daemon.configured_drives import Drives
from infinity_daemon.copy_service import Copies
from infinity_daemon.daemon_config import DaemonConfig
from infinity_daemon.drive_bandwidth import Profiles
from infinity_daemon.drive_measurement import Measuring
from infinity_daemon.drive_wear import DriveWear, WearWatch
from infinity_daemon.fairness import Fairness, usages
from infinity_daemon.log import event
from infinity_daemon.node_state import NodeState
from infinity_daemon.requests import Requests
from infinity_daemon.reservations import Reservations
from infinity_daemon.run_log import RunLog
from infinity_daemon.server import SocketServer
from infinity_daemon.stale import StaleRuns
from infinity_daemon.stats_files import StatsFiles
from infinity_daemon.users import Users
from infinity_daemon.web import routes

_SWEEP_SECONDS: Final = 1.0
_MOST_TOKEN: Final = 4096


async def run(config: DaemonConfig, load: Callable[[], DaemonConfig]) -> None:
    """Run the daemon until SIGTERM or SIGINT.

    Args:
        config: Settings of the daemon.
        load: Function that reads the settings again on SIGHUP.

    Raises:
        ConfigError: if a folder, the port, the socket or the token file cannot be used.
        FolderBusyError: if another daemon uses the socket.
    """
    token = _token(config.server.token_file)
    users = Users(config.runtime_dir, config.server.group)
    _make_folder(config.runtime_dir, "runtime folder", "--runtime-dir")
    users.open_folder()
    if users.several:  # each user may have many connections
        with contextlib.suppress(OSError, ValueError):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if soft != hard:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    await Daemon(config, token, _state_folder(config), users).serve(load)


class Daemon:
    """Daemon of a node. Call `serve` once to run it."""

    def __init__(self, config: DaemonConfig, token: str, state: Path, users: Users) -> None:
        self._config, self._token = config, token
        self._started = time.time()
        self._stats_files = StatsFiles(config.runtime_dir, 0, 0, users)
        self._run_log = RunLog()
        self._reservations = Reservations()
        self._profile = Profiles(state)
        self._measuring = Measuring(self._profile, self._reservations)
        self._stale = StaleRuns()
        self._wear = WearWatch({})
        self._fairness = Fairness()
        self._drives = Drives(bandwidth=self._profile.of, wear=self._wear)
        self._devices = DeviceFamilies(
            stats_files=self._stats_files, drives=self._drives, reserved=self._reservations.by_drive
        )
        self._copies = Copies(config.copies, lambda owner: self._server.is_alive(owner), several=users.several)
        self._collection = Collection(
            {
                "build": lambda: build_families(self._started),
                "devices": self._devices.collect,
                "ranks": lambda: rank_families(self._stats_files),
                "stale": lambda: stale_families(self._stale),
                "copies": self._copies.families,
            }
        )
        self._state = NodeState(
            drives=self._drives,
            reservations=self._reservations,
            stale=self._stale,
            drive_of=_drive_of,
            about=self._about,
        )
        requests = Requests(
            stats_files=self._stats_files,
            profile=self._profile,
            reservations=self._reservations,
            is_alive=lambda owner: self._server.is_alive(owner),
            used=self._measuring.used,
            wear=self._worn,
            rates_of=self._rates_of,
            state=self._state.now,
            more=self._copies.ops,
        )
        self._server = SocketServer(config.socket, requests.answer, users)
        self._port = 0  # TCP port of the HTTP server, or 0 before it is started
        self._drives.paths = config.drives.paths  # and, from the first sweep on, the paths of exported ranks
        self._apply(config)

    def _about(self) -> dict[str, object]:
        """Return information about the daemon for the state of the node and ``/healthz``."""
        about: dict[str, object] = {"version": __version__, "pid": os.getpid(), "started": self._started}
        return {**about, "metrics_port": self._port, "collectors": dict(self._collection.health)}

    def _worn(self, drive: Drive) -> DriveWear:
        """Return the wear of a drive, after taking a sample in case the drive is not monitored."""
        self._wear.look([drive])
        return self._wear.of(drive)

    def _rates_of(self, run: str) -> Mapping[str, float]:
        return self._fairness.rates_of(run) if self._config.fairness.enabled else {}

    def _apply(self, config: DaemonConfig) -> None:
        """Apply the settings that can change while the daemon is running."""
        self._config = config
        self._stats_files.keep = {
            "dead": config.stats_files.keep_dead_seconds,
            "ended": config.stats_files.keep_ended_seconds,
        }
        self._devices.paths = self._measuring.paths = self._stale.paths = config.drives.paths
        self._measuring.settings, self._stale.settings = config.measure, config.stale
        self._wear.endurance = {locate(path).drive.name: size for path, size in config.drives.endurance.items()}

    def _reload(self, load: Callable[[], DaemonConfig]) -> None:
        before = self._config
        try:
            config = load()
            self._apply(config)
        except (InfinityError, OSError) as error:
            event(logging.ERROR, "config.rejected", reason=str(error))
            return
        kept = [
            name
            for name in ("server", "copies", "runtime_dir", "state_dir")
            if getattr(config, name) != getattr(before, name)
        ]
        event(logging.INFO, "config.read")
        if kept:
            event(
                logging.WARNING,
                "config.restart",
                changed=",".join(kept),
                reason="restart infinityd to apply these settings",
            )

    async def serve(self, load: Callable[[], DaemonConfig]) -> None:
        """Run until SIGTERM or SIGINT. SIGHUP applies the settings from `load`. Raises the same exceptions as `run`."""
        await asyncio.to_thread(self._profile.load)
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload, load)
        await self._server.start()
        try:
            await self._copies.start()
            registry, server = CollectorRegistry(), self._config.server
            registry.register(self._collection)
            with serve_registry(
                server.port, registry, self._about, server.host, token=self._token, more=routes(self._state)
            ) as http:
                self._port = http.port
                self._state.linked_port = 0 if http.loopback else http.port
                event(logging.INFO, "started", pid=os.getpid(), port=http.port, socket=self._config.socket)
                await self._work_until(stop)
        finally:
            await self._copies.stop()
            await self._server.stop()
        event(logging.INFO, "stopped")

    async def _work_until(self, stop: asyncio.Event) -> None:
        threads = [
            Background("measure", self._measuring.look, drive_measurement.LOOK_SECONDS),
            Background("stale", self._look_for_stale_files, stale.LOOK_SECONDS),
            Background("drives", self._drives.look, configured_drives.LOOK_SECONDS),
        ]
        try:
            for thread in threads:
                thread.start()
            await self._sweep_until(stop)
        finally:
            self._measuring.end()
            for thread in threads:
                await asyncio.to_thread(thread.close)

    def _look_for_stale_files(self) -> None:
        self._stale.look()
        self._stats_files.remove_expired()

    async def _sweep_until(self, stop: asyncio.Event) -> None:
        """Update reservations, stats files, bandwidth limits and the state once per second, until `stop` is set."""
        while not stop.is_set():
            for entry in self._reservations.expire(self._server.is_alive):
                event(logging.INFO, "space.expired", run=entry.run_id, bytes=entry.size, pid=entry.owner.pid)
            self._copies.expire()
            found = await asyncio.to_thread(self._stats_files.scan)
            self._run_log.observe(found.snapshots)
            live = [snapshot for snapshot in found.snapshots if snapshot.alive]
            now = time.monotonic()
            used = await asyncio.to_thread(usages, live, _drive_of)
            mixed = {tree["name"]: tree.get("profile", {}).get("mixed", 0.0) for tree in self._drives.found[1]}
            self._fairness.observe(used, now, mixed)
            self._measuring.used({drive for usage in used.values() for drive in usage.moved} | self._reserved())
            self._drives.paths = (
                *self._config.drives.paths,
                *(path for snapshot in found.exported for path in snapshot.header.paths if path),
            )
            limits = {run: self._rates_of(run) for run in {snapshot.header.run_id for snapshot in live}}
            await asyncio.to_thread(self._state.observe, found, limits, now)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _SWEEP_SECONDS)

    def _reserved(self) -> set[str]:
        own = self._measuring.owner
        return {entry.place.drive.name for entry in self._reservations.entries() if entry.owner != own}


@lru_cache(maxsize=4096)
def _drive_of(path: str) -> str | None:
    """Return the name of the drive that stores a path, or None. Cached: it cannot change while a rank is live."""
    try:
        return locate(path).drive.name
    except (OSError, ValueError):
        return None


def _token(file: str) -> str:
    """Return the token in a file, or an empty string if `file` is empty. Raises `ConfigError`."""
    if not file:
        return ""
    try:
        if os.stat(file).st_mode & 0o077:
            raise ConfigError(f"server.token_file: {file!r} is readable by other users; run `chmod 600` on it")
        token = read_own(os.path.realpath(file), _MOST_TOKEN).decode().strip()
    except OSError as error:
        raise ConfigError(f"server.token_file: {file!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"server.token_file: {file!r} is not a text file") from error
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"server.token_file: {file!r} must contain one word of ASCII characters; create one with "
            "`openssl rand -hex 32`"
        )
    return token


def _state_folder(config: DaemonConfig) -> Path:
    """Create and return the state folder. If the default state folder cannot be used, return the runtime folder."""
    try:
        _make_folder(config.state_dir, "state folder", "measure.state_dir")
    except ConfigError as error:
        if config.measure.state_dir:
            raise
        event(logging.WARNING, "state.elsewhere", folder=config.runtime_dir, reason=str(error))
        return config.runtime_dir
    return config.state_dir


def _make_folder(folder: Path, what: str, setting: str) -> None:
    try:
        own_folder(folder, parents=True)
    except OSError as error:
        raise ConfigError(
            f"{what} {str(folder)!r} cannot be used: {error.strerror}; set a different {setting}"
        ) from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"{what} {str(folder)!r} is not writable by your user; set a different {setting}")
