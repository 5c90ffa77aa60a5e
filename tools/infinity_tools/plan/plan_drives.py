"""What drives are planned with: numbers that were typed, the daemon's profile, or a short measurement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.daemon_client import NodeDaemon
from infinity.errors import ConfigError, InfinityError
from infinity.estimate.machine import Drives
from infinity.io.block_devices import locate, space
from infinity.io.probe.quick import quick_rates
from infinity.units import size_of

_UNUSABLE = (KeyError, TypeError, ValueError, ArithmeticError)


def typed_drives(bandwidth: str, count: int, size: int, endurance: int) -> Drives:
    """Return drives of which each has the typed bandwidth, ``READ/WRITE`` or ``READ/WRITE/MIXED``, in bytes per second.

    Args:
        bandwidth: such as ``7e9/5e9`` or ``7GB/5GB``.
        count: of drives.
        size: bytes that are free on each; 0: not known.
        endurance: bytes that each may be written with; 0: not known.

    Raises:
        ConfigError: it is not that.
    """
    numbers = [_speed(part, bandwidth) for part in bandwidth.split("/")]
    if len(numbers) not in (2, 3):
        raise ConfigError(
            f"--nvme-bandwidth {bandwidth!r}: write what one drive reads and writes per second, such as 7e9/5e9, "
            "or 7e9/5e9/6e9 with what it moves when it does both"
        )
    read, write, mixed = (*numbers, 0.0)[:3]
    return Drives(
        count=count,
        read=count * read,
        write=count * write,
        mixed=count * mixed,
        space_bytes=count * size,
        endurance_bytes=float(count * endurance),
    )


def _speed(text: str, whole: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        try:
            speed = float(size_of(text))
        except ValueError as error:
            raise ConfigError(
                f"--nvme-bandwidth {whole!r}: {text!r} {error}, per second; write 7e9/5e9 or 7GB/5GB"
            ) from None
    if not 1e6 <= speed <= 1e13:
        raise ConfigError(f"--nvme-bandwidth {whole!r}: {text!r} must be from 1e6 to 1e13 bytes per second")
    return speed


def drives_at(paths: Sequence[Path], endurance: int, runtime: Path) -> tuple[Drives, str]:
    """Return the drives that folders lie on, and in a few words where their bandwidth is from.

    Args:
        paths: the folders.
        endurance: bytes that each drive may be written with; 0: not known.
        runtime: runtime folder of the node's daemon.

    Raises:
        ConfigError: a folder is not there, or the same one is named twice.
        InfinityError: it cannot be measured.
    """
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"--nvme {str(path)!r} is not a folder; make it, or give --nvme-bandwidth instead")
    names = [str(path.resolve()) for path in paths]
    places = [locate(name) for name in names]
    if len(set(names)) < len(names):
        raise ConfigError(f"--nvme names the same folder twice: {', '.join(names)}")
    answer = NodeDaemon(runtime).ask("bandwidth", paths=names) or {}
    beside = Counter(place.drive.identity for place in places)  # folders on one drive share it
    free = {place.drive.identity: space(name).free for name, place in zip(names, places, strict=True)}
    try:
        known = answer["together"] or answer["bandwidth"]
        loads = [_profile(known[name], beside[place.drive.identity]) for name, place in zip(names, places, strict=True)]
        source = "profile of infinityd"
    except _UNUSABLE:
        try:
            rates = quick_rates(names)
        except InfinityError as error:
            raise type(error)(f"{error}; or give --nvme-bandwidth") from error
        loads = [(rate.read, rate.write, rate.mixed) for rate in rates.values()]
        source = "measured for two seconds"
    read, write, mixed = (sum(column) for column in zip(*loads, strict=True))
    return Drives(
        count=len(names),
        read=read,
        write=write,
        mixed=mixed if all(load[2] for load in loads) else 0.0,
        space_bytes=sum(free.values()),
        endurance_bytes=endurance * len(beside) if endurance else _left(answer, names, len(names)),
    ), source


def _profile(found: Any, sharing: int) -> tuple[float, float, float]:
    """Return a folder's share of what its drive reads, writes and moves mixed. Raises one of `_UNUSABLE`."""
    read, write, mixed = float(found["read"]), float(found["write"]), float(found["mixed"] or 0.0)
    if not (1e3 <= read <= 1e15 and 1e3 <= write <= 1e15 and 0 <= mixed <= 1e15):
        raise ValueError("no bandwidth")
    return read / sharing, write / sharing, mixed / sharing


def _left(answer: Any, names: Sequence[str], folders: int) -> float:
    """Return the bytes that the drives may still be written with, as the daemon knows it; 0: it does not."""
    try:
        left = {answer["wear"][name]["device"]: float(answer["wear"][name]["left_bytes"]) for name in names}
    except _UNUSABLE:
        return 0.0
    return sum(left.values()) if 0 < len(left) <= folders else 0.0
