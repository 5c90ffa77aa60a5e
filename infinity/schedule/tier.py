"""What the memory of a device is used for: slots, weights that stay there, and units that live there. Pure.

[Note: what a byte of the device saves] Slots to stage in come first: they save waiting, not bytes. With what is left, a
unit can be *kept*, where its weights (w bytes) stay from one gather of a step to the next, or be *at home*, where they
and its master and moments (s bytes) never leave, as do its gradients (g bytes) where those are stored. Of G gathers in
a step, r find weights that are kept, mostly G - 1. Kept weights save r·w bytes over the link in a step, each byte r. At
home a unit saves all there is: G·w there, w and s back from the update that changes them, s there for it, and 2·g or
more: each byte of w + s + g saves ((G + 1)·w + 2·s + 2·g) / (w + s + g), which is between 2 and G + 1. So with a gather
in forward and one in backward (r = 1) a byte at home saves more than twice as much, whatever the sizes; with many
micro-batches that are gathered one by one (r large, w small beside s) kept weights save more.

Each transfer over the link may stand for one of the drives, too: of what the host's arena has no room for. The planner
keeps weights there first, since they save most, then all else. So the share of pages that comes from the drives is
about what the arena lacks of the weights, and what the rest of it lacks of the others, and what is saved counts 1 plus
that share. The more of the weights the arena has, the less do kept weights save beside what units at home save.

Units that save the same for each byte are alike, such as the layers of a model. Those are kept first that are first
gathered last: their second gather comes soonest. Those at home are spread over the step, so that what still moves hides
behind the computation of every unit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from infinity.content.format import ITEMSIZE, Role
from infinity.content.layout import Layout, Page
from infinity.schedule.placement import Placement
from infinity.schedule.planner import evenly
from infinity.schedule.trace import Event, EventKind, stored_components
from infinity.units import align_up

SLOTS: Final = 2
"""Units whose weights are staged at once: one is copied to the device while the other is copied out of its slot."""
_STAGED_ALIGNMENT: Final = 256
"""Bytes; kernels read aligned vectors."""


def shard_bytes(layout: Layout, shard: int) -> int:
    """Return the bytes of a shard's weights, padding included, as they are staged."""
    placed = layout.shards[shard]
    itemsize = ITEMSIZE[layout.segments[placed.segment].format.param]
    return align_up(placed.spec.padded * itemsize, _STAGED_ALIGNMENT)


def unit_bytes(layout: Layout, unit: int) -> int:
    """Return the bytes of the weights of a unit, as they are staged."""
    return sum(shard_bytes(layout, shard) for shard in layout.unit_shards[unit])


def staged_units(events: Sequence[Event], placement: Placement) -> tuple[int, ...]:
    """Return the units that are staged, in the order in which they first are gathered.

    That are those which are gathered behind the first gather of a step, and are not at home.
    """
    gathers = [event.unit for event in events if event.kind is EventKind.GATHER]
    return tuple(unit for unit in dict.fromkeys(gathers[1:]) if unit not in placement.at_home)


def lives_at_home(layout: Layout, page: Page) -> bool:
    """Whether a page is on the device where its unit is at home: not what steps do not use, masters that are frozen."""
    return page.role is Role.PARAM or layout.segments[page.segment].trainable


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """Something that memory of the device can be used for."""

    unit: int
    at_home: bool
    """Whether the unit lives there; else its weights are kept."""
    nbytes: int
    """What it takes."""
    saved: float
    """Bytes of a step that it saves, over the link and the drives."""
    order: float
    """The least comes first of those that save the same for each byte."""


def with_device(
    placement: Placement,
    events: Sequence[Event],
    layout: Layout,
    device_bytes: int,
    *,
    host_bytes: int = 0,
    update_on_device: bool = False,
) -> Placement:
    """Return the placement with what the memory of a device is used for. [Note: what a byte of the device saves]

    Args:
        device_bytes: what there is for that.
        host_bytes: of the arena.
        update_on_device: whether pages are updated there; only then can a unit be at home that is trained.
    """
    units = staged_units(events, placement)
    if _slot_bytes(layout, units) > device_bytes:
        return placement
    kept: dict[int, int] = {}  # bytes by unit
    at_home: set[int] = set()
    taken = 0
    choices = _choices(placement, events, layout, host_bytes, update_on_device=update_on_device)
    for choice in sorted(choices, key=lambda choice: (-round(choice.saved / choice.nbytes, 6), choice.order)):
        if choice.unit in at_home or (choice.unit in kept and not choice.at_home):
            continue
        away = at_home | {choice.unit} if choice.at_home else at_home
        slots = _slot_bytes(layout, [unit for unit in units if unit not in away])
        more = choice.nbytes - kept.get(choice.unit, 0)  # weights that stay are a part of a unit that lives there
        if taken + more + slots > device_bytes:
            continue
        taken += more
        if choice.at_home:
            at_home.add(choice.unit)
            kept.pop(choice.unit, None)
        else:
            kept[choice.unit] = choice.nbytes
    return replace(placement, staged=not at_home.issuperset(units), kept=frozenset(kept), at_home=frozenset(at_home))


def _slot_bytes(layout: Layout, units: Iterable[int]) -> int:
    """Return what the slots for some units take."""
    return SLOTS * max((unit_bytes(layout, unit) for unit in units), default=0)


def _choices(
    placement: Placement, events: Sequence[Event], layout: Layout, host_bytes: int, *, update_on_device: bool
) -> list[_Choice]:
    """Return what the memory of a device can be used for, beside slots."""
    gathered = [event.unit for event in events if event.kind is EventKind.GATHER]
    arrivals = Counter(event.unit for event in events if event.kind is EventKind.GRADIENTS)
    components = stored_components(events)
    gathers, later = Counter(gathered), Counter(gathered[1:])
    weights, states = layout.bytes_of(Role.PARAM), layout.bytes_of(Role.UPDATE)
    of_weights = 1 + _lacking(weights, host_bytes)
    of_others = 1 + _lacking(states, host_bytes - weights)
    of_unit: dict[int, list[Page]] = defaultdict(list)
    for page in layout.pages:
        if lives_at_home(layout, page):
            of_unit[page.unit].append(page)
    found = []
    for position, unit in enumerate(dict.fromkeys(event.unit for event in events if event.kind is not EventKind.STEP)):
        if later[unit] > 1:
            kept = unit_bytes(layout, unit)
            saved = (later[unit] - 1) * kept * of_weights
            found.append(_Choice(unit=unit, at_home=False, nbytes=kept, saved=saved, order=-position))
        if layout.unit_segments[unit] and not update_on_device:
            continue
        w, s, g = _bytes_by_role(of_unit[unit], 0 if unit in placement.in_backward else components.get(unit, 0))
        updates = min(arrivals[unit], 1)
        saved = (gathers[unit] + updates) * w * of_weights + 2 * (updates * s + arrivals[unit] * g) * of_others
        found.append(_Choice(unit=unit, at_home=True, nbytes=w + s + g, saved=saved, order=evenly(position)))
    return found


def _lacking(nbytes: int, room: int) -> float:
    """Return which part of some bytes has no room."""
    return 1 - min(1.0, max(0, room) / nbytes) if nbytes else 0.0


def _bytes_by_role(pages: Iterable[Page], components: int) -> tuple[int, int, int]:
    """Return the bytes of weights, of the state, and of so many components of gradients, of a unit's pages."""
    found = dict.fromkeys(Role, 0)
    for page in pages:
        found[page.role] += page.nbytes if page.role is not Role.GRAD or page.component < components else 0
    return found[Role.PARAM], found[Role.UPDATE], found[Role.GRAD]
