"""Estimate the memory, NVMe traffic, step time and SSD wear of a run before it starts.

`estimate` uses the same code as a run to choose the budget, the update schedule and the plan, and the same timing
model. Only the input differs: shapes and events come from a `ModelShape` instead of from a model and its first step.
The timing model receives simple quotients: floating-point operations divided by the device throughput, bytes by the
bandwidth of a link or the checksum speed, parameters by the update speed, and calls of Python functions by the speed of
Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from infinity.budget import Budget, choose_budget, device_update_bytes
from infinity.checkpoint.parity import SLOTS, Stream, cells_of
from infinity.config import Config
from infinity.content.format import FORMATS, ITEMSIZE, Role
from infinity.content.layout import Layout, Page
from infinity.errors import ConfigError, InfinityError
from infinity.estimate.machine import Machine
from infinity.estimate.model import OPTIMIZERS, FSDPModuleShape, ModelShape
from infinity.estimate.network import Network, seconds_of
from infinity.memory.limits import device_margin
from infinity.schedule.link import UPDATE_BYTES, LinkTraffic, link_traffic, share_that_stays
from infinity.schedule.planner import Plan, Simulation, Traffic
from infinity.schedule.predicted_trace import expected_events
from infinity.schedule.schedule_choice import choose_simulation, resolve_schedule
from infinity.schedule.stack import activation_page, moved_bytes, page_lengths
from infinity.schedule.tier import is_gpu_resident
from infinity.schedule.timing import OtherResources
from infinity.schedule.trace import Event, EventKind
from infinity.schedule.update_schedule import UpdateSchedule
from infinity.store.extents import SPARE_SLOTS, Extent, file_sizes, plan_slots, spread
from infinity.store.page_store import Version, state_pages
from infinity.units import format_setting, format_size

HIDDEN = 1.05
"""Storage counts as hidden if the step takes at most this factor longer than without storage."""
STORAGE = ("drives", "hashing")
"""Resources that storage uses, named as in `Seconds`."""
DAY = 86_400.0
BEHIND = 2
"""Maximum number of FSDP modules whose gradients have been computed but not yet consumed by their update."""
PASS_CALLS = 350
MODULE_CALLS = 1240
GPU_RESIDENT_CALLS = 775
ACCESS_CALLS = 245
PAGE_CALLS = 180
"""
[Note: Python calls] A step on a GPU takes at least as long as its Python code and the launch of its kernels, because
all threads share the GIL. These are numbers of calls of Python functions, as counted by benchmarks/bench_host.py:

- per pass through a layer. A layer takes one pass in forward, one for recomputation and two in backward. Autograd
  launches kernels without Python functions, so only the sum over the four passes was counted.
- per FSDP module: FSDP2, the optimizer, and the hooks of `infinity`;
- per GPU-resident FSDP module, in addition;
- per access to a batch of pages;
- per page that is read from or written to the drives.

The counts of 6 configurations with 4 to 12 layers, whose state is in the host cache or GPU-resident, are within 3 % of
the sums.
"""
_UNLIMITED_BANDWIDTH = 1e18
"""Bandwidth, in bytes per second, at which the time for drive I/O is negligible."""
_MOST_TOKENS = 1 << 34
_LOSS_TOKENS = 1024
"""Number of tokens per slice of the loss that is suggested if device memory is too small."""
_NO_REMEDY = {"device": "not even one sequence per rank fits; use more ranks, shorter sequences or more device memory"}
"""Advice for resources for which no change that was estimated helps."""
_ACTIVATIONS = 34
"""Bytes that a layer keeps for backward in 16-bit precision, per token per element of `hidden`. The attention
implementation is assumed not to store the attention matrix (Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", 2022, section 4).
"""
_LIVE_TENSORS = 4
"""Number of tensors as large as a layer's input that are in memory at the same time if layer inputs are paged."""
_LOGIT_BYTES = 12
"""Bytes per logit: the 16-bit logit, its fp32 copy for the loss, and the gradients of both."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Training setup to estimate: batch, parallelism, accumulation and optimizer."""

    batch_tokens: int
    """Tokens per step, summed over all ranks."""
    sequence: int
    """Tokens per sequence."""
    world_size: int = 1
    """Number of ranks."""
    replicas: int = 1
    """Number of replicas of the model. 1: full shard across all ranks. Otherwise HSDP: one replica per node, which is
    sharded across the ranks of the node.
    """
    micro_batches: int = 1
    """Number of micro-batches per rank per step."""
    layer_major: bool = True
    """``True`` if each layer runs all micro-batches before the next layer starts (`infinity.micro_batches`), ``False``
    if a loop runs each micro-batch through the whole model.
    """
    loss_tokens: int | None = None
    """Number of tokens whose logits are in memory at the same time (`infinity.sliced_loss`). ``None``: all tokens of a
    micro-batch.
    """
    checkpointing: bool = False
    """Whether activation checkpointing is on: only layer inputs are kept, and layers are recomputed in backward."""
    clipping: bool = False
    """Whether an operation such as gradient clipping needs all gradients before the first update."""
    optimizer: str = "adamw"
    """Name of an optimizer in `OPTIMIZERS`."""
    computed: str = "bfloat16"
    """Compute dtype."""

    @property
    def tokens(self) -> float:
        """Tokens per step per rank."""
        return self.batch_tokens / self.world_size

    @property
    def shards(self) -> int:
        """Number of ranks across which the model is sharded."""
        return self.world_size // self.replicas

    @property
    def passes(self) -> int:
        """Number of forward and backward passes through the whole model per step."""
        return 1 if self.layer_major else self.micro_batches

    @property
    def in_micro_batches(self) -> list[Workload]:
        """This workload with 1, 2, 4, … micro-batches, up to the number of sequences per rank."""
        most = int(self.tokens) // self.sequence
        return [replace(self, micro_batches=1 << power) for power in range(most.bit_length())]

    @property
    def recomputes(self) -> bool:
        """Whether layers are recomputed in backward."""
        return self.checkpointing or self.slices_layers

    @property
    def slices_layers(self) -> bool:
        """Whether the layers, the head and the loss run slice by slice (`infinity.micro_batches`)."""
        return self.micro_batches > 1 and self.layer_major

    @property
    def slices_head(self) -> bool:
        """Whether the head and the loss run in slices. Each slice is recomputed in backward, even if there is only one.

        Without slices, they are computed only once, even with activation checkpointing.
        """
        return self.slices_layers or self.loss_tokens is not None

    def flops(self, model: ModelShape) -> float:
        """Return the number of floating-point operations per step per rank.

        Backward counts as one forward for the gradients of inputs, plus one forward, scaled by the trainable fraction,
        for the gradients of weights. Recomputation adds the parts that run again.
        """
        root, layers = model.forward_flops(self.sequence)
        weights = model.trainable_parameters / model.parameters
        if self.slices_layers:  # slices are recomputed completely
            again = root + layers
        else:
            again = root * self.slices_head + model.recomputed_flops(self.sequence) * self.recomputes
        return self.tokens * ((2 + weights) * (root + layers) + again)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Time per step that one resource is used, in seconds."""

    busy: float
    """Time per step for which the resource is busy."""
    exposed: float
    """Time by which the step would be shorter if the resource took no time, that is, the time not overlapped."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Time per step of one rank by resource, in seconds. Resources overlap, so their times exceed the step in total."""

    step: float
    """Duration of the step."""
    computation: Load
    """Forward and backward."""
    weights: Load
    """Copies of weights to the device."""
    gradients: Load
    """Copies of gradients to the host."""
    collectives: Load
    """All-gathers and reduce-scatters between ranks."""
    updates: Load
    """Updates on the CPU. If updates run on the device: copies of pages to the device and back, where only the slower
    direction counts.
    """
    drives: Load
    """Reads and writes of the drives."""
    hashing: Load
    """Checksums of pages. One thread verifies pages that are read, and another hashes pages that are written. Only the
    busier thread counts.
    """
    interpreter: Load
    """Python code of all threads, including the launch of kernels."""
    fixed: Load
    """Time that does not depend on the number of tokens: hooks, and copies in host memory."""
    reads: float
    """Time to read from the drives if no writes take place."""
    writes: float
    """Time to write to the drives if no reads take place."""

    @property
    def loads(self) -> dict[str, Load]:
        """Load of each resource, by name."""
        return {name: load for name, load in vars(self).items() if isinstance(load, Load)}


@dataclass(frozen=True, kw_only=True)
class CopyTraffic:
    """Bytes per rank when a checkpoint is copied to other nodes. Both are 0 without copies."""

    received: int
    """Bytes that the rank receives, and sends."""
    written: int
    """Bytes that the rank writes."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted plan, traffic, step time and drive space of a run. Values are per rank unless stated otherwise."""

    model: ModelShape
    workload: Workload
    machine: Machine
    settings: Config
    budget: Budget
    """Page size, number of cache slots, and layout of pages."""
    events: tuple[Event, ...]
    """Events of one step."""
    update_schedule: str
    """Name of the chosen update schedule."""
    resolved_schedule: UpdateSchedule
    """Update schedule of the step, with the FSDP modules that are prefetched to the GPU, kept there during a step, or
    GPU-resident.
    """
    device_bytes: int
    """Device memory for prefetched and GPU-resident pages, in bytes. 0: no memory is left, or there is no device."""
    updates_on_device: bool
    """Whether updates run on the device."""
    plan: Plan
    """Plan that the pager would follow."""
    simulation: Simulation
    """Simulation of the plan."""
    link_traffic: LinkTraffic
    """Bytes per step that are copied between host and device in each direction, excluding activations."""

    @property
    def layout(self) -> Layout:
        """Layout of the pages."""
        return self.budget.layout

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes per step that the drives transfer, including activations."""
        return self._traffic(self.activations)

    def _traffic(self, activations: Activations) -> Traffic:
        plan, moved = self.plan.traffic, {Role.ACTIVATION: activations.moved}
        return Traffic(read=plan.read | moved, written=plan.written | moved)

    @cached_property
    def activations(self) -> Activations:
        """Paged activations."""
        return _activations(self.model, self.workload, self.settings, self.budget)

    def _bandwidth(self, traffic: Traffic) -> float:
        """Return the drive bandwidth of this rank for its mix of reads and writes, in bytes per second."""
        total = traffic.total_bytes
        return self.machine.bandwidth(traffic.written_bytes / total if total else 0.5)

    @cached_property
    def gathered_bytes(self) -> int:
        """Bytes of weights that are gathered per step. Weights that are gathered twice count twice."""
        weights = _weight_bytes(self.layout)
        return sum(weights[event.fsdp_module] for event in self.events if event.kind is EventKind.GATHER)

    @cached_property
    def seconds(self) -> Seconds:
        """Time per step by resource."""
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
        machine, traffic = self.machine, self._traffic(activations)
        launching, per_access, per_page = self._python(work)
        pages = self.plan.traffic.total_bytes / self.layout.page_bytes
        link = machine.device.link
        hashed = max(traffic.read_bytes, traffic.written_bytes)
        return {
            "computation": work.flops(self.model) / machine.device.flops,
            "weights": (self.link_traffic.weights + activations.kept) / link if link else 0.0,
            "gradients": (self.link_traffic.gradients + activations.kept) / link if link else 0.0,
            "collectives": self.exchange.seconds,
            "updates": max(self._update_copies)
            if self.updates_on_device
            else self._trained * machine.update(self.settings.state.format),
            "drives": traffic.total_bytes / self._bandwidth(traffic),
            "hashing": hashed / machine.hash_rate if machine.hash_rate else 0.0,
            "interpreter": launching + len(self.plan.trace) * per_access + pages * per_page,
            "fixed": machine.fixed_seconds,
        }

    def step_seconds(self, batch_tokens: int, *without: str) -> float:
        """Return the step time, in seconds, for the given number of tokens, with everything else unchanged.

        Args:
            batch_tokens: Tokens per step, summed over all ranks.
            without: Resources that are assumed to take no time, named as in `Seconds`.
        """
        key = batch_tokens, without
        if key not in self._step_seconds:
            bandwidth, resources, activations, computation = self._loads(batch_tokens, *without)
            self._step_seconds[key] = self.simulation.seconds(
                bandwidth=bandwidth, computation=computation, resources=resources, activations=activations
            )
        return self._step_seconds[key]

    @cached_property
    def _step_seconds(self) -> dict[tuple[int, tuple[str, ...]], float]:
        return {}

    def _least_seconds(self, batch_tokens: int) -> float:
        """Return a lower bound on `step_seconds` without running a simulation."""
        bandwidth, resources, activations, _ = self._loads(batch_tokens)
        return self.simulation.least_seconds(bandwidth=bandwidth, resources=resources, activations=activations)

    def _loads(self, batch_tokens: int, *without: str) -> tuple[float, OtherResources, float, float]:
        """Return the bandwidth, the other resources, the bytes of activations and the computation time of a step."""
        work = replace(self.workload, batch_tokens=batch_tokens)
        activations = _activations(self.model, work, self.settings, self.budget)
        traffic = self._traffic(activations)
        busy = self._busy(work, activations) | dict.fromkeys(without, 0.0)
        hash_rate = self.machine.hash_rate if busy["hashing"] else 0.0
        read, changed = self._update_copies if busy["updates"] else (0.0, 0.0)
        launching, per_access, per_page = self._python(work) if busy["interpreter"] else (0.0, 0.0, 0.0)
        overlapped = self.machine.network.overlapped and busy["collectives"] > 0
        resources = OtherResources(
            updates=0.0 if self.updates_on_device else busy["updates"],
            weights=busy["weights"],
            gradients=busy["gradients"],
            read=read,
            changed=changed,
            gathering=self.exchange.gathering if overlapped else 0.0,
            reducing=self.exchange.reducing if overlapped else 0.0,
            verifying=traffic.read_bytes / hash_rate if hash_rate else 0.0,
            hashing=traffic.written_bytes / hash_rate if hash_rate else 0.0,
            launching=launching,
            per_access=per_access,
            per_page=per_page if busy["drives"] else 0.0,
            update_limit=BEHIND,
        )
        bandwidth = _UNLIMITED_BANDWIDTH if "drives" in without else self._bandwidth(traffic)
        computation = busy["computation"] + busy["fixed"] + (0.0 if overlapped else busy["collectives"])
        return bandwidth, resources, 2 * activations.moved, computation

    def _python(self, work: Workload) -> tuple[float, float, float]:
        """Return the Python time to launch a step, per access and per page, in seconds. See [Note: Python calls]."""
        model, each = self.model, self.machine.call_seconds
        calls = PASS_CALLS * len(model.layers) * work.micro_batches * (3 + work.recomputes)
        calls += MODULE_CALLS * len(model.fsdp_modules) * work.passes
        calls += GPU_RESIDENT_CALLS * len(self.resolved_schedule.gpu_resident)
        return each * calls, each * ACCESS_CALLS, each * PAGE_CALLS

    @property
    def _update_copies(self) -> tuple[float, float]:
        """Seconds per step to copy pages that are updated on the device to it, and seconds to copy them back."""
        traffic, link = self.link_traffic, self.machine.device.link
        return (traffic.read / link, traffic.changed / link) if link else (0.0, 0.0)

    @property
    def _trained(self) -> float:
        return self.model.trainable_parameters / self.workload.shards

    @cached_property
    def exchange(self) -> Exchange:
        """Collectives of a step."""
        return _exchange(self.model, self.workload, self.machine.network, self.layout, self.events)

    @cached_property
    def hidden_from_tokens(self) -> int | None:
        """Smallest number of tokens per step for which storage is hidden, accurate to one eighth.

        ``None`` if storage is not hidden for any number of tokens.
        """
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
        # Bounds save most simulations: a step takes at least as long as its computation and its transfers and, as is
        # assumed here, at most as long as one with more tokens.
        least, (*_, computation) = self._least_seconds(batch_tokens), self._loads(batch_tokens)
        if least <= HIDDEN * computation and self.step_seconds(batch_tokens) <= HIDDEN * computation:
            return True
        most = self.step_seconds(max(batch_tokens, self.workload.batch_tokens), *STORAGE)
        if least > HIDDEN * most:
            return False
        return self.step_seconds(batch_tokens) <= HIDDEN * self.step_seconds(batch_tokens, *STORAGE)

    @property
    def drive_bytes(self) -> int:
        """Drive space of this rank from the second step on, including activations and gradients, in bytes."""
        stored = self.traffic.written[Role.GRAD] > 0
        # The space for activations stays reserved at its full size.
        return self.first_drive_bytes - (0 if stored else self._space_of_gradients)

    @cached_property
    def first_drive_bytes(self) -> int:
        """Drive space of this rank during the first step, in bytes.

        The first step runs without a plan, and may store gradients.
        """
        run = self.settings.run
        state = self._space(state_pages(self.layout.pages), run.retained_checkpoints + run.copied_checkpoints)
        copies = len(SLOTS) * self.first_copy.written
        return state + copies + self._space_of_gradients + self._space_of_activations

    @cached_property
    def first_copy(self) -> CopyTraffic:
        """Traffic of each of the first two copies, which are complete. Two files of the written size are kept."""
        return self._copy_traffic(every=True)

    @cached_property
    def copy(self) -> CopyTraffic:
        """Traffic of each later copy, which leaves out frozen pages."""
        return self._copy_traffic(every=False)

    def _copy_traffic(self, *, every: bool) -> CopyTraffic:
        run, pages = self.settings.run, self.layout.pages
        if not run.copies:
            return CopyTraffic(received=0, written=0)
        versions = {page.index: Version(Extent(0, 0, page.nbytes), 0) for page in state_pages(pages)}
        cells = [
            cell
            for cell in cells_of([Stream(versions)] * (run.copy_nodes - 1))
            if every or not all(pages[piece.page].fixed for piece in cell.pieces)
        ]
        return CopyTraffic(
            received=sum(piece.stop - piece.start for cell in cells for piece in cell.pieces),
            written=sum(cell.stop - cell.start for cell in cells),
        )

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
        """Bytes that all ranks of a node write to its drives per day of training."""
        return self.traffic.written_bytes * self.machine.ranks_per_node * DAY / self.seconds.step

    @property
    def drive_days(self) -> float | None:
        """Days of training until a node's drives reach their rated endurance. ``None``: the endurance is unknown."""
        rated, daily = self.machine.drives.endurance_bytes, self.node_written_per_day
        return rated / daily if rated and daily else None

    @cached_property
    def resident_bytes(self) -> dict[Role, int]:
        """Bytes of pages that are kept permanently in the host cache, by role."""
        found = dict.fromkeys(Role, 0)
        for index in self.plan.resident:
            page = self.layout.pages[index]
            found[page.role] += page.nbytes
        return found

    @cached_property
    def gpu_resident_bytes(self) -> dict[Role, int]:
        """Bytes of GPU-resident pages, by role. Gradients that updates consume in backward are excluded."""
        found = dict.fromkeys(Role, 0)
        for page in self.layout.pages:
            consumed = page.role is Role.GRAD and page.fsdp_module in self.resolved_schedule.in_backward
            if (
                page.fsdp_module in self.resolved_schedule.gpu_resident
                and is_gpu_resident(self.layout, page)
                and not consumed
            ):
                found[page.role] += page.nbytes
        return found

    @property
    def moves_nothing(self) -> bool:
        """Whether a step does not read from or write to the drives, regardless of the batch size."""
        return self.traffic.total_bytes == 0 and self.settings.activations.tier != "nvme"

    @cached_property
    def cache_slots_by_use(self) -> dict[str, int]:
        """Number of cache slots by purpose."""
        plan = self.plan
        kept = {"resident": len(plan.resident), "streaming": plan.streaming_cache_slots, "kept": plan.kept_cache_slots}
        cache_slots = {**kept, "writing": plan.cache_slots - sum(kept.values())}
        return cache_slots | ({"activations": number} if (number := self.budget.activation_cache_slots) else {})

    @property
    def working_bytes(self) -> float:
        """Approximate memory for computation, in bytes.

        This is device memory or, without a device, host memory outside the host cache.
        """
        return working_bytes(self.model, self.workload, paged=self.settings.activations.tier != "device")

    @cached_property
    def shortfalls(self) -> dict[str, str]:
        """Resources that are too small (``drives``, ``device`` or ``host``), each with the values. Requires no plan."""
        found = {}
        drives, device = self.machine.drives, self.machine.device
        if drives.space_bytes and (need := self.first_drive_bytes * self.machine.ranks_per_node) > drives.space_bytes:
            found["drives"] = (
                f"the run needs {format_size(need)} on the drives of each node, which have "
                f"{format_size(drives.space_bytes)} free"
            )
        if device.memory_bytes and self.working_bytes > device.memory_bytes:
            found["device"] = (
                f"computation needs about {format_size(self.working_bytes)} of device memory, but {device.name} has "
                f"{format_size(device.memory_bytes)}"
            )
        need, cache_slots = len(self.activations.pages) * self.activations.tensors, self.budget.activation_cache_slots
        if self.settings.activations.tier == "host" and need > cache_slots:
            page_bytes = self.layout.page_bytes
            found["host"] = (
                f"activations need {format_size(need * page_bytes)} of host memory ({need} pages), but "
                f"{format_size(cache_slots * page_bytes)} are reserved for them"
            )
        return found

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """Reasons why the run does not fit, each with a value and the changes that help. Empty if the run fits.

        Every change has been estimated: with it, the resource suffices, and no other resource becomes too small.
        """
        remedies = {"drives": self._drive_remedies, "device": self._device_remedies, "host": self._host_remedies}
        found = []
        for name, shortfall in self.shortfalls.items():
            helping = list(remedies[name]())
            advice = ", or ".join(helping) if helping else _NO_REMEDY[name]
            found.append(f"{shortfall}; {advice}")
        return tuple(found)

    def _helps(
        self,
        name: str,
        *,
        workload: Workload | None = None,
        machine: Machine | None = None,
        settings: Config | None = None,
    ) -> bool:
        """Return whether changed inputs solve the shortfall of a resource without causing another one."""
        after = replace(self, workload=workload or self.workload, machine=machine or self.machine)
        if settings:
            try:
                budget = budget_of(self.model, after.workload, after.machine, settings)
            except InfinityError:  # the change is not possible for this run
                return False
            after = replace(after, settings=settings, budget=budget)
        return name not in after.shortfalls and after.shortfalls.keys() <= self.shortfalls.keys()

    def _drive_remedies(self) -> Iterator[str]:
        settings, drives = self.settings, self.machine.drives
        formats = tuple(FORMATS)
        for name in formats[formats.index(settings.state.format) + 1 :]:
            if self._helps("drives", settings=settings.with_values(**{"state.format": name})):
                yield f'set state.format = "{name}"{" (bitwise equal)" if name == "split" else ""}'
                break
        for number in reversed(range(settings.run.retained_checkpoints)):
            if self._helps("drives", settings=settings.with_values(**{"run.retained_checkpoints": number})):
                none = ' and run.keep = "never" (nothing is left to resume from)' if not number else ""
                yield f"set run.retained_checkpoints = {number}{none}"
                break
        need = self.first_drive_bytes * self.machine.ranks_per_node
        count = -(-need * drives.count // drives.space_bytes)
        if self._helps("drives", machine=self.machine.with_drives(count)):
            yield f"use {count} such drives per node"
        yield f"free {format_size(need - drives.space_bytes)}"

    def _device_remedies(self) -> Iterator[str]:
        work, settings = self.workload, self.settings
        parts = [one for one in work.in_micro_batches if one.micro_batches > work.micro_batches]
        loops = [
            replace(one, layer_major=False)
            for one in work.in_micro_batches
            if one.micro_batches >= max(2, work.micro_batches) and settings.update.schedule != "in_backward"
        ]
        if fitting := self._first_that_helps(parts):
            yield f"use {fitting.micro_batches} micro-batches"
        elif work.layer_major and (fitting := self._first_that_helps(loops)):
            yield f"use a loop over {fitting.micro_batches} micro-batches"
        if not work.checkpointing and self._helps("device", workload=replace(work, checkpointing=True)):
            yield "use activation checkpointing"
        if work.loss_tokens is None and self._helps("device", workload=replace(work, loss_tokens=_LOSS_TOKENS)):
            yield f"pass --loss-tokens {_LOSS_TOKENS}"
        if settings.activations.tier == "device":
            paged = settings.with_values(**{"activations.tier": "nvme"})
            recomputing = [one for one in (work, *parts) if one.recomputes]
            if fitting := self._first_that_helps(recomputing, settings=paged):
                more = f" with {fitting.micro_batches} micro-batches" if fitting is not work else ""
                yield f'set activations.tier = "nvme"{more}'
        if fewer := self._with_fewer_tokens():
            parted = f" in {fewer.micro_batches} micro-batches" if fewer.micro_batches > 1 else ""
            yield f"use at most {fewer.batch_tokens:,} tokens per step{parted}"

    def _first_that_helps(self, tried: Sequence[Workload], settings: Config | None = None) -> Workload | None:
        return next((one for one in tried if self._helps("device", workload=one, settings=settings)), None)

    def _with_fewer_tokens(self) -> Workload | None:
        """Return the workload with the most sequences that fit device memory, or ``None`` if not even one fits."""
        work = self.workload

        def of(number: int) -> Workload:
            tokens = number * work.sequence * work.world_size
            whole = replace(work, batch_tokens=tokens, micro_batches=min(work.micro_batches, number))
            return whole if self._helps("device", workload=whole) else replace(whole, micro_batches=number)

        low, high = 0, int(work.tokens) // work.sequence  # the number of sequences that fit is in [low, high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._helps("device", workload=of(middle)) else (low, middle)
        return of(low) if low else None

    def _host_remedies(self) -> Iterator[str]:
        need = len(self.activations.pages) * self.activations.tensors * self.layout.page_bytes
        yield f"set activations.host_bytes to {format_setting(need)} or more"
        if self._helps("host", settings=self.settings.with_values(**{"activations.tier": "nvme"})):
            yield 'set activations.tier = "nvme"'


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Paged activations of one rank per step, in bytes. All fields are 0 or empty if activations are not paged."""

    kept: int = 0
    """Total size of the inputs of all layers."""
    moved: int = 0
    """Part of `kept` that is written to the drives and read back."""
    pages: tuple[int, ...] = ()
    """Sizes of the pages that store one input."""
    tensors: int = 0
    """Number of inputs that are stored at the same time, which is the number that one forward saves."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Collectives of one step."""

    gathering: float
    """Time of all all-gathers, in seconds."""
    reducing: float
    """Time to reduce all gradients, in seconds."""
    sent: float
    """Bytes that each node sends to other nodes, without the headers of packets."""

    @property
    def seconds(self) -> float:
        """Time of all collectives, in seconds."""
        return self.gathering + self.reducing


def _weight_bytes(layout: Layout) -> Counter[int]:
    """Return the bytes of this rank's weights, by FSDP module."""
    found = Counter[int]()
    for page in layout.pages:
        found[page.fsdp_module] += page.nbytes if page.role is Role.PARAM else 0
    return found


def _exchange(model: ModelShape, work: Workload, network: Network, layout: Layout, events: Sequence[Event]) -> Exchange:
    """Return the collectives of a step: all-gathers of weights, and reductions of gradients in fp32.

    Full shard gathers and reduces across all ranks. HSDP gathers and reduces within each node, and then all-reduces the
    shards of the gradients between nodes.
    """
    if work.world_size == 1:
        return Exchange(gathering=0.0, reducing=0.0, sent=0.0)
    weights = Counter({number: work.shards * nbytes for number, nbytes in _weight_bytes(layout).items()})
    gradients = {number: ITEMSIZE["float32"] * one.trained for number, one in enumerate(model.fsdp_modules)}
    if work.replicas == 1:
        gathering, reducing = ["all_gather"], ["reduce_scatter"]
    else:
        gathering, reducing = ["node_all_gather"] * (work.shards > 1), ["node_reduce_scatter"] * (work.shards > 1)
        reducing += ["all_reduce"]
    of = {EventKind.GATHER: (gathering, weights), EventKind.GRADIENTS: (reducing, gradients)}
    seconds: dict[EventKind, float] = dict.fromkeys(of, 0.0)
    sent = 0.0
    for event in events:
        names, sizes = of.get(event.kind, ([], gradients))
        for name in names:
            seconds[event.kind] += seconds_of(getattr(network, name), sizes[event.fsdp_module])
            sent += network.sent[name] * sizes[event.fsdp_module]
    return Exchange(gathering=seconds[EventKind.GATHER], reducing=seconds[EventKind.GRADIENTS], sent=sent)


def _activations(model: ModelShape, work: Workload, settings: Config, budget: Budget) -> Activations:
    """Predict how `ActivationPages` stores the inputs of layers."""
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
    """Return the approximate memory for computation, in bytes.

    The peak is the larger of the following two. During forward and backward, memory contains the activations and the
    gathered weights of the root and of two layers. In addition, it contains the gradients of the head, and either the
    logits of one micro-batch or slice, or the gradients of a layer that is being reduced. At the end of backward,
    memory only contains the gradients of the root while they are reduced.

    Args:
        model: Shapes of the parameters.
        work: Batch, accumulation and checkpointing.
        paged: Whether the inputs of layers are paged. If so, only one input, one output and their gradients are in
            memory at a time.
    """
    itemsize = ITEMSIZE[work.computed]
    layer = max((fsdp_module.numel for fsdp_module in model.layers), default=0)
    at_once = work.tokens / work.micro_batches
    inside = at_once * _ACTIVATIONS / 2 * itemsize * model.hidden
    if work.recomputes:
        tokens = work.tokens if work.layer_major else at_once
        kept = inside + tokens * itemsize * model.hidden * (
            min(len(model.layers), _LIVE_TENSORS) if paged else len(model.layers)
        )
    else:
        kept = inside * len(model.layers)
    weights = itemsize * (model.root.numel + 2 * layer)
    of_pass = work.tokens / work.passes
    of_loss = at_once if work.loss_tokens is None else min(of_pass, work.loss_tokens)
    logits = of_loss * model.vocabulary
    head = sum(p.numel for p in model.root.parameters if p.trainable and p.used)
    # Accumulation across slices keeps the gradients in fp32 while the gradient of the next slice is computed.
    of_root = ITEMSIZE["float32"] if work.slices_layers or of_loss < of_pass else itemsize
    of_layer = ITEMSIZE["float32"] if work.slices_layers else itemsize
    at_loss = logits * _LOGIT_BYTES + head * (of_root + (itemsize if of_root > itemsize else 0))
    at_layer = head * of_root + max(
        (_reduced_bytes(fsdp_module, work, of_layer) for fsdp_module in model.layers), default=0.0
    )
    return max(weights + kept + max(at_loss, at_layer), _reduced_bytes(model.root, work, of_root))


def _reduced_bytes(fsdp_module: FSDPModuleShape, work: Workload, left: int) -> float:
    """Return FSDP2's peak memory, in bytes, while it reduces the gradients of one FSDP module.

    FSDP2 first holds the gradients from backward and an fp32 copy to reduce, and then this copy and the output of the
    reduction. It also creates both on a single rank.

    Args:
        fsdp_module: Shapes of the parameters.
        work: Workload with the number of ranks.
        left: Bytes per element of the gradients that backward produces.
    """
    copied = ITEMSIZE["float32"]
    return fsdp_module.trained * (copied + max(left, copied / work.shards))


def spare_bytes(model: ModelShape, workload: Workload, machine: Machine, updates: int, *, paged: bool) -> int:
    """Return the approximate device memory, in bytes, that computation, updates and the safety margin leave free.

    Args:
        model: Shapes of the parameters.
        workload: Batch, accumulation and checkpointing.
        machine: Machine with the device.
        updates: Device memory for updates, in bytes.
        paged: See `working_bytes`.
    """
    memory = machine.device.memory_bytes
    return max(0, int(memory - working_bytes(model, workload, paged=paged)) - device_margin(memory) - updates)


def _step_events(model: ModelShape, workload: Workload) -> tuple[Event, ...]:
    alone = workload.world_size == 1
    return expected_events(
        [fsdp_module.trainable for fsdp_module in model.fsdp_modules],
        root=True,
        embeds=any(parameter.looked_up and parameter.trainable for parameter in model.root.parameters),
        passes=workload.passes,
        components=2 if alone and workload.passes > 1 else 1,  # a single rank accumulates gradients in pages itself
        alone=workload.shards == 1,
    )


def updates_on_device(settings: Config, machine: Machine, layout: Layout) -> bool:
    """Return whether updates run on the device. A run applies the same rule to measured speeds."""
    wanted, device, form = settings.update.device, machine.device, settings.state.format
    if not device.link or form != "fp32":
        return False
    stays = share_that_stays(
        layout, settings.memory.device_bytes or device.memory_bytes - device_margin(device.memory_bytes)
    )
    there = UPDATE_BYTES / device.link * (1 - stays)
    return wanted == "cuda" or (wanted == "auto" and there < machine.update(form))


def budget_of(
    model: ModelShape, workload: Workload, machine: Machine, settings: Config, known: Layout | None = None
) -> Budget:
    """Return the division of the host memory. Raises the same errors as `estimate`, except for the update schedule.

    See `estimate` for the other arguments.

    Args:
        known: A layout for the same model, workload and state format, if the caller has one.
    """
    if workload.optimizer not in OPTIMIZERS:
        raise ConfigError(f"unknown optimizer {workload.optimizer!r}; choose one of {', '.join(OPTIMIZERS)}")
    fsdp_modules, formats = model.specs(
        workload.optimizer,
        world_size=workload.world_size,
        replicas=workload.replicas,
        computed=workload.computed,
        state_format=settings.state.format,
    )
    if settings.state.format != "fp32" and not any(one.encodings for one in formats.values()):
        raise ConfigError(f'state.format = "{settings.state.format}" has no effect for this model; set "fp32"')
    memory = settings.memory
    if settings.activations.tier == "host" and not machine.device.link:
        raise ConfigError(
            'activations.tier = "host" requires an accelerator, but the model computes in host memory; set "device" or '
            '"nvme"'
        )
    return choose_budget(
        fsdp_modules, formats, memory.host_bytes, memory.page_bytes,
        device=machine.device.link > 0, activations=settings.activations, known=known,
    )  # fmt: skip


def estimate(
    model: ModelShape, workload: Workload, machine: Machine, settings: Config, budget: Budget | None = None
) -> Estimate:
    """Plan a run without a model and return the estimate.

    Args:
        model: Shapes of the parameters.
        workload: Batch, parallelism, accumulation and optimizer.
        machine: Drives, device and CPU of a rank.
        settings: Configuration. `memory.host_bytes` must be set. The estimate also uses `memory.page_bytes`,
            `memory.device_bytes`, `activations`, `state.format`, `update.schedule`, `update.device` and
            `run.retained_checkpoints`.
        budget: Result of `budget_of` for these arguments, if the caller has it.

    Returns:
        The estimate, even if the run does not fit the drives or the device; see `Estimate.problems`.

    Raises:
        BudgetError: If the host cache is too small. The message states the smallest size that works.
        ConfigError: If the optimizer is unknown, the update schedule is impossible, or the state format has no effect.
    """
    budget = budget or budget_of(model, workload, machine, settings)
    events = _step_events(model, workload)
    wanted = settings.update.schedule
    name = resolve_schedule(wanted, events, late=workload.clipping)
    if wanted == "in_backward" != name:
        raise ConfigError(
            'update.schedule = "in_backward" cannot be used with clipping or a loop over micro-batches; set "auto"'
        )
    on_device = updates_on_device(settings, machine, budget.layout)
    device_bytes = settings.memory.device_bytes
    if not machine.device.link:
        device_bytes = 0
    elif not device_bytes:
        updates = device_update_bytes(budget.layout) if on_device else 0
        device_bytes = spare_bytes(model, workload, machine, updates, paged=settings.activations.tier != "device")
    update_schedule, simulation = choose_simulation(
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
        resolved_schedule=update_schedule,
        device_bytes=device_bytes,
        updates_on_device=on_device,
        plan=simulation.plan,
        simulation=simulation,
        link_traffic=link_traffic(
            events, budget.layout, update_schedule, simulation.plan.trace, update_on_device=on_device
        ),
    )
