"""Random and transformer-like layouts and traces for tests of the planner and the layout."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from infinity.content.format import HALVES, Role, StateFormat
from infinity.content.layout import FSDPModuleSpec, Layout, ShardSpec, build_layout
from infinity.schedule.tier import is_gpu_resident
from infinity.schedule.trace import Event, EventKind
from infinity.schedule.update_schedule import UpdateSchedule

ADAM = (("exp_avg", "float32"), ("exp_avg_sq", "float32"))
FORMATS = {
    "mixed": StateFormat(param="bfloat16", master="float32", kinds=ADAM, grads=("float32",)),
    "halves": StateFormat(param="bfloat16", master="float32", kinds=ADAM, grads=HALVES),
    "plain": StateFormat(param="float32", kinds=ADAM, grads=("float32",)),
    "stateless": StateFormat(param="float32", grads=("float32",)),
    "frozen": StateFormat(param="bfloat16", master="float32"),
}
FORMATS |= {name: FORMATS["mixed"].stored_as(name) for name in ("split", "bf16-moments", "8bit")}
UPDATE_SCHEDULES = ("in_backward", "in_forward", "after_backward")
KIB = 1 << 10


@st.composite
def layouts(draw: st.DrawFn, *, most: int = 40_000) -> Layout:
    """Draw a layout: a few FSDP modules, each with a few shards in several segments, some of them padded or empty."""
    page_bytes = draw(st.sampled_from([64, 128, 192])) * KIB
    fsdp_modules = []
    for fsdp_module in range(draw(st.integers(1, 4))):
        shards = []
        for index in range(draw(st.integers(1, 5))):
            key = draw(st.sampled_from(sorted(FORMATS)))
            numel = draw(st.one_of(st.integers(0, most), st.sampled_from([1, 63, 64, 65, 1024, 8192])))
            shards.append(
                ShardSpec(
                    name=f"u{fsdp_module}.p{index}",
                    numel=numel,
                    padded=max(1, numel) + draw(st.sampled_from([0, 0, 1, 67])),
                    segment_key=key,
                    trainable=bool(FORMATS[key].grads),
                )
            )
        fsdp_modules.append(FSDPModuleSpec(name=f"u{fsdp_module}", shards=tuple(shards)))
    return replace(build_layout(fsdp_modules, FORMATS, page_bytes), batch_pages=draw(st.integers(0, 8)))


@st.composite
def steps(draw: st.DrawFn, layout: Layout) -> tuple[Event, ...]:
    """Draw the events of one step, with repeated gathers, skipped FSDP modules and several backward passes."""
    trainable = [fsdp_module for fsdp_module, segments in enumerate(layout.fsdp_module_segments) if segments]
    events: list[Event] = []
    for _ in range(draw(st.integers(1, 2))):
        forward = draw(st.lists(st.integers(0, len(layout.fsdp_modules) - 1), min_size=1, max_size=6))
        events += [Event(EventKind.GATHER, fsdp_module) for fsdp_module in forward]
        for fsdp_module in reversed(forward):
            if draw(st.booleans()):
                events.append(Event(EventKind.GATHER, fsdp_module))
            if fsdp_module in trainable and draw(st.integers(0, 3)):
                events.append(Event(EventKind.GRADIENTS, fsdp_module, draw(st.integers(1, 2))))
    return (*events, Event(EventKind.STEP))


@st.composite
def update_schedules(draw: st.DrawFn, layout: Layout, events: tuple[Event, ...]) -> UpdateSchedule:
    """Draw an update schedule in which `step()` may update some modules that could be updated in backward."""
    update_schedule = UpdateSchedule.of(draw(st.sampled_from(UPDATE_SCHEDULES)), events)
    early = frozenset(fsdp_module for fsdp_module in sorted(update_schedule.in_backward) if draw(st.booleans()))
    return replace(update_schedule, in_backward=early, overlapped=draw(st.booleans()))


def transformer(layers: int, elements: int, page_bytes: int, key: str = "mixed") -> Layout:
    """Return a layout of FSDP modules with one parameter of the same size each."""
    specs = [
        FSDPModuleSpec(
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
    forward = [Event(EventKind.GATHER, fsdp_module) for fsdp_module in range(layers)]
    backward = [
        event
        for fsdp_module in reversed(range(layers))
        for event in (Event(EventKind.GATHER, fsdp_module), Event(EventKind.GRADIENTS, fsdp_module))
    ]
    return (*forward, *backward, Event(EventKind.STEP))


def gpu_resident_bytes(layout: Layout, fsdp_module: int) -> int:
    """Return the size of the weights and the state of a GPU-resident FSDP module that steps use."""
    pages = [page for page in layout.pages if page.fsdp_module == fsdp_module and page.role is not Role.GRAD]
    return sum(page.nbytes for page in pages if is_gpu_resident(layout, page))
