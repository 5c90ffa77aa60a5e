"""All checks in display order, with the slow ones last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from infinity_tools.doctor.accelerator import ACCELERATOR
from infinity_tools.doctor.daemon_check import NODE
from infinity_tools.doctor.finding import Finding, Group
from infinity_tools.doctor.io_engine import ENGINE
from infinity_tools.doctor.memory import MEMORY
from infinity_tools.doctor.processor_check import PROCESSOR
from infinity_tools.doctor.software import SOFTWARE
from infinity_tools.doctor.storage import STORAGE
from infinity_tools.doctor.world import World

GROUPS: Final[tuple[Group, ...]] = (SOFTWARE, PROCESSOR, MEMORY, ENGINE, STORAGE, NODE, ACCELERATOR)

Part = tuple[str, list[Finding]]
"""Title and findings of a part."""


def look(world: World) -> Iterator[Part]:
    """Yield the findings as soon as they are available."""
    for group in GROUPS:
        yield from group.look(world)
