"""All checks in display order. Slow checks come last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from infinity_tools.doctor.accelerator import ACCELERATOR
from infinity_tools.doctor.daemon_check import NODE
from infinity_tools.doctor.finding import Finding, Group
from infinity_tools.doctor.memory import MEMORY
from infinity_tools.doctor.software import ENGINE, PROCESSOR, SOFTWARE
from infinity_tools.doctor.storage import STORAGE
from infinity_tools.doctor.world import World

GROUPS: Final[tuple[Group, ...]] = (SOFTWARE, PROCESSOR, MEMORY, ENGINE, STORAGE, NODE, ACCELERATOR)

Part = tuple[str, list[Finding]]
"""Title of a part of the output, and its findings."""


def look(world: World) -> Iterator[Part]:
    """Run all checks, and yield each part as soon as its checks have finished."""
    for group in GROUPS:
        yield from group.look(world)
