"""Will it fit, where does everything lie, how long does a step take, how long do the drives live?

What is planned is what a run would plan, by the same budget, update schedule, planner and clock. Only shapes and events
come
from `ModelShape`, not from a model and its first step. What else the clock is given is arithmetic: floating-point
operations over what the device reaches, bytes over links and over the speed of checksums, parameters over the speed of
updates, accesses over that of Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from infinity.budget import Budget, choose_budget, device_update_bytes
from infinity.config import Config
from infinity.content.format import ITEMSIZE, Role
from infinity.content.layout import Layout, Page
from infinity.errors import ConfigError
from infinity.estimate.machine import Machine
from infinity.estimate.model import OPTIMIZERS, FSDPModuleShape, ModelShape
from infinity.memory.limits import device_margin
from infinity.schedule.link import UPDATE_BYTES, LinkTraffic, link_traffic, share_that_stays
from infinity.schedule.planner import Plan, Traffic, predict_seconds
from infinity.schedule.predicted_trace import expected_events
from infinity.schedule.schedule_choice import choose_plan, placed
from infinity.schedule.stack import activation_page, moved_bytes, page_lengths
from infinity.schedule.tier import is_gpu_resident
from infinity.schedule.timing import Beside
from infinity.schedule.trace import Event, EventKind
from infinity.schedule.update_schedule import UpdateSchedule
from infinity.store.extents import SPARE_SLOTS, file_sizes, plan_slots, spread
from infinity.store.page_store import state_pages
from infinity.units import format_setting, format_size

HIDDEN = 1.05
"""Storage counts as hidden where a step takes at most so much of what it would take without it."""
STORAGE = ("drives", "hashing")
"""What storage keeps busy, by the names in `Seconds`."""
DAY = 86_400.0
BEHIND = 2
"""FSDP modules whose gradients may be between their computation and their update."""
_AT_ONCE = 1e18
"""Bytes per second of drives that take no time."""
_MOST_TOKENS = 1 << 34
_ACTIVATIONS = 34
"""Bytes per token and element of `hidden` that a layer keeps for backward in 16 bits, with an attention that keeps no
matrix (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4)."""
_AT_A_TIME = 4
"""Tensors of the size of a layer's input that are there at a time where those are paged."""
_LOGIT_BYTES = 12
"""Bytes per logit: in 16 bits, in fp32 for the loss, and the gradients of both."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained how."""

    batch_tokens: int
    """Tokens per step, over all ranks."""
    sequence: int
    """Tokens per sequence."""
    world_size: int = 1
    """Ranks among which the model is sharded."""
    micro_batches: int = 1
    """Parts of a rank's batch that are computed one after the other."""
    layer_major: bool = True
    """Whether each layer runs all micro-batches before the next one (`infinity.micro_batches`), or a loop runs each
    micro-batch through the whole model."""
    loss_tokens: int | None = None
    """Tokens whose logits are there at a time (`infinity.sliced_loss`); None: those of a micro-batch."""
    checkpointing: bool = False
    """Whether only the inputs of layers are kept, and layers are computed again in backward."""
    clipping: bool = False
    """Whether the global norm of the gradients is clipped, or they are needed together otherwise."""
    optimizer: str = "adamw"
    """One of `OPTIMIZERS`."""
    computed: str = "bfloat16"
    """Dtype of the computation."""

    @property
    def tokens(self) -> float:
        """Tokens per step of one rank."""
        return self.batch_tokens / self.world_size

    @property
    def passes(self) -> int:
        """Forwards and backwards through the whole model in a step."""
        return 1 if self.layer_major else self.micro_batches

    @property
    def recomputes(self) -> bool:
        """Whether layers are computed again in backward."""
        return self.checkpointing or self.slices_layers

    @property
    def slices_layers(self) -> bool:
        """Whether layers, head and loss run slice by slice (`infinity.micro_batches`)."""
        return self.micro_batches > 1 and self.layer_major

    @property
    def slices_head(self) -> bool:
        """Whether head and loss are cut into slices; each is computed again in backward, also where it is the only one.

        Without slices they are computed once, with activation checkpointing too.
        """
        return self.slices_layers or self.loss_tokens is not None

    def flops(self, model: ModelShape) -> float:
        """Return the floating-point operations of a step of one rank.

        A forward, as many again for gradients of inputs, and again for those of the weights that are trained.
        """
        root, layers = model.forward_flops(self.sequence)
        weights = model.trainable_parameters / model.parameters
        again = root * self.slices_head + layers * self.recomputes
        return self.tokens * ((2 + weights) * (root + layers) + again)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a step asks of one resource, in seconds."""

    busy: float
    """How long it works in a step."""
    exposed: float
    """What the step would be shorter if that took no time: what nothing else hides."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Where the time of a step goes; of one rank, in seconds. What runs beside each other does not add up."""

    step: float
    """The whole step."""
    computation: Load
    """Forward and backward."""
    weights: Load
    """Copies of weights to the device."""
    gradients: Load
    """Copies of gradients back."""
    collectives: Load
    """Gathers and reductions between ranks."""
    updates: Load
    """Updates on CPU; on the device, copies of their pages there and back, of which the longer counts as busy."""
    drives: Load
    """Reads and writes of the drives."""
    hashing: Load
    """Checksums of pages, by the busier of two threads: one for those that are read, one for those written."""
    interpreter: Load
    """Python of accesses to pages."""
    fixed: Load
    """What else a step costs whatever its tokens: hooks, copies in host memory."""
    reads: float
    """Reads from the drives, if nothing else used them."""
    writes: float
    """Writes to them."""

    @property
    def loads(self) -> dict[str, Load]:
        """What the step asks of each resource, by its name."""
        return {name: load for name, load in vars(self).items() if isinstance(load, Load)}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a run would do. All of one rank, unless it says otherwise."""

    model: ModelShape
    workload: Workload
    machine: Machine
    settings: Config
    budget: Budget
    """Page size, cache slots, and the layout of pages."""
    events: tuple[Event, ...]
    """Of one step."""
    update_schedule: str
    """Where updates run, by name."""
    placed: UpdateSchedule
    """Where that is in this step, and which weights are on the device ahead of their gather, or stay there, and which
    FSDP modules live there."""
    device_bytes: int
    """Memory of the device for those; 0: it has none, or there is no device."""
    updates_on_device: bool
    """Whether pages are updated there."""
    plan: Plan
    """What the pager would follow."""

    @property
    def layout(self) -> Layout:
        """The pages."""
        return self.budget.layout

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes of a step over the drives, those of activations too."""
        return self._traffic(self.activations)

    def _traffic(self, activations: Activations) -> Traffic:
        plan, moved = self.plan.traffic, {Role.ACTIVATION: activations.moved}
        return Traffic(read=plan.read | moved, written=plan.written | moved)

    @cached_property
    def activations(self) -> Activations:
        """What activations take where they are paged."""
        return _activations(self.model, self.workload, self.settings, self.budget)

    @property
    def bandwidth(self) -> float:
        """Bytes per second that the drives give this rank for this mix of reads and writes."""
        return self._bandwidth(self.traffic)

    def _bandwidth(self, traffic: Traffic) -> float:
        total = traffic.total_bytes
        return self.machine.bandwidth(traffic.written_bytes / total if total else 0.5)

    @cached_property
    def gathered_bytes(self) -> int:
        """Bytes of weights that are gathered in a step, as often as they are."""
        by_fsdp_module: Counter[int] = Counter()
        for page in self.layout.pages:
            by_fsdp_module[page.fsdp_module] += page.nbytes if page.role is Role.PARAM else 0
        return sum(by_fsdp_module[event.fsdp_module] for event in self.events if event.kind is EventKind.GATHER)

    @cached_property
    def link_traffic(self) -> LinkTraffic:
        """Bytes that cross the link to the device in a step, each way, but for activations."""
        return link_traffic(self.events, self.layout, self.placed, update_on_device=self.updates_on_device)

    @cached_property
    def seconds(self) -> Seconds:
        """Where the time of a step goes."""
        machine, traffic = self.machine, self.traffic
        busy = self._busy(self.workload, self.activations)
        whole = self.step_seconds(self.workload.batch_tokens)

        def load(name: str) -> Load:
            without = self.step_seconds(self.workload.batch_tokens, name) if busy[name] else whole
            return Load(busy=busy[name], exposed=max(0.0, whole - without))

        return Seconds(
            step=whole,
            reads=traffic.read_bytes / machine.bandwidth(0.0),
            writes=traffic.written_bytes / machine.bandwidth(1.0),
            **{name: load(name) for name in busy},
        )

    def _busy(self, work: Workload, activations: Activations) -> dict[str, float]:
        """Return how long each resource works in a step of that workload, by its name in `Seconds`."""
        machine, traffic = self.machine, self._traffic(activations)
        link = machine.device.link
        hashed = max(traffic.read_bytes, traffic.written_bytes)
        return {
            "computation": work.flops(self.model) / machine.device.flops,
            "weights": (self.link_traffic.weights + activations.kept) / link if link else 0.0,
            "gradients": (self.link_traffic.gradients + activations.kept) / link if link else 0.0,
            "collectives": self._exchanged_bytes / machine.interconnect if machine.interconnect else 0.0,
            "updates": max(self._update_copies)
            if self.updates_on_device
            else self._trained * machine.update(self.settings.state.format),
            "drives": traffic.total_bytes / self._bandwidth(traffic),
            "hashing": hashed / machine.hash_rate if machine.hash_rate else 0.0,
            "interpreter": len(self.plan.trace) * machine.access_seconds,
            "fixed": machine.fixed_seconds,
        }

    def step_seconds(self, batch_tokens: int, *without: str) -> float:
        """Return how long a step takes with another number of tokens, and all else the same.

        Args:
            batch_tokens: per step, over all ranks.
            without: resources that take no time, by their names in `Seconds`.
        """
        work = replace(self.workload, batch_tokens=batch_tokens)
        activations = _activations(self.model, work, self.settings, self.budget)
        traffic = self._traffic(activations)
        busy = self._busy(work, activations) | dict.fromkeys(without, 0.0)
        hash_rate = self.machine.hash_rate if busy["hashing"] else 0.0
        read, changed = self._update_copies if busy["updates"] else (0.0, 0.0)
        return predict_seconds(
            self.plan,
            self.layout,
            bandwidth=_AT_ONCE if "drives" in without else self._bandwidth(traffic),
            computation=busy["computation"] + busy["collectives"] + busy["fixed"],
            beside=Beside(
                updates=0.0 if self.updates_on_device else busy["updates"],
                weights=busy["weights"],
                gradients=busy["gradients"],
                read=read,
                changed=changed,
                verifying=traffic.read_bytes / hash_rate if hash_rate else 0.0,
                hashing=traffic.written_bytes / hash_rate if hash_rate else 0.0,
                interpreter=busy["interpreter"],
                behind=BEHIND,
            ),
            activations=2 * activations.moved,
            threaded=self.machine.threaded,
        )

    @property
    def _update_copies(self) -> tuple[float, float]:
        """Seconds of copies of the pages that are updated on the device, there and back."""
        traffic, link = self.link_traffic, self.machine.device.link
        return (traffic.read / link, traffic.changed / link) if link else (0.0, 0.0)

    @property
    def passes(self) -> int:
        """Forwards and backwards through the whole model in a step."""
        return self.workload.passes

    @property
    def _trained(self) -> float:
        """Parameters that this rank updates."""
        return self.model.trainable_parameters / self.workload.world_size

    @property
    def _exchanged_bytes(self) -> float:
        """Bytes that a rank receives of others in a step: each gather but its own part, and gradients in fp32."""
        ranks = self.workload.world_size
        return (ranks - 1) * (self.gathered_bytes + self._trained * ITEMSIZE["float32"] * self.passes)

    @cached_property
    def hidden_from_tokens(self) -> int | None:
        """Tokens per step from which storage is hidden, to within an eighth; None where no number hides it."""
        low, high = 0, self.workload.sequence * self.workload.world_size
        while not self._is_hidden(high):
            low, high = high, 2 * high
            if high > _MOST_TOKENS:
                return None
        while high - low > max(high // 8, self.workload.sequence * self.workload.world_size):
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_hidden(middle) else (middle, high)
        return high

    def _is_hidden(self, batch_tokens: int) -> bool:
        return self.step_seconds(batch_tokens) <= HIDDEN * self.step_seconds(batch_tokens, *STORAGE)

    @property
    def drive_bytes(self) -> int:
        """Space that this rank takes on the drives from the second step on, with that of activations and gradients."""
        stored = self.traffic.written[Role.GRAD] > 0
        return self.first_drive_bytes - (0 if stored else self._space_of_gradients)  # of activations: all that is kept

    @property
    def first_drive_bytes(self) -> int:
        """Space that it takes until the end of the first step, which is not planned, and may store gradients."""
        state = self._space(state_pages(self.layout.pages), self.settings.run.retained_checkpoints)
        return state + self._space_of_gradients + self._space_of_activations

    @cached_property
    def _space_of_gradients(self) -> int:
        return self._space([page for page in self.layout.pages if page.role is Role.GRAD], 0)

    @property
    def _space_of_activations(self) -> int:
        if self.settings.activations.tier != "nvme":
            return 0
        lengths = self.activations.pages * self.activations.tensors
        return self._space([activation_page(number, length) for number, length in enumerate(lengths)], 0)

    def _space(self, of: Sequence[Page], retained: int) -> int:
        drives = self.machine.drives.count
        slots = plan_slots(of, spread(of, [1.0] * drives), SPARE_SLOTS, retained)
        return sum(file_sizes(slots, drives))

    @property
    def node_written_per_day(self) -> float:
        """Bytes that all ranks of a node write to its drives in a day of training."""
        return self.traffic.written_bytes * self.machine.ranks_per_node * DAY / self.seconds.step

    @property
    def drive_days(self) -> float | None:
        """Days of training until the drives of a node have written what they are rated for; None if that is unknown."""
        rated, daily = self.machine.drives.endurance_bytes, self.node_written_per_day
        return rated / daily if rated and daily else None

    @cached_property
    def resident_bytes(self) -> dict[Role, int]:
        """Bytes in the host cache of pages that always stay, by role."""
        found = dict.fromkeys(Role, 0)
        for index in self.plan.resident:
            page = self.layout.pages[index]
            found[page.role] += page.nbytes
        return found

    @cached_property
    def home_bytes(self) -> dict[Role, int]:
        """Bytes of pages that live on the device, by role; gradients that updates in backward consume are in none."""
        found = dict.fromkeys(Role, 0)
        for page in self.layout.pages:
            consumed = page.role is Role.GRAD and page.fsdp_module in self.placed.in_backward
            if page.fsdp_module in self.placed.gpu_resident and is_gpu_resident(self.layout, page) and not consumed:
                found[page.role] += page.nbytes
        return found

    @property
    def moves_nothing(self) -> bool:
        """Whether no byte goes over the drives, whatever the batch."""
        return self.traffic.total_bytes == 0 and self.settings.activations.tier != "nvme"

    @cached_property
    def cache_slots_by_use(self) -> dict[str, int]:
        """Cache slots of the host cache, by what they are for."""
        plan = self.plan
        kept = {"resident": len(plan.resident), "streaming": plan.streaming_cache_slots, "kept": plan.kept.cache_slots}
        cache_slots = {**kept, "writing": plan.cache_slots - sum(kept.values())}
        return cache_slots | ({"activations": number} if (number := self.budget.activation_cache_slots) else {})

    @property
    def working_bytes(self) -> float:
        """Memory for computation, in bytes, about: of the device, or of the host beside the host cache."""
        return working_bytes(self.model, self.workload, paged=self.settings.activations.tier != "device")

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it does not fit, each with the value and what to change; empty where it does."""
        found = []
        drives, device = self.machine.drives, self.machine.device
        need = self.first_drive_bytes * self.machine.ranks_per_node
        if drives.space_bytes and need > drives.space_bytes:
            found.append(
                f"the drives have {format_size(drives.space_bytes)} free and {format_size(need)} are needed on each "
                'node; free some, use more drives or ranks, or a smaller state.format ("split" changes no bit)'
            )
        if device.memory_bytes and self.working_bytes > device.memory_bytes:
            found.append(
                f"computation needs about {format_size(self.working_bytes)} of the {format_size(device.memory_bytes)} "
                f"that {device.name} has; use more micro-batches, activation checkpointing, or --loss-tokens"
            )
        need, cache_slots = len(self.activations.pages) * self.activations.tensors, self.budget.activation_cache_slots
        if self.settings.activations.tier == "host" and need > cache_slots:
            page_bytes = self.layout.page_bytes
            found.append(
                f"activations need {format_size(need * page_bytes)} of host memory, {need} pages, and "
                f"{format_size(cache_slots * page_bytes)} are for them; set activations.host_bytes to "
                f'{format_setting(need * page_bytes)} or more, or activations.tier = "nvme"'
            )
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What a step of a rank keeps of activations in pages, in bytes; 0 where they stay where they are computed."""

    kept: int = 0
    """Inputs of all layers."""
    moved: int = 0
    """What of them is written to the drives, and read again."""
    pages: tuple[int, ...] = ()
    """Lengths of the pages of an input."""
    tensors: int = 0
    """Inputs that there are at once: those of a forward."""


def _activations(model: ModelShape, work: Workload, settings: Config, budget: Budget) -> Activations:
    """Return what `ActivationPages` does with the inputs of layers."""
    tier, page_bytes = settings.activations.tier, budget.layout.page_bytes
    if tier == "device" or not work.recomputes:
        return Activations()
    nbytes = int(work.tokens / work.micro_batches * ITEMSIZE[work.computed] * model.hidden)
    slices = len(model.layers) * (work.micro_batches if work.layer_major else 1)
    pages = tuple(page_lengths(nbytes, page_bytes))
    moved = moved_bytes(pages, slices, budget.activation_cache_slots) if tier == "nvme" else 0
    kept = slices * nbytes
    return Activations(kept=kept * work.passes, moved=moved * work.passes, pages=pages, tensors=slices)


def working_bytes(model: ModelShape, work: Workload, *, paged: bool = False) -> float:
    """Return the memory that computation takes, in bytes, about.

    The root and two layers gathered, and activations; beside them logits of one micro-batch, or of a slice of it, with
    the gradients of the head, or these and the gradients of a layer that is reduced. Or, where that is more, what is
    there when all else is gone: the gradients of the root as they are reduced.

    Args:
        paged: whether inputs of layers are paged: then one, what comes out, and their gradients are there at a time.
    """
    itemsize = ITEMSIZE[work.computed]
    layer = max((fsdp_module.numel for fsdp_module in model.layers), default=0)
    at_once = work.tokens / work.micro_batches
    inside = at_once * _ACTIVATIONS / 2 * itemsize * model.hidden
    if work.recomputes:
        tokens = work.tokens if work.layer_major else at_once
        kept = inside + tokens * itemsize * model.hidden * (
            min(len(model.layers), _AT_A_TIME) if paged else len(model.layers)
        )
    else:
        kept = inside * len(model.layers)
    weights = itemsize * (model.root.numel + 2 * layer)
    of_pass = work.tokens / work.passes
    of_loss = at_once if work.loss_tokens is None else min(of_pass, work.loss_tokens)
    logits = of_loss * model.vocabulary
    head = sum(p.numel for p in model.root.parameters if p.trainable and p.used)
    # Where slices are added up, backward leaves gradients in fp32, beside which that of the next slice is computed.
    of_root = ITEMSIZE["float32"] if work.slices_layers or of_loss < of_pass else itemsize
    of_layer = ITEMSIZE["float32"] if work.slices_layers else itemsize
    at_loss = logits * _LOGIT_BYTES + head * (of_root + (itemsize if of_root > itemsize else 0))
    at_layer = head * of_root + max(
        (_reduced_bytes(fsdp_module, work, of_layer) for fsdp_module in model.layers), default=0.0
    )
    return max(weights + kept + max(at_loss, at_layer), _reduced_bytes(model.root, work, of_root))


def _reduced_bytes(fsdp_module: FSDPModuleShape, work: Workload, left: int) -> float:
    """Return the most bytes that FSDP2 holds of the gradients of an FSDP module while it reduces them, also on one
    rank.

    First those that backward has left and a copy in fp32, which is reduced; then that copy and what comes out of it.

    Args:
        left: bytes of an element that backward has left.
    """
    copied = ITEMSIZE["float32"]
    return fsdp_module.trained * (copied + max(left, copied / work.world_size))


def spare_bytes(model: ModelShape, workload: Workload, machine: Machine, updates: int, *, paged: bool) -> int:
    """Return the memory of a device that computation and updates leave, about, less the margin that a run leaves too.

    Args:
        updates: bytes that updates take there.
        paged: as for `working_bytes`.
    """
    memory = machine.device.memory_bytes
    return max(0, int(memory - working_bytes(model, workload, paged=paged)) - device_margin(memory) - updates)


def _step_events(model: ModelShape, workload: Workload) -> tuple[Event, ...]:
    """Return the events of one step."""
    alone = workload.world_size == 1
    return expected_events(
        [fsdp_module.trainable for fsdp_module in model.fsdp_modules],
        root=True,
        embeds=any(parameter.looked_up and parameter.trainable for parameter in model.root.parameters),
        passes=workload.passes,
        components=2 if alone and workload.passes > 1 else 1,  # one rank adds gradients up itself
        alone=alone,
    )


def updates_on_device(settings: Config, machine: Machine, layout: Layout) -> bool:
    """Return whether pages are updated on the device: where a run that measures the same would decide so."""
    wanted, device, form = settings.update.device, machine.device, settings.state.format
    if not device.link or form != "fp32":
        return False
    stays = share_that_stays(
        layout, settings.memory.device_bytes or device.memory_bytes - device_margin(device.memory_bytes)
    )
    there = UPDATE_BYTES / device.link * (1 - stays)
    return wanted == "cuda" or (wanted == "auto" and there < machine.update(form))


def estimate(model: ModelShape, workload: Workload, machine: Machine, settings: Config) -> Estimate:
    """Plan a run as it would be planned.

    Args:
        settings: `memory.host_bytes` must be set; also used are `memory.page_bytes`, `memory.device_bytes`,
            `state.format`, `update.schedule`, `update.device` and `run.retained_checkpoints`.

    Raises:
        BudgetError: the host cache is too small; the message has the least that works.
        ConfigError: no such optimizer; the update schedule is impossible; the format would change nothing.
    """
    if workload.optimizer not in OPTIMIZERS:
        raise ConfigError(f"no optimizer {workload.optimizer!r}; there are {', '.join(OPTIMIZERS)}")
    fsdp_modules, formats = model.specs(
        workload.optimizer,
        world_size=workload.world_size,
        computed=workload.computed,
        state_format=settings.state.format,
    )
    if settings.state.format != "fp32" and not any(one.encodings for one in formats.values()):
        raise ConfigError(f'state.format = "{settings.state.format}" would change nothing here; set "fp32"')
    memory = settings.memory
    if settings.activations.tier == "host" and not machine.device.link:
        raise ConfigError('activations.tier = "host" is for an accelerator: nothing computes beside host memory here')
    budget = choose_budget(
        fsdp_modules, formats, memory.host_bytes, memory.page_bytes,
        device=machine.device.link > 0, activations=settings.activations,
    )  # fmt: skip
    events = _step_events(model, workload)
    wanted = settings.update.schedule
    name = placed(wanted, events, late=workload.clipping)
    if wanted == "in_backward" != name:
        raise ConfigError(
            'update.schedule = "in_backward" is impossible with clipping, or a loop over micro-batches; set "auto"'
        )
    on_device = updates_on_device(settings, machine, budget.layout)
    device_bytes = memory.device_bytes
    if not machine.device.link:
        device_bytes = 0
    elif not device_bytes:
        updates = device_update_bytes(budget.layout) if on_device else 0
        device_bytes = spare_bytes(model, workload, machine, updates, paged=settings.activations.tier != "device")
    update_schedule, plan = choose_plan(
        name,
        events,
        budget.layout,
        budget.cache_slots,
        threaded=machine.threaded,
        device_bytes=device_bytes,
        update_on_device=on_device,
    )
    return Estimate(
        model=model,
        workload=workload,
        machine=machine,
        settings=settings,
        budget=budget,
        events=events,
        update_schedule=name,
        placed=update_schedule,
        device_bytes=device_bytes,
        updates_on_device=on_device,
        plan=plan,
    )
