"""Random and transformer-like layouts and traces for the tests of planner and layout."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from infinity.content.format import HALVES, Role, StateFormat
from infinity.content.layout import Layout, ShardSpec, UnitSpec, build_layout
from infinity.schedule.placement import Placement
from infinity.schedule.tier import lives_at_home
from infinity.schedule.trace import Event, EventKind

ADAM = (("exp_avg", "float32"), ("exp_avg_sq", "float32"))
FORMATS = {
    "mixed": StateFormat(param="bfloat16", master="float32", kinds=ADAM, grads=("float32",)),
    "halves": StateFormat(param="bfloat16", master="float32", kinds=ADAM, grads=HALVES),
    "plain": StateFormat(param="float32", kinds=ADAM, grads=("float32",)),
    "stateless": StateFormat(param="float32", grads=("float32",)),
    "frozen": StateFormat(param="bfloat16", master="float32"),
}
FORMATS |= {name: FORMATS["mixed"].stored_as(name) for name in ("split", "bf16-moments", "8bit")}
PLACEMENTS = ("in_backward", "in_forward", "after_backward")
KIB = 1 << 10


@st.composite
def layouts(draw: st.DrawFn, *, most: int = 40_000) -> Layout:
    """Draw a layout: a few units of a few shards in several segments, some of them padded or empty."""
    page_bytes = draw(st.sampled_from([64, 128, 192])) * KIB
    units = []
    for unit in range(draw(st.integers(1, 4))):
        shards = []
        for index in range(draw(st.integers(1, 5))):
            key = draw(st.sampled_from(sorted(FORMATS)))
            numel = draw(st.one_of(st.integers(0, most), st.sampled_from([1, 63, 64, 65, 1024, 8192])))
            shards.append(
                ShardSpec(
                    name=f"u{unit}.p{index}",
                    numel=numel,
                    padded=max(1, numel) + draw(st.sampled_from([0, 0, 1, 67])),
                    segment_key=key,
                    trainable=bool(FORMATS[key].grads),
                )
            )
        units.append(UnitSpec(name=f"u{unit}", shards=tuple(shards)))
    return build_layout(units, FORMATS, page_bytes)


@st.composite
def steps(draw: st.DrawFn, layout: Layout) -> tuple[Event, ...]:
    """Draw the events of one step: repeated gathers, units that are skipped, several backward passes."""
    trainable = [unit for unit, segments in enumerate(layout.unit_segments) if segments]
    events: list[Event] = []
    for _ in range(draw(st.integers(1, 2))):
        forward = draw(st.lists(st.integers(0, len(layout.units) - 1), min_size=1, max_size=6))
        events += [Event(EventKind.GATHER, unit) for unit in forward]
        for unit in reversed(forward):
            if draw(st.booleans()):
                events.append(Event(EventKind.GATHER, unit))
            if unit in trainable and draw(st.integers(0, 3)):
                events.append(Event(EventKind.GRADIENTS, unit, draw(st.integers(1, 2))))
    return (*events, Event(EventKind.STEP))


@st.composite
def placements(draw: st.DrawFn, layout: Layout, events: tuple[Event, ...]) -> Placement:
    """Draw a placement for a step; some of what could be updated in backward may be updated in `step()`."""
    placement = Placement.of(draw(st.sampled_from(PLACEMENTS)), events)
    early = frozenset(unit for unit in sorted(placement.in_backward) if draw(st.booleans()))
    return replace(placement, in_backward=early, overlapped=draw(st.booleans()))


def transformer(layers: int, elements: int, page_bytes: int, key: str = "mixed") -> Layout:
    """Return a layout of equal units."""
    specs = [
        UnitSpec(
            name=f"layer{index}",
            shards=(
                ShardSpec(
                    name=f"layer{index}.weight", numel=elements, padded=elements, segment_key=key, trainable=True
                ),
            ),
        )
        for index in range(layers)
    ]
    return build_layout(specs, FORMATS, page_bytes)


def transformer_step(layers: int) -> tuple[Event, ...]:
    """Return the events of forward, backward and step."""
    forward = [Event(EventKind.GATHER, unit) for unit in range(layers)]
    backward = [
        event
        for unit in reversed(range(layers))
        for event in (Event(EventKind.GATHER, unit), Event(EventKind.GRADIENTS, unit))
    ]
    return (*forward, *backward, Event(EventKind.STEP))


def home_bytes(layout: Layout, unit: int) -> int:
    """Return the bytes of the weights and the state of a unit that lives on the device, as far as steps use them."""
    pages = [page for page in layout.pages if page.unit == unit and page.role is not Role.GRAD]
    return sum(page.nbytes for page in pages if lives_at_home(layout, page))
