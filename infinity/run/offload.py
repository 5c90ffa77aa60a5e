"""`infinity.offload`: move the state of a sharded model to NVMe."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from infinity.budget import Budget
from infinity.checkpoint.mirror import MirrorFiles
from infinity.checkpoint.publish import remove_checkpoints
from infinity.cleanup import end_all
from infinity.config import Config, check_config, load_config, with_absolute_paths
from infinity.content.format import ITEMSIZE
from infinity.errors import ConfigError, UnsupportedError
from infinity.formats.adapters import save_whole_adapters
from infinity.fsdp.attach import Attachment
from infinity.fsdp.saved_activations import SavedActivations
from infinity.fsdp.shard_io import ShardIO
from infinity.fsdp.sharded_model import ShardedModel
from infinity.models.sharding import reject_resizing
from infinity.models.weight_source import noted_weights
from infinity.optim.base_optimizer import BaseOptimizer
from infinity.optim.full_parameter import FullParameters
from infinity.optim.kernel import UpdateKernel
from infinity.optim.multi_optimizer import Optimizers, name_of
from infinity.optim.slicing_check import make_kernel
from infinity.optim.states import StateReader
from infinity.optim.step import StepRunner
from infinity.optim.updates import Updates
from infinity.peer_failures import Peers
from infinity.ranks import Ranks
from infinity.run import open_runs
from infinity.run.checkpointing import Checkpointer, describe, make_checkpoint_writer
from infinity.run.initial_state import Filling
from infinity.run.inspection import (
    check_agreement,
    check_exchange,
    check_optimizer,
    give_shapes,
    no_updates,
    plan_memory,
    prepare_encodings,
    shared_slices,
    warn_of_bf16,
)
from infinity.run.live_state import LiveSaves
from infinity.run.modules_in_memory import ModulesInMemory
from infinity.run.optimizer import PagedOptimizer
from infinity.run.run import Run
from infinity.run.run_directory import ClaimedPaths, RunDirectory
from infinity.run.run_name import with_name
from infinity.sources.dcp import DcpFolder
from infinity.sources.initialize import InitFunction
from infinity.units import MIB

_log = logging.getLogger("infinity")
_LOAD_LIMIT = 256 * MIB


def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    strict: bool = True,
    init: InitFunction | None = None,
) -> PagedOptimizer:
    """Move the parameters and optimizer state of a sharded model to NVMe.

    If some FSDP modules were sharded with `NVMeOffloadPolicy`, only these are moved, and all others stay in memory.

    Call it once, after `fully_shard` and after creating the optimizer, and train with the optimizer that it returns.
    Training produces bitwise the same weights, losses and gradients as training the same FSDP2 model in memory. All
    ranks must call `offload` together.

    Args:
        model: model on whose layers and root `fully_shard` was called, on a real device or on the meta device.
        optimizer: optimizer of any class for the parameters of `model`, before its first step. Its update must not
            depend on how parameters are split into pages; this is tested on small copies before any data is written. A
            sequence of optimizers, each for a part of the parameters, is also supported: the returned optimizer
            contains the param groups of all of them, and its `step` steps all of them. ``None`` for a model that is
            not trained, such as a frozen reference model. Create schedulers before calling `offload`: the constructor
            of a scheduler sets the learning rate, which a run that resumes restores from the checkpoint.
        config: settings, as the path of a TOML file, a nested mapping, or a `Config`. `storage.paths` is required.
        weights: folder from which the weights of a model on the meta device are streamed, one FSDP module at a time. By
            default, the folder that `infinity.from_pretrained` recorded for `model`, if any. It may be a safetensors
            folder as written by `save_pretrained` (or a single file or index, to select a variant) or a
            `torch.distributed.checkpoint` folder written by any number of ranks. For transformers models, names are
            resolved and tensors are renamed, fused or split as in `from_pretrained`; for other models, tensor names
            must match parameter names. If a `torch.distributed.checkpoint` folder contains the result of
            `get_state_dict` for the model and the optimizer, training continues bit for bit, including optimizer state,
            step counts and param group settings. A run that resumes from its own checkpoint does not read `weights`.
        strict: raise an error if safetensors `weights` lack tensors of the model or contain unexpected ones. If
            ``False``, missing tensors are initialized as if `weights` were not passed, unexpected tensors are ignored,
            and a warning lists both. A shape mismatch is always an error, unless the model only has more tokens.
        init: function that is called with every module of a model on the meta device, after the model's own
            initialization (such as `_init_weights` or `reset_parameters`). It sets the remaining values in place.

    Returns:
        The optimizer to train with. It shares `param_groups` with `optimizer`.

    Raises:
        ConfigError: if a setting is invalid, or `weights` do not match the model. The message lists the differences.
        BudgetError: if the host cache or the free space on NVMe is too small.
        UnsupportedError: if the model or the optimizer is not supported. The message gives the reason.
        FolderBusyError: if another live run is using a path.
        CheckpointError: if there is no checkpoint to resume from, or `weights` cannot be read.

    Example::

        >>> for layer in model.layers:
        ...     fully_shard(layer)
        >>> fully_shard(model)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        >>> optimizer = infinity.offload(model, optimizer, {"storage": {"paths": ["/nvme0/run"]}})
        >>> model(batch).loss.backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> optimizer.close()
    """
    return offload_inside(model, model, optimizer, config, weights=weights, strict=strict, init=init)


def offload_inside(
    outermost: nn.Module,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None,
    *,
    weights: str | os.PathLike[str] | None,
    strict: bool,
    init: InitFunction | None,
    new_optimizer: bool = False,
) -> PagedOptimizer:
    """Offload a model that is part of another module, whose buffers and extra state checkpoints also contain.

    Args:
        outermost: module that contains `model` and no further parameters, such as a LightningModule.
        model: see `offload`, like all other arguments, return value and exceptions.
        new_optimizer: whether a resumed run starts with the settings of `optimizer` and without optimizer state.
    """
    settings = load_config(config)
    check_config(settings)
    settings = with_absolute_paths(settings)  # the working directory may change later
    # Inspect: report errors in the model, the optimizer and the arguments before changing anything.
    sharded = ShardedModel.inspect(model, outermost)
    settings = with_name(settings, model, settings.storage.paths[0])
    if optimizer is None:
        optimizer = no_updates(sharded)
    if isinstance(optimizer, Sequence):
        optimizer = Optimizers(optimizer) if len(optimizer) != 1 else optimizer[0]
    if isinstance(optimizer, PagedOptimizer):
        raise UnsupportedError("the model is already offloaded")
    if weights is None and sharded.on_meta:
        weights = noted_weights(model)
    check_optimizer(sharded, optimizer)
    _check_sources(sharded, weights, strict, init)
    kernel = make_kernel(optimizer)
    if any(optimizer.state.values()) and not kernel.builds:
        raise UnsupportedError("the optimizer already has state. Pass a new optimizer that has not taken a step yet.")
    ranks = Ranks.current()
    if ranks.rank == 0:
        warn_of_bf16(sharded)
    peers = Peers(ranks, settings.run.heartbeat_timeout_seconds)  # first, because every stage waits for all ranks
    with peers.starting():
        check_agreement(settings, ranks, weights=weights is not None, strict=strict, init=init is not None)
        ranks.together("closing earlier runs of this process", partial(open_runs.make_way, settings.storage.paths))
        # Claim the paths and find the checkpoint, then choose the page layout and the number of cache slots.
        claimed = ClaimedPaths(settings, ranks)
    try:
        with peers.starting():
            plan = partial(plan_memory, settings, sharded, kernel, ranks, claimed.page_bytes())
            budget = ranks.together("planning memory", plan)
            give_shapes(kernel, sharded)
            prepare_encodings(settings, budget.layout, ranks)
            if shared := shared_slices(kernel, sharded):
                check_exchange(settings, kernel)
            # Open, fill, attach: all ranks run each stage together. A stage that fails is undone completely.
            run = _open(claimed, peers, budget, name_of(optimizer), sharded, exchanges=bool(shared))
    except BaseException as error:
        claimed.release(error)
        raise
    try:
        filling = Filling(run, sharded, weights, strict, init)
        paged = _attach(run, sharded, optimizer, kernel, shared, filling, new_optimizer=new_optimizer)
        open_runs.add(paged, model)
    except BaseException as error:
        reason = run.peers.explain(error)
        run.abandon(reason or error)
        if reason is not None:
            raise reason from error
        raise
    return paged


def _check_sources(
    sharded: ShardedModel, weights: str | os.PathLike[str] | None, strict: bool, init: InitFunction | None
) -> None:
    if (weights or init) and not sharded.on_meta:
        raise ConfigError("weights and init require a model on the meta device, but this model already has values")
    if not strict and (weights is None or DcpFolder.is_at(weights)):
        raise ConfigError(
            "strict=False requires safetensors weights. A torch.distributed.checkpoint folder must contain the "
            "complete model."
        )


def _open(
    claimed: ClaimedPaths, peers: Peers, budget: Budget, optimizer: str, sharded: ShardedModel, *, exchanges: bool
) -> Run:
    """Choose the folders of the run and open the components that move pages to and from them."""
    directory = RunDirectory.take(claimed, describe(budget.layout, sharded), optimizer)
    try:
        return Run(claimed.settings, claimed.ranks, peers, budget, directory, sharded.device, exchanges=exchanges)
    except BaseException as error:
        end_all(partial(directory.give_up, remove=directory.found is None), cause=error)
        raise


def _attach(
    run: Run,
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    kernel: UpdateKernel,
    shared: Mapping[int, tuple[tuple[int, ...], int]],
    filling: Filling,
    *,
    new_optimizer: bool,
) -> PagedOptimizer:
    """Fill the pages, replace the model's shards with paged shards, and return the optimizer that trains the model."""
    full = None
    if shared:
        full = FullParameters(run.layout, shared, run.ranks, run.pager.transfers)
        run.undo.push(full.close)
    parameters = [param for fsdp_module in sharded.parameters() for param in fsdp_module]
    base_optimizer = BaseOptimizer(optimizer, parameters, kernel, sharded.ignored, sharded.shards_in_memory)
    updates = Updates(
        run.layout, run.pager, run.device, run.planner, base_optimizer, run.worker, run.ledger, full
    )  # fmt: skip
    runner = StepRunner(
        run.layout, run.pager, run.device, updates, run.ledger, run.freed, parameters, run.activations
    )  # fmt: skip
    run.undo.push(runner.close)
    # One parameter and its states can always be loaded, for example to save them.
    largest = max(
        placed.spec.numel * sum(ITEMSIZE[dtype] for dtype in run.layout.format_of(shard).dtypes.values())
        for shard, placed in enumerate(run.layout.shards)
    )
    load_limit = max(_LOAD_LIMIT, run.host_bytes // 2, largest)
    shards = ShardIO(
        run.layout, run.pager, run.device, runner.gpu_prefetcher, runner, run.ledger,
        load_limit=load_limit, allow_new_versions=run.store.allow_edits,
    )  # fmt: skip
    run.undo.push(shards.close)
    run.check_not_forked += [runner.end, shards.close]
    described = describe(run.layout, sharded)
    checkpoint_writer = make_checkpoint_writer(run, sharded, described, base_optimizer)
    resumed = filling.fill(base_optimizer, shards, new_optimizer=new_optimizer)

    def listen() -> Attachment:
        attachment = Attachment(sharded, shards, runner, run.ledger, alone=run.ranks.world_size == 1)
        run.undo.push(attachment.detach)
        return attachment

    attachment = run.ranks.together("attaching to the model", listen)
    if run.activations is not None:
        run.undo.push(SavedActivations(sharded, run.activations).detach)
    run.undo.push(save_whole_adapters(sharded.model))
    reject_resizing(sharded.model)
    base_optimizer.optimizer.state.clear()
    scalars = resumed.scalars if resumed is not None else {}
    if resumed is not None:
        runner.resume(resumed.step, {shard: scalars[shard] for shard in sharded.paged_shards if shard in scalars})
        base_optimizer.kernel.restore_own(resumed.own)
    numbers = {id(param): shard for shard, param in enumerate(parameters)}
    of_model = {param: numbers[id(param)] for param in sharded.model.parameters() if id(param) in numbers}
    names = {name: shard for shard, member in enumerate(sharded.shards) for name in member.names}
    states = StateReader(run.layout, shards, runner, base_optimizer, of_model, names)
    in_memory = ModulesInMemory(sharded, run.layout, shards, base_optimizer.in_memory, states)
    if sharded.on_meta or resumed is not None:
        run.ranks.together("loading the FSDP modules that stay in memory", partial(in_memory.load, scalars))
    checkpointer = Checkpointer(run, sharded, base_optimizer, runner, attachment, checkpoint_writer, in_memory)
    saves = LiveSaves(run, sharded.model, described, runner, attachment, in_memory)
    if run.directory.found is not None:  # startup has succeeded on every rank
        keep = [manifest.name.checkpoint for manifest in run.directory.checkpoints]
        remove = partial(remove_checkpoints, run.folder, run.ranks, keep=keep)
        run.ranks.together("removing checkpoints", remove)
    paged = PagedOptimizer(base_optimizer, run, runner, attachment.passes, states, checkpointer, saves, resumed)
    loaded = filling.load(paged)
    if loaded is not None:
        runner.resume(loaded, {})
    if loaded is not None or resumed is not None:
        base_optimizer.note_resumed()
    # The new run needs its own checkpoint before the user can safely remove the old run.
    if run.directory.source is not None and run.settings.run.retained_checkpoints:
        paged.save_checkpoint(paged.resumed_extra)
        if run.ranks.rank == 0:
            old = run.directory.source.reader
            _log.warning(
                "training continues from step %d of run %s (world size %d) as run %s%s",
                old.step, old.folder.run_id, old.world_size, run.folder.run_id,
                "" if isinstance(old.files, MirrorFiles)
                else "; the old run occupies space until you remove it with `infinity store rm`",
            )  # fmt: skip
    run.planner.expect(sharded.expected_step(alone=run.ranks.world_size == 1))
    run.ledger.restart_step()
    return paged
