"""The planner: from a trace and a budget of frames to a plan. Pure: no I/O, no torch, no clock.

[Note: why a fixed resident set] A training step uses its pages in a fixed cyclic order. On such a sweep any
recency policy evicts each page just before it is needed again; keeping a *fixed* set of pages is optimal, and
the traffic that is left is a closed form (docs/architecture.md). A page's benefit is the bytes per step that
keeping it saves; every page costs one frame, so taking the most beneficial pages first is exact.

[Note: the window] Pages that are not resident stream through the remaining frames. At position i of the
trace the window is [i, c(i)], as far ahead as its distinct pages fit into the streaming frames. A page is in
memory exactly while a use of it lies in the window: entering means a fetch (unless the use replaces the
content), leaving means a write if it was modified. c is monotone and does not depend on timing, therefore the
bytes of a step are known before it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.errors import BudgetError
from infinity.layout import Layout, Role
from infinity.schedule.trace import Access, Mode
from infinity.units import format_setting, format_size

LEAST_WRITING = 2
LEAST_STREAMING = 6


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """NVMe bytes of one step, by role of the page."""

    read: dict[Role, int]
    written: dict[Role, int]

    @property
    def read_bytes(self) -> int:
        """Bytes read per step."""
        return sum(self.read.values())

    @property
    def written_bytes(self) -> int:
        """Bytes written per step."""
        return sum(self.written.values())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the pager executes; immutable.

    `reach[i]` is c(i): the last position (it may exceed the length of the trace and wrap) whose pages are to be
    in memory or on their way when position i begins.
    """

    trace: tuple[Access, ...]
    reach: tuple[int, ...]
    resident: frozenset[int]
    frames: int
    streaming_frames: int
    writing_frames: int
    traffic: Traffic


def least_frames(widest: int) -> int:
    """Return the smallest number of frames that can serve accesses of up to `widest` pages."""
    return max(LEAST_STREAMING, widest + 2) + LEAST_WRITING


def make_plan(trace: Sequence[Access], layout: Layout, frames: int) -> Plan:
    """Return the plan for a trace and an arena of `frames` frames.

    Raises:
        BudgetError: there are fewer frames than `least_frames`.
    """
    trace = tuple(trace)
    used = Counter(use.page for access in trace for use in access)
    widest = max((len(access) for access in trace), default=1)
    if len(used) <= frames:
        streaming, writing = 0, 0
        resident = frozenset(used)
    else:
        least = least_frames(widest)
        if frames < least:
            raise BudgetError(
                f"the host arena holds {frames} pages of {format_size(layout.page_bytes)}; this step needs at least "
                f"{least}: set memory.host_bytes to {format_setting(least * layout.page_bytes)} or more, "
                "or memory.page_bytes lower"
            )
        writing = max(LEAST_WRITING, frames // 16)
        streaming = max(least - LEAST_WRITING, min(frames // 4, 48))
        resident = _most_useful(trace, layout, frames - streaming - writing)
    reach = _windows(trace, resident, streaming) if streaming else tuple(range(len(trace)))
    return Plan(
        trace=trace,
        reach=reach,
        resident=resident,
        frames=frames,
        streaming_frames=streaming,
        writing_frames=writing,
        traffic=predict(trace, reach, resident, layout),
    )


def _most_useful(trace: Sequence[Access], layout: Layout, number: int) -> frozenset[int]:
    transfers: Counter[int] = Counter()
    for access in trace:
        for use in access:
            transfers[use.page] += use.mode.fetches
    modified = {use.page for access in trace for use in access if use.mode.modifies}
    saved = {page: (count + (page in modified)) * layout.pages[page].nbytes for page, count in transfers.items()}
    weights_first = sorted(saved, key=lambda page: (-saved[page], layout.pages[page].role is not Role.PARAM, page))
    return frozenset(weights_first[: max(0, number)])


def _windows(trace: Sequence[Access], resident: frozenset[int], streaming: int) -> tuple[int, ...]:
    length = len(trace)
    inside: Counter[int] = Counter()
    reach: list[int] = []
    cursor = -1
    for position in range(length):
        while cursor + 1 < position + length:
            entering = {use.page for use in trace[(cursor + 1) % length] if use.page not in resident}
            if len(inside) + sum(page not in inside for page in entering) > streaming:
                break
            cursor += 1
            inside.update(entering)
        reach.append(cursor)
        for page in {use.page for use in trace[position] if use.page not in resident}:
            inside[page] -= 1
            if not inside[page]:
                del inside[page]
    return tuple(reach)


def predict(trace: Sequence[Access], reach: Sequence[int], resident: frozenset[int], layout: Layout) -> Traffic:
    """Return the bytes of one steady step of a plan."""
    length = len(trace)
    read = dict.fromkeys(Role, 0)
    written = dict.fromkeys(Role, 0)
    uses: dict[int, list[int]] = {}
    for position, access in enumerate(trace):
        for use in access:
            if use.page not in resident:
                uses.setdefault(use.page, []).append(position)
    modes = {(use.page, position): use.mode for position, access in enumerate(trace) for use in access}
    for page, positions in uses.items():
        role, nbytes = layout.pages[page].role, layout.pages[page].nbytes
        dirty = any(modes[page, position].modifies for position in positions)
        # Walk the cycle once, starting behind a use after which the page leaves the window.
        stays = [
            (positions[(k + 1) % len(positions)] + (length if k + 1 == len(positions) else 0))
            <= _reach_after(position, reach, length)
            for k, position in enumerate(positions)
        ]
        if all(stays):
            continue
        for k, position in enumerate(positions):
            if not stays[k - 1] and modes[page, position].fetches:
                read[role] += nbytes
        if not dirty:
            continue
        start = stays.index(False) + 1
        pending = False
        for offset in range(len(positions)):
            k = (start + offset) % len(positions)
            mode = modes[page, positions[k]]
            pending = mode.modifies or (pending and mode is not Mode.CONSUME)
            if not stays[k]:
                written[role] += nbytes * pending
                pending = False
    return Traffic(read=read, written=written)


def _reach_after(position: int, reach: Sequence[int], length: int) -> int:
    """Last position whose pages are in memory once `position` is done: the window of the next position."""
    return reach[position + 1] if position + 1 < length else reach[0] + length
