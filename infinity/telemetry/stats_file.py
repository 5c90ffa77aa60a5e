"""Format of the stats file, and a reader that validates it.

[Note: format]
    bytes 0..8     magic ``INFSTATS``
    bytes 8..12    version, unsigned, little-endian
    bytes 12..16   length of the header in bytes, unsigned, little-endian
    bytes 16..     header: a JSON object in UTF-8 (see `StatsHeader`), zero-padded to a multiple of 64
    then           cells: doubles in the machine's byte order (see `telemetry/stats_cells.py`), to the end
Cell 0 is the Unix time at which the rank closed its file, or 0 while the file is open.

[Note: torn reads] Readers and the writer do not share a lock. A cell is a double at an address that is a multiple of 8,
so it never straddles a cache line, and the writer stores it with a single instruction. Readers use ``pread`` instead of
a mapping, because a process that reads from a mapping receives SIGBUS if another process has truncated the file. In
practice, Linux copies aligned words atomically, but it does not guarantee this. Therefore, the reader reads all cells
three times, and uses the third value of a cell whose first two differ. Each cell is consistent on its own but not with
other cells: the sum of a histogram may be one observation ahead of its buckets.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import json
import math
import os
import re
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from infinity.errors import ConfigError, InfinityError
from infinity.schema import distinct, integer, number, printable, record, sequence, table, text
from infinity.telemetry.metrics import BY_NAME, Metric
from infinity.telemetry.stats_cells import CLOSED_CELL, cells_of, label_sets
from infinity.units import KIB, MIB, align_up
from infinity.untrusted_files import open_own, open_regular

MAGIC: Final = b"INFSTATS"
VERSION: Final = 1
SUFFIX: Final = ".stats"
MAX_DEVICES: Final = 64
MAX_HOSTS: Final = 256

_PREAMBLE = struct.Struct("<8sII")
_MAX_HEADER = 64 * KIB
_MAX_FILE = 4 * MIB
_HOST = re.compile(r"(?=.{1,64}\Z)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
"""Host name. Linux limits its length."""

Status = Literal["live", "ended", "dead"]
"""Status of the rank: it is running, it has closed its stats file, or it exited without closing it."""


class StatsFileError(InfinityError):
    """Raised if a file is not a stats file that this version can read. The message contains the path and the reason."""


@dataclass(frozen=True, kw_only=True)
class StatsHeader:
    """Identity of the rank that writes a stats file.

    `started` is the Unix time at which the file was created. `process_started` (clock ticks since boot) and
    `pid_namespace` (an inode number) distinguish the rank from a later process with the same PID; 0 means unknown.
    `devices` holds the values of the ``device`` label. `info` maps names to texts: ``version``, ``torch_version``,
    ``io_engine``, ``paths`` (a JSON list of the configured paths, in the order of `devices`), ``hosts`` (a JSON list),
    ``weight``, ``name`` and ``steps_before``.
    """

    run_id: str
    rank: int
    local_rank: int
    world_size: int
    pid: int
    process_started: int
    pid_namespace: int
    started: float
    devices: tuple[str, ...]
    info: Mapping[str, str]
    fingerprint: str

    @property
    def paths(self) -> tuple[str, ...]:
        """Configured paths, in the order of `devices`; empty if they were not recorded."""
        paths = self._texts("paths")[:MAX_DEVICES]
        return paths if all(map(str.isprintable, paths)) else ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host name of this rank, followed by those of the other hosts of the run, in the order of their ranks.

        At most `MAX_HOSTS` names; empty if they were not recorded or one of them is not a valid host name.
        """
        hosts = self._texts("hosts")[:MAX_HOSTS]
        return hosts if all(map(_HOST.fullmatch, hosts)) else ()

    @property
    def name(self) -> str:
        """Name of the run (`run.name`); the run id if it was not recorded."""
        return self.info.get("name") or self.run_id

    @property
    def steps_before(self) -> int:
        """Number of steps before the checkpoint that this process resumed from; 0 if it was not recorded."""
        told = self.info.get("steps_before", "")
        return int(told) if told.isascii() and told.isdigit() and len(told) <= 15 else 0

    @property
    def weight(self) -> float:
        """Bandwidth weight relative to other runs (`storage.bandwidth_weight`); 1 if it was not recorded."""
        told = self.info.get("weight", "")
        return float(told) if told.isascii() and told.isdigit() and 0 < len(told) <= 4 and int(told) else 1.0

    def _texts(self, name: str) -> tuple[str, ...]:
        """Return the texts in a JSON list of `info`; empty if it is missing or invalid."""
        try:
            found = json.loads(self.info.get(name, "[]"))
        except (ValueError, RecursionError):
            return ()
        return tuple(found) if isinstance(found, list) and all(isinstance(text, str) for text in found) else ()


@dataclass(frozen=True, kw_only=True)
class HistogramValue:
    """Value of a histogram: the number of observations per bucket (not cumulative), and the sum of the observations."""

    counts: tuple[float, ...]
    sum: float


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Contents of a stats file at one point in time: its header and the values of its cells (see `stats_cells.py`).

    `uid` is the user id of the file's owner.
    """

    header: StatsHeader
    values: tuple[float, ...]
    status: Status
    uid: int

    @property
    def alive(self) -> bool:
        """``True`` if the rank is running and has not closed its stats file."""
        return self.status == "live"

    def value(self, name: str, **labels: str) -> float:
        """Return the value of a counter or gauge, summed over all values of labels that are not given."""
        metric = BY_NAME[name]
        if len(labels) == len(metric.labels):
            return self.value_at(metric, tuple(labels[key] for key in metric.label_names))
        every = [dict(zip(metric.label_names, one, strict=True)) for one in label_sets(metric, self.header.devices)]
        return sum(self.value(name, **one) for one in every if labels.items() <= one.items())

    def value_at(self, metric: Metric, values: tuple[str, ...]) -> float:
        """Return the value of a counter or gauge for label values in the order of `metric.labels`."""
        return self.values[self._index(metric, values)]

    def histogram_at(self, metric: Metric, values: tuple[str, ...] = ()) -> HistogramValue:
        """Return the value of a histogram for label values in the order of `metric.labels`."""
        first = self._index(metric, values)
        last = first + len(metric.buckets) + 1
        return HistogramValue(counts=self.values[first:last], sum=self.values[last])

    def _index(self, metric: Metric, values: tuple[str, ...]) -> int:
        return cells_of(self.header.devices).first[metric.name, values]


def encode_head(header: StatsHeader) -> bytes:
    """Return the part of a stats file that precedes the cells, padded to a multiple of 64 bytes.

    Raises:
        ConfigError: if a field is invalid, or if the header exceeds 64 KiB.
    """
    body = json.dumps(asdict(header), ensure_ascii=True, sort_keys=True).encode()
    if len(body) > _MAX_HEADER:
        raise ConfigError(f"the header of the stats file has {len(body)} bytes; the limit is {_MAX_HEADER} bytes")
    try:
        _parse_header(body)
    except ValueError as error:
        raise ConfigError(f"stats file: {error}") from error
    head = _PREAMBLE.pack(MAGIC, VERSION, len(body)) + body
    return head.ljust(align_up(len(head), 64), b"\0")


def stats_file_name(run_id: str, rank: int) -> str:
    """Return the name of a rank's stats file."""
    return f"{run_id}.rank{rank}{SUFFIX}"


def read_stats_file(path: str | os.PathLike[str]) -> Snapshot:
    """Return a snapshot of a stats file, whose contents are validated.

    Raises:
        StatsFileError: if the file is missing, unreadable, not a regular file, owned by another user (unless this
            process runs as root), truncated, malformed, written by a version with different metrics, or not named after
            its run and rank. The check of the name prevents two files from exporting the same time series.
    """
    name = os.fspath(path)
    try:
        # Root may read the stats files of all users.
        descriptor = open_own(name, os.O_RDONLY) if os.geteuid() else open_regular(name, os.O_RDONLY)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StatsFileError(f"{name}: cannot be opened: {reason}") from error
    try:
        snapshot = _read_open_file(descriptor)
        if Path(name).name != (expected := stats_file_name(snapshot.header.run_id, snapshot.header.rank)):
            raise ValueError(f"wrong file name: according to its header, this is {expected}")
        return snapshot
    except (OSError, ValueError) as error:
        raise StatsFileError(f"{name}: {error}") from error
    finally:
        os.close(descriptor)


def _read_open_file(descriptor: int) -> Snapshot:
    about = os.fstat(descriptor)
    if not _PREAMBLE.size <= about.st_size <= _MAX_FILE:
        raise ValueError(f"the size of {about.st_size} bytes is not valid for a stats file")
    magic, version, length = _PREAMBLE.unpack(_read_exactly(descriptor, _PREAMBLE.size, 0))
    if magic != MAGIC:
        raise ValueError("not a stats file")
    if version != VERSION:
        raise ValueError(f"format version {version} is not supported; this version of infinity reads version {VERSION}")
    if length > _MAX_HEADER:
        raise ValueError(f"the header has {length} bytes; the limit is {_MAX_HEADER} bytes")
    header = _parse_header(_read_exactly(descriptor, length, _PREAMBLE.size))
    cells = cells_of(header.devices)
    if header.fingerprint != cells.fingerprint:
        raise ValueError(
            "written by a version of infinity with a different set of metrics; use that version to read it"
        )
    offset = align_up(_PREAMBLE.size + length, 64)
    if about.st_size != offset + 8 * cells.length:
        raise ValueError(f"the file has {about.st_size} bytes instead of {offset + 8 * cells.length}")
    values = _read_cells(descriptor, offset, cells.length)
    if not all(0 <= values[index] < math.inf for index in cells.counted):
        raise ValueError("a counter or histogram is negative or not finite")
    status = _status(header, values[CLOSED_CELL], descriptor)
    return Snapshot(header=header, values=values, status=status, uid=about.st_uid)


def _read_exactly(descriptor: int, length: int, offset: int) -> bytes:
    data = os.pread(descriptor, length, offset)
    if len(data) != length:
        raise ValueError(f"truncated: only {len(data)} of {length} bytes could be read at offset {offset}")
    return data


def _read_cells(descriptor: int, offset: int, length: int) -> tuple[float, ...]:
    # See [Note: torn reads].
    looks = (array.array("d", _read_exactly(descriptor, 8 * length, offset)) for _ in range(3))
    return tuple(a if a == b else c for a, b, c in zip(*looks, strict=True))


_NAME = text("[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_RANK = integer(0, (1 << 24) - 1)
_HEADER = record(
    StatsHeader,
    more=True,
    run_id=_NAME,
    rank=_RANK,
    local_rank=_RANK,
    world_size=_RANK,
    pid=integer(0, (1 << 31) - 1),
    process_started=integer(0),
    pid_namespace=integer(0),
    started=number(0, 1 << 40),
    devices=distinct(sequence(_NAME, most=MAX_DEVICES)),
    info=table(printable(), printable()),
    fingerprint=_NAME,
)


def _parse_header(data: bytes) -> StatsHeader:
    """Return the header encoded in `data`. Raises `ValueError` if a field is invalid."""
    try:
        header: StatsHeader = _HEADER(json.loads(data.decode()))
    except RecursionError as error:
        raise ValueError("the header is nested too deeply") from error
    if not header.rank < header.world_size or header.local_rank > header.rank:
        raise ValueError(
            f"rank {header.rank} (local {header.local_rank}) is not possible with a world size of {header.world_size}"
        )
    return header


def process_start(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot, or 0 if it has exited or cannot be inspected."""
    try:
        return _inspected_start(pid)
    except (OSError, ValueError, IndexError):
        return 0


def has_exited(pid: int, started: int) -> bool:
    """Return whether a process that started at `started` (`process_start`, 0: unknown) has exited.

    The result is False if the process cannot be inspected, for example because too many files are open.
    """
    try:
        return bool(started) and _inspected_start(pid) != started
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ESRCH)
    except (ValueError, IndexError):
        return False


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, for example by SIGSTOP, Ctrl-Z or a debugger."""
    try:
        return _inspected(pid)[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def _inspected_start(pid: int) -> int:
    fields = _inspected(pid)
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def _inspected(pid: int) -> list[bytes]:
    """Return the fields of `/proc/PID/stat`, beginning with the state."""
    # The name in parentheses may contain spaces and parentheses.
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def pid_namespace() -> int:
    """Return the inode number of this process's PID namespace, or 0 if it is unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _status(header: StatsHeader, closed: float, descriptor: int) -> Status:
    if closed:
        return "ended"
    if header.process_started and header.pid_namespace and header.pid_namespace == pid_namespace():
        return "live" if process_start(header.pid) == header.process_started else "dead"
    # If the rank is in another container or /proc is missing, its PID cannot be checked, but a live rank locks its
    # file.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "live"
    return "dead"


def find_stats_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the sorted paths of the files in a folder that are named like stats files; empty if it cannot be read."""
    try:
        return sorted(path for path in Path(folder).iterdir() if is_stats_file(path.name))
    except OSError:
        return []


def run_status(ranks: Iterable[Snapshot]) -> Status:
    """Return the status of a run: ``dead`` if any rank is dead, because the other ranks cannot continue without it."""
    statuses = {snapshot.status for snapshot in ranks}
    order: tuple[Status, ...] = ("dead", "live", "ended")
    return next(status for status in order if status in statuses)


def without_replaced(snapshots: Iterable[Snapshot]) -> list[Snapshot]:
    """Return the snapshots except dead ranks whose run has been resumed on this node.

    A rank that has moved to another node does not replace its file on this node. The file of a rank that died after the
    resume is newer than the start of each live process of the run.
    """
    snapshots = list(snapshots)
    booted, ticks = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME), os.sysconf("SC_CLK_TCK")
    resumed: dict[tuple[str, int], float] = {}
    for one in snapshots:
        if one.alive and one.header.process_started:
            run, began = (one.header.run_id, one.uid), booted + one.header.process_started / ticks
            resumed[run] = min(began, resumed.get(run, began))
    return [
        one
        for one in snapshots
        if one.status != "dead" or one.header.started >= resumed.get((one.header.run_id, one.uid), 0)
    ]


def run_exists(header: StatsHeader, uid: int) -> bool:
    """Return ``True`` if a folder of the rank's run still exists and belongs to the owner of the stats file.

    May block if a drive does not respond.

    Args:
        header: Header of the stats file.
        uid: Owner of the stats file. Only root's files may refer to folders of other users.
    """
    for path in header.paths:
        with contextlib.suppress(OSError):
            if uid in (0, os.lstat(os.path.join(path, header.run_id)).st_uid):
                return True
    return False


def remove_stats_file(path: Path, about: os.stat_result) -> bool:
    """Remove a stats file unless it is locked or has been replaced. Return ``True`` if it was removed.

    Args:
        path: Path of the stats file.
        about: Status of the file to remove; a different file with the same name is kept.
    """
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), about):
                path.unlink()
                return True
        finally:
            os.close(file)
    return False


def is_stats_file(name: str) -> bool:
    """Return whether a file is named like a complete stats file."""
    return name.endswith(SUFFIX) and not name.startswith(".")
