"""`infinity.offload`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from infinity.budget import Budget
from infinity.checkpoint.description import RunDescription
from infinity.checkpoint.model_state import ResumedState
from infinity.checkpoint.publish import CheckpointWriter
from infinity.cleanup import end_all
from infinity.config import Config, check_config, load_config, with_absolute_paths
from infinity.errors import ConfigError, UnsupportedError
from infinity.formats.adapters import save_whole_adapters
from infinity.fsdp.attach import Attachment
from infinity.fsdp.saved_activations import SavedActivations
from infinity.fsdp.shard_io import ShardIO
from infinity.fsdp.sharded_model import ShardedModel
from infinity.fsdp.staging import GpuPrefetcher
from infinity.models.weight_source import noted_weights
from infinity.optim.base_optimizer import BaseOptimizer
from infinity.optim.full_parameter import FullParameters, open_slices
from infinity.optim.kernel import UpdateKernel
from infinity.optim.multi_optimizer import Optimizers, name_of
from infinity.optim.probe import make_kernel
from infinity.optim.states import StateReader
from infinity.optim.step import StepRunner
from infinity.ranks import Ranks
from infinity.run import open_runs
from infinity.run.checkpointing import Checkpointer, describe, make_checkpoint_writer
from infinity.run.initial_state import Filling
from infinity.run.inspection import (
    check_agreement,
    check_exchange,
    check_optimizer,
    give_shapes,
    plan_memory,
    prepare_encodings,
    shared_slices,
    warn_of_bf16,
)
from infinity.run.live_state import LiveSaves
from infinity.run.optimizer import PagedOptimizer
from infinity.run.run import Run
from infinity.run.run_directory import RunDirectory, page_bytes_of_checkpoint
from infinity.sources.dcp import DcpFolder
from infinity.sources.initialise import InitFunction
from infinity.units import MIB

_log = logging.getLogger("infinity")
_LOAD_LIMIT = 256 * MIB


def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    strict: bool = True,
    init: InitFunction | None = None,
) -> PagedOptimizer:
    """Move a sharded model's parameters and optimizer state to NVMe; return the optimizer to train with.

    Args:
        model: `fully_shard` was called on its layers and on itself; on a real or on the meta device.
        optimizer: of any class, over its parameters, without state yet. What it does must not depend on how parameters
            are cut into pages; that is tried out on small copies of it before anything is written. Or a list of
            several, each over a part of the parameters: the one that is returned has the param groups of all, and its
            `step` updates with all of them; schedulers may be made on each of them, or on that one.
        config: settings: a TOML file, a nested mapping, a `Config`; at least `storage.paths`.
        weights: folder to load a model on the meta device from, as a stream; by default that which
            `infinity.from_pretrained` has found, if the model is from there. Either of safetensors, as
            `save_pretrained` writes it (or one such file or index, to name a variant): names are found, and tensors
            renamed, fused or split, as `from_pretrained` of transformers does; those of other models must be equal.
            Or one that `torch.distributed.checkpoint` wrote of any number of ranks. With the `get_state_dict` of
            model and optimizer in it, training goes on bit for bit: moments, step counts and group settings are taken
            over. A run that resumes does not read it.
        strict: refuse `weights` of safetensors that lack tensors of the model or have others. Otherwise the former are
            initialised as without `weights`, the latter passed over; a warning names both. Another shape is refused.
        init: sets, in place, what the own code of a model on the meta device does not: called with every module after
            its `_init_weights`, `reset_parameters` and what else the model begins with in memory.

    Raises:
        ConfigError: a setting is wrong, or `weights` are not those of the model, with a list of what differs.
        BudgetError: the host cache or the space on NVMe is too small.
        UnsupportedError: the model or the optimizer cannot be paged, with the reason.
        FolderBusyError: another live run owns a path.
        CheckpointError: there is nothing to resume from, or `weights` cannot be read.
    """
    settings = load_config(config)
    check_config(settings)
    settings = with_absolute_paths(settings)  # the program may change its folder later
    # Inspect: nothing is changed, and what is wrong with model, optimizer or arguments is said.
    sharded = ShardedModel.inspect(model)
    if isinstance(optimizer, Sequence):
        optimizer = Optimizers(optimizer) if len(optimizer) != 1 else optimizer[0]
    if isinstance(optimizer, PagedOptimizer):
        raise UnsupportedError("the model is offloaded already")
    if weights is None and sharded.on_meta:
        weights = noted_weights(model)
    check_optimizer(sharded, optimizer)
    _check_sources(sharded, weights, strict, init)
    kernel = make_kernel(optimizer)
    if kernel.has_progress(optimizer):
        raise UnsupportedError("the optimizer has state already; make a new one and pass it before its first step")
    # Budget: the layout of pages, and how many cache slots memory has for them.
    ranks = Ranks.current()
    if ranks.rank == 0:
        warn_of_bf16(sharded)
    check_agreement(settings, ranks, weights=weights is not None, strict=strict, init=init is not None)
    ranks.together("closing earlier runs of this process", partial(open_runs.make_way, settings.storage.paths))
    checkpointed = page_bytes_of_checkpoint(settings, ranks) if settings.run.resume else 0
    plan = partial(plan_memory, settings, sharded, optimizer, kernel, ranks, checkpointed)
    budget = ranks.together("planning memory", plan)
    give_shapes(kernel, sharded, optimizer)
    prepare_encodings(settings, budget.layout, ranks)
    if shared := shared_slices(kernel, sharded, optimizer):
        check_exchange(settings, kernel)
    # Open, fill, attach: each stage by all ranks together. One that fails leaves nothing behind.
    run = _open(settings, ranks, budget, name_of(optimizer), sharded.device, exchanges=bool(shared))
    try:
        filling = Filling(run, sharded, weights, strict, init)
        steps = _make_steps(run, sharded, optimizer, kernel, shared)
        resumed = filling.fill(optimizer, steps.shards)
        paged = _attach(run, sharded, steps, resumed)
        open_runs.add(paged, model)
    except BaseException as error:
        run.abandon(error)
        raise
    return paged


def _check_sources(
    sharded: ShardedModel, weights: str | os.PathLike[str] | None, strict: bool, init: InitFunction | None
) -> None:
    if (weights or init) and not sharded.on_meta:
        raise ConfigError("weights and init are for models on the meta device; this model has values already")
    if not strict and (weights is None or DcpFolder.is_at(weights)):
        raise ConfigError("strict=False is for weights of safetensors; a folder of DCP must have the whole model")


def _open(
    settings: Config, ranks: Ranks, budget: Budget, optimizer: str, device: torch.device, *, exchanges: bool
) -> Run:
    """Take the NVMe paths, and open what pages in them."""
    place = RunDirectory.take(settings, ranks, budget.layout, optimizer)
    try:
        return Run(settings, ranks, budget, place, device, exchanges=exchanges)
    except BaseException as error:
        end_all(partial(place.give_up, remove=place.found is None), cause=error)
        raise


class _Steps(NamedTuple):
    """What runs training steps over the pages of a run, before the model knows of it."""

    base_optimizer: BaseOptimizer
    """The optimizer that was passed in."""
    made_with_state: bool
    """Whether that has states before its first step."""
    parameters: list[nn.Parameter]
    """By shard."""
    runner: StepRunner
    """Runs the steps."""
    shards: ShardIO
    """Gathers, loads and saves whole shards."""
    described: RunDescription
    """What the pages of this rank hold."""
    checkpoint_writer: CheckpointWriter
    """Publishes checkpoints, for which it has reserved space."""


def _make_steps(
    run: Run,
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    kernel: UpdateKernel,
    shared: Mapping[int, tuple[tuple[int, ...], int]],
) -> _Steps:
    """Make what runs steps, from the bottom up."""
    whole = None
    if shared:
        whole = FullParameters(
            run.layout, open_slices(shared, run.ranks), run.ranks,
            failure=lambda: run.pager.failure, exchanging=run.pager.exchanging,
            timeout=run.settings.storage.timeout_seconds,
        )  # fmt: skip
        run.undo.push(whole.close)
    parameters = [param for fsdp_module in sharded.parameters() for param in fsdp_module]
    base_optimizer = BaseOptimizer(optimizer, parameters, kernel)
    gpu_prefetcher = GpuPrefetcher(run.layout, run.pager, run.device)
    runner = StepRunner(
        run.layout, run.pager, run.device, gpu_prefetcher, run.settings.memory.device_bytes, run.updates_on_device,
        run.planner, run.worker, base_optimizer, run.ledger, run.freed, parameters, whole, run.activations,
    )  # fmt: skip
    run.undo.push(runner.close)
    load_limit = max(_LOAD_LIMIT, run.host_bytes // 2)
    shards = ShardIO(
        run.layout, run.pager, run.device, gpu_prefetcher, runner, run.ledger,
        load_limit=load_limit, make_room=run.store.allow_edits,
    )  # fmt: skip
    run.undo.push(shards.close)
    run.refuse_in_child += [runner.end, shards.close]
    described = describe(run, sharded)
    checkpoint_writer = make_checkpoint_writer(run, sharded, described, optimizer)
    return _Steps(base_optimizer, kernel.builds, parameters, runner, shards, described, checkpoint_writer)


def _attach(run: Run, sharded: ShardedModel, steps: _Steps, resumed: ResumedState | None) -> PagedOptimizer:
    """Give the model paged shards, and return the optimizer that trains it."""
    base_optimizer, runner, shards = steps.base_optimizer, steps.runner, steps.shards

    def listen() -> Attachment:
        attachment = Attachment(sharded, shards, runner, run.ledger)
        run.undo.push(attachment.detach)
        return attachment

    attachment = run.ranks.together("attaching to the model", listen)
    if run.activations is not None:
        run.undo.push(SavedActivations(sharded, run.activations).detach)
    run.undo.push(save_whole_adapters(sharded.model))
    checkpointer = Checkpointer(run, sharded.model, base_optimizer, runner, attachment, steps.checkpoint_writer)
    base_optimizer.optimizer.state.clear()
    if resumed is not None:
        runner.resume(resumed.step, resumed.scalars)
        base_optimizer.kernel.restore_own(resumed.own)
    if run.directory.found is not None:
        checkpointer.forget_others()
    numbers = {id(param): shard for shard, param in enumerate(steps.parameters)}
    of_model = {param: numbers[id(param)] for param in sharded.model.parameters()}
    names = {name: shard for shard, member in enumerate(sharded.shards) for name in member.names}
    states = StateReader(run.layout, shards, runner, of_model, names=names, made_with_state=steps.made_with_state)
    saves = LiveSaves(run, sharded.model, steps.described, base_optimizer, runner, shards, attachment)
    paged = PagedOptimizer(base_optimizer, run, runner, states, checkpointer, saves, resumed)
    # The new run is one to resume from before the old one is no longer needed.
    if run.directory.source is not None and run.settings.run.retained_checkpoints:
        paged.save_checkpoint(paged.resumed_extra)
        if run.ranks.rank == 0:
            old = run.directory.source.reader
            _log.warning(
                "step %d of run %s (world size %d) goes on as run %s; the old one still takes its space, free it with "
                "`infinity store rm`", old.step, old.folder.run_id, old.world_size, run.folder.run_id,
            )  # fmt: skip
    run.planner.expect(sharded.expected_step(alone=run.ranks.world_size == 1))
    run.ledger.restart_step()
    return paged
