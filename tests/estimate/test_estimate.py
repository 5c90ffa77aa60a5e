"""Tests of estimates: proportions between quantities, and problems with configurations that do not fit."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import infinity
from infinity.checkpoint.parity import parity_length
from infinity.config import Config
from infinity.content.format import Role
from infinity.errors import BudgetError, ConfigError
from infinity.estimate.advice import LEAST_GAIN, WORN_DAYS, Change, best_changes
from infinity.estimate.estimate import (
    HIDDEN,
    STORAGE,
    CopyTraffic,
    Estimate,
    Workload,
    estimate,
    spare_bytes,
    working_bytes,
)
from infinity.estimate.machine import ACCELERATORS, UPDATE_SECONDS, Drives, Machine
from infinity.estimate.model import decoder, with_lora
from infinity.schedule.cycle import Cycle
from infinity.schedule.timing import NOTHING, Timing
from infinity.store.page_store import state_pages
from infinity_tools.plan.shapes import shape_of
from infinity_tools.presets import ModelSource
from support import models

MODEL = decoder(parameters=3e8, layers=8, hidden=1536, vocabulary=16000)
MACHINE = Machine(
    drives=Drives(count=2, read=6e9, write=4e9),
    device=ACCELERATORS["h100"],
    update_seconds=UPDATE_SECONDS,
    update_cores=8,
)
WORK = Workload(batch_tokens=8192, sequence=2048, checkpointing=True)


def planned(
    host_cache: str = "512MiB", model: Any = MODEL, machine: Machine = MACHINE, work: Workload = WORK, **more: Any
) -> Estimate:
    """Return an estimate. By default, updates run on the CPU, and no FSDP module is GPU-resident."""
    dotted = {"update.device": "cpu"} | {name.replace("__", "."): value for name, value in more.items()}
    return estimate(model, work, machine, Config().with_values(**{"memory.host_bytes": host_cache, **dotted}))


def test_traffic_matches_the_documented_formula() -> None:
    """A step moves 30 bytes per parameter minus three times the resident weight bytes.

    See "Traffic" in docs/explanation/planning-and-traffic.md. The device memory is too small to keep weights between
    forward and backward.
    """
    found = planned("128MiB", memory__device_bytes=1)
    assert found.update_schedule == "in_backward"
    assert not found.resolved_schedule.prefetched
    assert not found.resident_bytes[Role.UPDATE]
    saved = 3 * found.resident_bytes[Role.PARAM]
    assert found.traffic.total_bytes == pytest.approx(30 * MODEL.parameters - saved, rel=0.02)


def test_state_that_fits_in_memory_causes_no_traffic() -> None:
    """Storage time is hidden from the first token on."""
    found = planned("64GiB")
    assert found.traffic.total_bytes == 0
    assert found.seconds.drives.exposed == pytest.approx(0, abs=1e-9)
    assert found.hidden_from_tokens == WORK.sequence
    assert found.resident_bytes[Role.UPDATE] == found.layout.bytes_of(Role.UPDATE)


def test_more_memory_or_drives_never_slow_a_step_down() -> None:
    steps = [planned(host_cache).seconds.step for host_cache in ("128MiB", "512MiB", "2GiB", "64GiB")]
    assert steps == sorted(steps, reverse=True)
    faster = planned(machine=MACHINE.with_drives(8))
    assert faster.seconds.step < planned().seconds.step
    assert planned().seconds.step >= max(planned().seconds.reads, planned().seconds.computation.busy)


def test_storage_is_hidden_from_the_predicted_batch_size() -> None:
    """Storage time is exposed with half as many tokens."""
    found = planned()
    tokens = found.hidden_from_tokens
    assert found.step_seconds(tokens) <= HIDDEN * found.step_seconds(tokens, *STORAGE)
    assert found.step_seconds(tokens // 2) > HIDDEN * found.step_seconds(tokens // 2, *STORAGE)


def test_micro_batch_loop_reads_weights_per_micro_batch() -> None:
    loop = replace(WORK, micro_batches=4, layer_major=False)
    found, layers = planned(work=loop), planned(work=replace(loop, layer_major=True))
    assert found.workload.passes == 4
    assert found.traffic.total_bytes > 2 * layers.traffic.total_bytes
    assert found.update_schedule == "in_forward"


@pytest.mark.parametrize(("nodes", "states"), [(2, 4), (3, 3)])
def test_copies_need_two_more_checkpoints_and_two_parities(nodes: int, states: float) -> None:
    drive, model = MACHINE.with_drives(1), decoder(parameters=354e6, layers=24, hidden=1024, vocabulary=32000)
    without, found = (planned("256MiB", model, drive, run__copies=n, run__copy_nodes=nodes) for n in (0, 1))
    state = found.layout.state_bytes
    assert without.copy == without.first_copy == CopyTraffic(received=0, written=0)
    assert found.copy == found.first_copy
    assert found.copy.received == state
    assert state / (nodes - 1) <= found.copy.written < 1.01 * state / (nodes - 1)
    assert states * state <= found.drive_bytes - without.drive_bytes < 1.01 * states * state


@pytest.mark.parametrize("nodes", [2, 3])
def test_copies_of_adapters_leave_out_the_frozen_base(nodes: int) -> None:
    """With full copies, exactly the pages of the adapters are sent. A parity also needs bytes of frozen pages that it
    combines with them. Frozen pages are stored once, and once in each of two full copies.
    """
    found = planned("128MiB", model=with_lora(MODEL, 8, "bfloat16"), run__copies=1, run__copy_nodes=nodes)
    state = state_pages(found.layout.pages)
    adapters = sum(page.nbytes for page in state if not page.fixed)
    assert found.first_copy.received == sum(page.nbytes for page in state) > 20 * adapters
    assert found.first_copy.written == parity_length([found.first_copy.received] * (nodes - 1), nodes)
    if nodes == 2:
        assert found.copy == CopyTraffic(received=adapters, written=adapters)
        space = 3 * (found.first_copy.received - adapters) + 6 * adapters
        assert space <= found.drive_bytes < 1.05 * space
    else:
        assert adapters < found.copy.received <= 2 * adapters
        assert adapters / 2 < found.copy.written <= adapters


def test_frozen_base_is_read_twice_and_never_written() -> None:
    """A step reads 4 bytes per bf16 parameter of the base, in addition to the traffic of LoRA."""
    model = with_lora(MODEL, 8, "bfloat16")
    found = planned("128MiB", model=model)
    base = sum(p.numel for fsdp_module in model.fsdp_modules for p in fsdp_module.parameters if not p.trainable)
    assert found.traffic.written_bytes < 16 * model.trainable_parameters
    assert found.traffic.read[Role.PARAM] <= 4 * base * 1.01


def test_drive_space_is_one_state_per_version() -> None:
    """Each further checkpoint needs the size of the state once more, and stored gradients need space of their own."""
    drive, model = MACHINE.with_drives(1), decoder(parameters=354e6, layers=24, hidden=1024, vocabulary=32000)
    one, two, none = (planned("256MiB", model, drive, run__retained_checkpoints=number) for number in (1, 2, 0))
    state = one.layout.state_bytes
    assert 2 * state < one.drive_bytes < 2.05 * state
    assert two.drive_bytes - one.drive_bytes == one.drive_bytes - none.drive_bytes == state
    assert none.drive_bytes < 1.05 * state
    gradients = one.layout.bytes_of(Role.GRAD)
    assert gradients < one.first_drive_bytes - one.drive_bytes < 1.1 * gradients, "the first step may store them"
    stored = planned("128MiB", work=replace(WORK, clipping=True))
    gradients = stored.layout.bytes_of(Role.GRAD)
    assert stored.traffic.written[Role.GRAD] > 0
    assert stored.first_drive_bytes == stored.drive_bytes
    assert gradients < stored.drive_bytes - planned("128MiB").drive_bytes < 1.1 * gradients


def test_sliced_loss_needs_the_logits_of_one_slice() -> None:
    """A slice that is larger than the batch changes nothing."""
    full = planned().working_bytes
    sliced = planned(work=replace(WORK, loss_tokens=2048)).working_bytes
    added_up = 4 * (16000 + 1) * 1536  # head and norm
    assert full - sliced == 12 * (WORK.batch_tokens - 2048) * 16000 - added_up
    assert planned(work=replace(WORK, loss_tokens=10**6)).working_bytes == full
    halves = replace(WORK, micro_batches=2)
    more = planned(work=replace(halves, loss_tokens=6144)).working_bytes - planned(work=halves).working_bytes
    assert more == 12 * (6144 - 4096) * 16000, "a slice may span micro-batches"


@pytest.mark.parametrize("work", [
    {},
    {"checkpointing": True},
    {"checkpointing": True, "loss_tokens": 64},
    {"micro_batches": 2},
    {"checkpointing": True, "micro_batches": 2, "layer_major": False},
])  # fmt: skip
def test_flops_are_those_that_torch_counts(work: dict[str, Any]) -> None:
    """Checkpointing does not recompute the last product of a layer, but slices are recomputed completely."""
    model = models.llama(width=64, layers=2, vocabulary=128)
    model.set_attn_implementation("eager")  # torch does not count attention on the CPU otherwise
    models.shard(model)
    setup = Workload(batch_tokens=64, sequence=16, **work)
    if setup.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if setup.loss_tokens:
        infinity.sliced_loss(model, setup.loss_tokens)
    if setup.slices_layers:
        infinity.micro_batches(model, setup.micro_batches)
    parts = torch.randint(128, (4, 16)).chunk(1 if setup.layer_major else setup.micro_batches)
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = MagicMock(parents={"Global"})  # torch's hooks of modules fail in slices without gradients
    for context in (nullcontext(), counter):  # the first step determines how to slice
        with context:
            for tokens in parts:
                model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    shape = shape_of(ModelSource(name="", config=model.config))
    assert setup.flops(shape) == counter.get_total_flops()


class Alive(TorchDispatchMode):
    """Dispatch mode that records the peak size of the tensors that are created in it."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, tuple[StorageWeakRef, bool]] = {}
        """Storage reference, and whether the storage was created in this mode, by storage."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), made=False)
        result = func(*args, **(kwargs or {}))
        self._note(result, made=True)
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        memory = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref, made in self._known.values() if made)
        self.peak = max(self.peak, sum(one.nbytes() for one in memory))
        return result

    def _note(self, values: Any, *, made: bool) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                ref = StorageWeakRef(leaf.untyped_storage())
                self._known.setdefault(ref.cdata, (ref, made))


def held_by_fsdp(width: int, vocabulary: int, loss_tokens: int | None) -> tuple[int, int]:
    """Return the peak bytes of root gradients on one rank: until the backward of the first layer, and in total."""
    model = models.shard(models.llama(width=width, layers=1, vocabulary=vocabulary))
    if loss_tokens is not None:
        infinity.sliced_loss(model, loss_tokens)
    tokens = torch.randint(vocabulary, (1, 4))
    of_head = []
    model.model.layers[0].register_full_backward_pre_hook(lambda *_: of_head.append(alive.peak))
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    with Alive() as alive:
        loss.backward()
    return of_head[0], alive.peak


@pytest.mark.parametrize(("loss_tokens", "expected"), [(None, 2), (1, 6)])
def test_head_gradient_memory_matches_fsdp(loss_tokens: int | None, expected: int) -> None:
    """FSDP2 keeps the computed gradients and, if slices are accumulated, an fp32 sum."""
    width, vocabulary = 512, 1024
    held = held_by_fsdp(width, vocabulary, loss_tokens)[0] - (loss_tokens or 4) * vocabulary * 12
    assert held == pytest.approx(expected * width * vocabulary, rel=0.05)
    work = replace(WORK, loss_tokens=loss_tokens)
    shape = replace(MODEL, layers=())
    frozen = [replace(parameter, trainable=False) for parameter in shape.root.parameters]
    without = replace(shape, root=replace(shape.root, parameters=tuple(frozen)))
    counted = working_bytes(shape, work) - working_bytes(without, work)
    assert counted == pytest.approx(expected * shape.hidden * shape.vocabulary, rel=1e-3)


@pytest.mark.parametrize("loss_tokens", [None, 1])
def test_reduction_memory_matches_fsdp(loss_tokens: int | None) -> None:
    """One rank needs an fp32 copy and its reduction; with several ranks, the remains of backward may be larger."""
    width, vocabulary = 64, 8192
    assert held_by_fsdp(width, vocabulary, loss_tokens)[1] == pytest.approx(8 * 2 * width * vocabulary, rel=0.05)
    shape = decoder(parameters=1.1e9, layers=1, hidden=4096, vocabulary=128_000)
    for ranks, expected in ((1, 8), (2, 8 if loss_tokens else 6), (8, 8 if loss_tokens else 6)):
        work = Workload(batch_tokens=16 * ranks, sequence=16, world_size=ranks, loss_tokens=loss_tokens)
        assert working_bytes(shape, work) == expected * shape.root.numel


def test_activation_pages_need_slots_traffic_and_space() -> None:
    """Activations that fit in their cache slots are not moved; the `host` tier reports a problem if they do not fit."""
    kept = 8 * WORK.batch_tokens * 1536 * 2
    few, many = (
        planned("1GiB", activations__tier="nvme", activations__host_bytes=size) for size in ("64MiB", "512MiB")
    )
    assert few.activations.kept == many.activations.kept == kept
    assert few.activations.moved == kept - (64 - 2 * 8) * 2**20
    assert many.activations.moved == 0
    assert few.traffic.written[Role.ACTIVATION] == few.traffic.read[Role.ACTIVATION] == few.activations.moved
    assert kept < few.drive_bytes - planned("1GiB").drive_bytes < 1.1 * kept, "plus writes in flight"
    assert few.working_bytes < planned("1GiB").working_bytes
    assert few.cache_slots_by_use["activations"] == 8
    full, fitting = (
        planned("1GiB", activations__tier="host", activations__host_bytes=size) for size in ("64MiB", "512MiB")
    )
    assert [problem.partition(" need")[0] for problem in full.problems] == ["activations"]
    assert not fitting.problems
    enough = re.search(r"activations\.host_bytes to (\S+) or more", full.problems[0])
    assert enough
    assert not planned("1GiB", activations__tier="host", activations__host_bytes=enough[1]).problems
    again = replace(WORK, micro_batches=2)
    looped = planned("1GiB", work=again, activations__tier="host", activations__host_bytes="256MiB")
    assert looped.activations.kept == kept, "one half of them exists at a time"
    assert not looped.problems
    assert fitting.traffic.total_bytes == planned("512MiB").traffic.total_bytes
    without = replace(MACHINE, device=replace(MACHINE.device, link=0.0))
    with pytest.raises(ConfigError, match=r'activations\.tier = "host"'):
        planned("1GiB", machine=without, activations__tier="host")


def test_activation_time_scales_with_tokens() -> None:
    """The predicted time for a number of tokens equals the time of a plan for that number."""
    settings = {"activations__tier": "nvme", "activations__host_bytes": "64MiB"}
    found = planned("1GiB", **settings)
    for times in (1, 2, 3):
        tokens = times * WORK.batch_tokens
        other = planned("1GiB", work=replace(WORK, batch_tokens=tokens), **settings)
        assert found.step_seconds(tokens) == pytest.approx(other.seconds.step, rel=1e-9)
        assert found.step_seconds(tokens, "drives", "hashing") == pytest.approx(
            other.step_seconds(tokens, "drives", "hashing"), rel=1e-9
        )


def test_paged_activations_free_device_memory_for_weights() -> None:
    without, paged = (spare_bytes(MODEL, WORK, MACHINE, 0, paged=paged) for paged in (False, True))
    assert paged - without == pytest.approx(working_bytes(MODEL, WORK) - working_bytes(MODEL, WORK, paged=True), abs=1)
    assert paged > without > 0
    assert planned("1GiB", activations__tier="nvme").device_bytes == paged


def test_drive_lifetime_is_endurance_over_bytes_written() -> None:
    drives = replace(MACHINE.drives, endurance_bytes=2e15)
    found = planned(machine=replace(MACHINE, drives=drives))
    daily = found.traffic.written_bytes * 86400 / found.seconds.step
    assert found.drive_days == pytest.approx(2e15 / daily)
    assert planned().drive_days is None


def test_insufficient_memory_and_space_are_reported() -> None:
    """Drives and accelerator report one problem each; a host cache that is too small is an error, as in a run."""
    small = replace(
        MACHINE,
        drives=replace(MACHINE.drives, space_bytes=10**9),
        device=replace(MACHINE.device, memory_bytes=10**9),
    )
    found = planned(machine=small)
    assert [problem.split()[0] for problem in found.problems] == ["the", "computation"]
    assert not planned().problems
    with pytest.raises(BudgetError, match=r"memory\.host_bytes"):
        planned("256KiB")


@pytest.mark.parametrize(
    ("work", "settings", "words"),
    [
        ({"optimizer": "adamv"}, {}, "adamv"),
        ({"clipping": True}, {"update__schedule": "in_backward"}, r"update\.schedule = \"in_backward\" .*clipping"),
        ({"computed": "float32", "optimizer": "sgd"}, {"state__format": "8bit"}, r"state\.format = \"8bit\""),
    ],
)
def test_invalid_combinations_raise(work: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(work=replace(WORK, **work), **settings)


def test_twice_the_batch_uses_more_micro_batches_if_memory_requires_it() -> None:
    """The micro-batches stay as large as before, so the logits and activations of one still fit."""
    work = replace(WORK, batch_tokens=4096, micro_batches=2)
    memory = int(working_bytes(MODEL, replace(work, batch_tokens=8192, micro_batches=4)))
    assert working_bytes(MODEL, replace(work, batch_tokens=8192)) > memory
    tight = replace(MACHINE, device=replace(MACHINE.device, memory_bytes=memory))
    (larger,) = (one for one in best_changes(planned("128MiB", machine=tight, work=work), 10) if "tokens" in one.what)
    assert larger.what == "8,192 tokens per step"
    assert larger.result.workload.micro_batches == 4
    assert "4 micro-batches" in larger.price


def test_suggested_changes_include_the_one_that_saves_most_writes() -> None:
    """A larger batch writes the state once for more tokens."""
    changes = best_changes(planned("128MiB"), 0)
    assert len(changes) == 1
    (gentle,) = changes
    assert gentle.saved >= 0
    assert gentle.writes_saved == max(change.writes_saved for change in best_changes(planned("128MiB"), 10))


def test_suggested_changes_save_writes_of_drives_that_wear_out() -> None:
    """State formats save writes although updates take longer. Drives that last long enough are worn without mention."""
    slow = {"fp32": 1e-9, "split": 4e-9, "bf16-moments": 4e-9, "8bit": 9e-9}
    machine = replace(MACHINE, update_seconds=slow, update_cores=1)
    daily = planned("128MiB", machine=machine).node_written_per_day

    def suggested(days: float) -> list[Change]:
        drives = replace(MACHINE.drives, endurance_bytes=days * daily)
        return best_changes(planned("128MiB", machine=replace(machine, drives=drives)))

    def slower(changes: list[Change]) -> list[Change]:
        return [change for change in changes if change.saved < 0]

    worn = suggested(0.9 * WORN_DAYS)
    assert any("state.format" in change.what for change in slower(worn))
    assert all(change.writes_saved > LEAST_GAIN for change in slower(worn))
    assert not slower(suggested(1.1 * WORN_DAYS))


def test_estimate_prepares_each_trace_and_simulates_each_case_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner and the estimate share the prepared traces and the results of simulations.

    A suggestion that does not fit is rejected without a plan, and one that only changes speeds reuses the plan.
    """
    cycles: list[Any] = []
    simulated: list[Any] = []
    prepare, length = Cycle.__init__, Timing.length

    def counted_prepare(cycle: Cycle, trace: Any, layout: Any) -> None:
        cycles.append(trace)
        prepare(cycle, trace, layout)

    def counted_length(timing: Timing, transfers: Any, work: float, resources: Any = NOTHING) -> float:
        case = timing, tuple(transfers.accesses), transfers.cache_slots, work, resources
        assert case not in simulated
        simulated.append(case)
        return length(timing, transfers, work, resources)

    monkeypatch.setattr(Cycle, "__init__", counted_prepare)
    monkeypatch.setattr(Timing, "length", counted_length)
    found = planned("128MiB", work=replace(WORK, clipping=True))
    assert found.seconds.step > 0
    assert len(cycles) == 2, "one with overlapped updates, and one without"
    assert len(simulated) <= 30
    device = replace(MACHINE.device, memory_bytes=int(working_bytes(MODEL, WORK)))
    before = planned("128MiB", machine=replace(MACHINE, device=device), state__format="8bit")
    assert before.seconds.step > 0
    cycles.clear()
    simulated.clear()
    changes = [change.what for change in best_changes(before, 10)]
    assert "one more drive of the same kind" in changes
    assert not any("tokens" in what for what in changes), "twice the batch does not fit"
    assert len(cycles) == 2, "only for more host memory"
    assert len(simulated) <= 45


def test_changes_for_insufficient_device_memory_fit() -> None:
    """Each change that the message names has been estimated, including the number of tokens that fit."""
    work = replace(WORK, batch_tokens=32 * WORK.sequence)
    memory = int(working_bytes(MODEL, replace(work, micro_batches=32))) - 300 * 2**20
    machine = replace(MACHINE, device=replace(MACHINE.device, memory_bytes=memory))

    def problems(work: Workload, tier: str = "device") -> tuple[str, ...]:
        return planned(machine=machine, work=work, activations__tier=tier).problems

    (problem,) = problems(work)
    assert "use more micro-batches" not in problem
    assert "checkpointing" not in problem
    assert "loss-tokens" not in problem
    tokens, parts = re.search(r"at most ([\d,]+) tokens per step in (\d+) micro-batches", problem).groups()
    most = int(tokens.replace(",", ""))
    assert not problems(replace(work, batch_tokens=most, micro_batches=int(parts)))
    more = most + work.sequence * work.world_size
    assert problems(replace(work, batch_tokens=more, micro_batches=more // work.sequence // work.world_size))
    loop = int(re.search(r"a loop over (\d+) micro-batches", problem)[1])
    assert not problems(replace(work, micro_batches=loop, layer_major=False))
    parts = int(re.search(r'activations\.tier = "nvme" with (\d+) micro-batches', problem)[1])
    assert not problems(replace(work, micro_batches=parts), "nvme")


def test_changes_for_insufficient_drive_space_fit() -> None:
    """The smallest state format is not told to use another one, but to keep fewer checkpoints."""
    need = planned(state__format="8bit", run__retained_checkpoints=1).first_drive_bytes
    machine = replace(MACHINE, drives=replace(MACHINE.drives, space_bytes=need))
    (problem,) = planned(machine=machine, state__format="8bit", run__retained_checkpoints=3).problems
    assert "run.retained_checkpoints = 1," in problem
    assert "state.format" not in problem
    (problem,) = planned(machine=machine).problems
    name = re.search(r'state\.format = "(\S+)"', problem)
    assert name
    assert not planned(machine=machine, state__format=name[1]).problems


def test_suggested_changes_match_a_new_plan() -> None:
    """Suggestions are sorted by the time that they save, and their number is limited."""
    before = planned()
    changes = best_changes(before, 10)
    assert [change.saved for change in changes] == sorted((c.saved for c in changes), reverse=True)
    assert sum(change.saved > 0 for change in best_changes(before, 2)) <= 3, "two, and one that saves writes"
    for change in changes:
        after = estimate(before.model, change.result.workload, change.result.machine, change.result.settings)
        assert after.plan == change.result.plan
        each, then = (one.seconds.step / one.workload.batch_tokens for one in (before, after))
        assert change.saved == pytest.approx(1 - then / each)
    assert any("host memory" in change.what for change in changes)
    assert not best_changes(planned("64GiB", work=replace(WORK, batch_tokens=1 << 24)))


@pytest.mark.parametrize("host_cache", ["64B", "1MiB"])
def test_host_cache_too_small_for_a_large_model_fails_quickly(host_cache: str) -> None:
    """Millions of pages are counted, not created. The size that the message names works."""
    large = decoder(parameters=70e9, layers=80, hidden=8192, vocabulary=128256)
    with pytest.raises(BudgetError, match=r"memory\.host_bytes to 256MiB or more"):
        planned(host_cache, model=large)
    with pytest.raises(BudgetError, match=r"memory\.page_bytes = 1 MiB .*8MiB"):
        planned("1GiB", model=large, memory__page_bytes="1MiB")
