"""Drives for an estimate, from command-line options, the daemon's profile, or a short measurement."""

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
from infinity.units import rate_of

_UNUSABLE = (KeyError, TypeError, ValueError, ArithmeticError)


def typed_drives(bandwidth: str, count: int, size: int, endurance: int) -> Drives:
    """Return drives that each have the given bandwidth, ``READ/WRITE`` or ``READ/WRITE/MIXED``, in bytes per second.

    Args:
        bandwidth: Bandwidth such as ``7e9/5e9`` or ``7GB/5GB``.
        count: Number of drives.
        size: Free bytes per drive. 0: unknown.
        endurance: Rated write endurance per drive, in bytes. 0: unknown.

    Raises:
        ConfigError: If the bandwidth is malformed.
    """
    numbers = [parse_rate(part, f"--nvme-bandwidth {bandwidth!r}:", least="1e6") for part in bandwidth.split("/")]
    if len(numbers) not in (2, 3):
        raise ConfigError(
            f"--nvme-bandwidth {bandwidth!r} is not READ/WRITE or READ/WRITE/MIXED in bytes per second; write, for "
            "example, 7e9/5e9, or 7e9/5e9/6e9 with the combined bandwidth of simultaneous reads and writes"
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


def parse_rate(text: str, name: str, *, least: str = "1e3") -> float:
    """Parse a bandwidth such as ``55e9``, ``55GB/s`` or ``440Gbit/s``. Raises `ConfigError`."""
    try:
        rate = rate_of(text)
    except ValueError:
        raise ConfigError(
            f"{name} {text!r} is not a bandwidth; write bytes or bits per second, for example, 7e9, 7GB or 56Gbit/s"
        ) from None
    if not float(least) <= rate <= 1e15:
        raise ConfigError(f"{name} {text!r} must be between {least} and 1e15 bytes per second, such as 55e9")
    return rate


def drives_at(paths: Sequence[Path], endurance: int, runtime: Path) -> tuple[Drives, str]:
    """Return the drives that contain the folders, and a description of where their bandwidth comes from.

    Args:
        paths: Folders on the drives.
        endurance: Rated write endurance per drive, in bytes. 0: unknown.
        runtime: Runtime folder of the node's daemon.

    Raises:
        ConfigError: If a folder does not exist, or is given twice.
        InfinityError: If the drives cannot be measured.
    """
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"--nvme {str(path)!r} is not a folder; create it, or pass --nvme-bandwidth instead")
    names = [str(path.resolve()) for path in paths]
    places = [locate(name) for name in names]
    if len(set(names)) < len(names):
        raise ConfigError(f"--nvme contains the same folder twice: {', '.join(names)}")
    answer = NodeDaemon(runtime).ask("bandwidth", paths=names) or {}
    beside = Counter(place.drive.identity for place in places)  # folders on one drive share its bandwidth
    free = {place.drive.identity: space(name).free for name, place in zip(names, places, strict=True)}
    try:
        known = answer["together"] or answer["bandwidth"]
        loads = [_profile(known[name], beside[place.drive.identity]) for name, place in zip(names, places, strict=True)]
        source = "from infinityd's profile"
    except _UNUSABLE:
        try:
            rates = quick_rates(names)
        except InfinityError as error:
            raise type(error)(f"{error}; or pass --nvme-bandwidth") from error
        loads = [(rate["read"], rate["write"], rate["mixed"]) for rate in rates.values()]
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
    """Return a drive's read, write and mixed bandwidth, divided by the number of folders on it. Raises one of
    `_UNUSABLE`.
    """
    read, write, mixed = float(found["read"]), float(found["write"]), float(found["mixed"] or 0.0)
    if not (1e3 <= read <= 1e15 and 1e3 <= write <= 1e15 and 0 <= mixed <= 1e15):
        raise ValueError("no bandwidth")
    return read / sharing, write / sharing, mixed / sharing


def _left(answer: Any, names: Sequence[str], folders: int) -> float:
    """Return the remaining rated endurance of the drives in bytes, as reported by the daemon, or 0 if unknown."""
    try:
        left = {answer["wear"][name]["device"]: float(answer["wear"][name]["left_bytes"]) for name in names}
    except _UNUSABLE:
        return 0.0
    return sum(left.values()) if 0 < len(left) <= folders else 0.0
