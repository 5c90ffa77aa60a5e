"""`infinity.offload`: composes arena, store, pager, attachment and optimizer into one run."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import resource
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import infinity
from infinity import live, torchrun
from infinity.budget import Budget, choose_budget
from infinity.checkpoint.commit import (
    Committer,
    choose_run,
    committed_buffers,
    find_commits,
    list_commits,
    remove_commits,
    restore,
)
from infinity.checkpoint.description import RunDescription, TensorSpec
from infinity.checkpoint.extra import save_extra
from infinity.checkpoint.manifest import Manifest, published_in
from infinity.checkpoint.reader import CommitReader
from infinity.checkpoint.room import CommitRoom, commit_bytes
from infinity.checkpoint.state import ResumedState
from infinity.config import Config, check_config, load_config, runtime_dir
from infinity.content.format import Role, StateFormat
from infinity.content.layout import Layout, Page
from infinity.ending import end_all
from infinity.errors import ConfigError, StallError, StorageError, UnsupportedError
from infinity.formats.companions import carry_companions, keep_companions
from infinity.fsdp import private
from infinity.fsdp.attach import Attachment
from infinity.fsdp.shard_io import ShardIO
from infinity.fsdp.sharded_model import Member, ShardedModel
from infinity.io import Ticket, open_engine
from infinity.io.drives import locate
from infinity.memory.arena import Arena
from infinity.memory.heap import FreedMemory
from infinity.memory.limits import available_memory
from infinity.optim.kernel import UpdateKernel
from infinity.optim.optimizer import PagedOptimizer
from infinity.optim.probe import make_kernel, view_shape
from infinity.optim.step import StepState
from infinity.optim.worker import UpdateWorker
from infinity.peers import Peers
from infinity.ranks import Ranks
from infinity.schedule.pager import Pager
from infinity.sources.dcp import DcpFolder
from infinity.sources.first_values import FirstValues, OwnValues
from infinity.sources.initialise import InitFunction, ModuleInitialiser
from infinity.sources.pretrained import PretrainedFolder
from infinity.sources.reshard import ReshardSource, folders_of, lies_otherwise
from infinity.store.bandwidth import path_shares
from infinity.store.extents import file_sizes, plan_slots, spread
from infinity.store.folder import FolderLock, RunFolder, make_paths, reserve, unmake_paths
from infinity.store.marker import look_for_runs, new_run_id, passed_over
from infinity.store.pages import PageStore
from infinity.telemetry import Stats
from infinity.telemetry.ledger import Ledger
from infinity.telemetry.timeline import Timeline
from infinity.units import MIB, format_size

_log = logging.getLogger("infinity")
_SPARE_SLOTS = 16
_LOAD_LIMIT = 256 * MIB


def mesh(device_type: str | None = None) -> DeviceMesh:
    """Return a mesh over all ranks for `fully_shard(..., mesh=infinity.mesh())`.

    Under torchrun the process group is made from its environment; under plain `python` one of a single rank is
    made, without any network. A process group that exists already is used.

    Args:
        device_type: ``cuda`` or ``cpu``; by default ``cuda`` where there is a GPU.

    Raises:
        ConfigError: there is no such device, the environment is not that of torchrun, or the ranks do not find each
            other.
    """
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    launched = not dist.is_initialized() and torchrun.launched()
    _take_device(device_type)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        if launched:
            try:
                dist.init_process_group(backend)
            except (RuntimeError, ValueError) as error:
                place = f"MASTER_ADDR={os.environ['MASTER_ADDR']!r}, MASTER_PORT={os.environ['MASTER_PORT']}"
                reason = str(error).partition("\n")[0]
                raise ConfigError(f"the ranks do not find each other at {place}: {reason}") from error
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return private.default_mesh(device_type)


def _take_device(device_type: str) -> None:
    if device_type not in ("cuda", "cpu"):
        raise ConfigError(f"infinity.mesh({device_type!r}): the devices are 'cuda' and 'cpu'")
    if device_type == "cuda":
        index, there = torchrun.number("LOCAL_RANK", 0), torch.cuda.device_count()
        if index >= there:
            raise ConfigError(f"local rank {index} has no GPU: there are {there} here; start as many ranks as GPUs")
        torch.cuda.set_device(index)


def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
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
            are cut into pages; that is tried out on small copies of it before anything is written.
        config: settings: a TOML file, a nested mapping, a `Config`; at least `storage.paths`.
        weights: folder to load a model on the meta device from, as a stream. Either of safetensors, as
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
        BudgetError: the arena or the space on NVMe is too small.
        UnsupportedError: the model or the optimizer cannot be paged, with the reason.
        FolderBusyError: another live run owns a path. CommitError: there is nothing to resume from, or `weights`
            cannot be read.
    """
    settings = load_config(config)
    check_config(settings)
    sharded = ShardedModel.inspect(model)
    _check_optimizer(sharded, optimizer)
    if (weights or init) and not sharded.on_meta:
        raise ConfigError("weights and init are for models on the meta device; this model has values already")
    if not strict and (weights is None or DcpFolder.is_at(weights)):
        raise ConfigError("strict=False is for weights of safetensors; a folder of DCP must have the whole model")
    kernel = make_kernel(optimizer)
    if kernel.has_progress(optimizer):
        raise UnsupportedError("the optimizer has state already; make a new one and pass it before its first step")
    ranks = Ranks.current()
    ranks.together("closing earlier runs of this process", lambda: live.make_way(settings.storage.paths))
    budget = ranks.together("planning memory", lambda: _budget(settings, sharded, optimizer, kernel, ranks))
    _give_shapes(kernel, sharded, optimizer)
    run = _Run.open(settings, ranks, budget, type(optimizer).__name__, sharded.device)
    try:
        paged = run.attach(sharded, optimizer, kernel, weights, strict, init)
    except BaseException as error:
        if run.is_here:
            end_all(partial(run.peers.leave, error), partial(run.abandon, error), cause=error)
        raise
    live.add(paged, model)
    return paged


def _check_optimizer(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, PagedOptimizer):
        raise UnsupportedError("the model is offloaded already")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(f"the optimizer is of type {type(optimizer).__name__}, no torch.optim.Optimizer")
    for group in optimizer.param_groups:
        for name, value in group.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{name} of the optimizer is {value}; give it a finite number")
    known = {id(param) for unit in sharded.parameters() for param in unit}
    given = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if foreign := len(given - known):
        raise UnsupportedError(
            f"{foreign} parameters of the optimizer do not belong to the model; make the optimizer after fully_shard"
        )
    for members in sharded.members:
        for member in members:
            param = member.param.sharded_param
            if param.requires_grad and id(param) not in given:
                raise UnsupportedError(
                    f"{member.names[0]} requires a gradient but is not in the optimizer; add it, or freeze it with "
                    "requires_grad_(False)"
                )


def _budget(
    settings: Config, sharded: ShardedModel, optimizer: torch.optim.Optimizer, kernel: UpdateKernel, ranks: Ranks
) -> Budget:
    group_of = {id(param): group for group in optimizer.param_groups for param in group["params"]}

    def format_of(param: nn.Parameter, gather: str) -> StateFormat:
        return StateFormat(param=gather, kinds=kernel.discover(param, group_of[id(param)]).kinds)

    def row_of(member: Member) -> int:
        param = member.param.sharded_param
        if kernel.discover(param, group_of[id(param)]).slices != "rows":
            return 1
        why = ""
        if private.shard_dim(member.param) or private.is_tensor_parallel(member.param):
            why = f"{member.names[0]} is not cut along its first dimension only"
        elif settings.state.format != "fp32":
            why = 'it needs state.format = "fp32"'
        if why:
            raise UnsupportedError(
                f"{kernel.name} updates whole rows (it centralises gradients, or divides by norms of rows), which is "
                f"not possible here: {why}; use an element-wise optimizer such as AdamW"
            )
        return math.prod(private.local_tensor(member.param).shape[1:])

    units, found = sharded.describe(format_of, row_of)
    formats = {key: fmt.stored_as(settings.state.format) for key, fmt in found.items()}
    if settings.state.format != "fp32" and not any(fmt.encodings for fmt in formats.values()):
        raise ConfigError(
            f'state.format = "{settings.state.format}" would change nothing: "split" is for bf16 weights with an fp32 '
            "master (MixedPrecisionPolicy(param_dtype=torch.bfloat16) on an fp32 model), the others also for fp32 "
            'states of the optimizer; set "fp32"'
        )
    host = settings.memory.host_bytes or available_memory() // 4 // ranks.local_world_size
    return choose_budget(units, formats, host, settings.memory.page_bytes)


def _give_shapes(kernel: UpdateKernel, sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Tell the kernel the shape of slices, by shard, where the optimizer needs another than (n,)."""
    group_of = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    for shard, member in enumerate(member for unit in sharded.members for member in unit):
        param = member.param.sharded_param
        if param.requires_grad:
            slices = kernel.discover(param, group_of[id(param)]).slices
            shape = view_shape(slices, private.local_tensor(member.param).shape)
            if shape is not None:
                kernel.shapes[shard] = shape


class _Run:
    """Everything that lives from `offload` to `close`."""

    def __init__(
        self,
        settings: Config,
        ranks: Ranks,
        budget: Budget,
        folder: RunFolder,
        lock: FolderLock,
        commits: list[Manifest],
        old: ReshardSource | None,
        shares: list[float],
        device: torch.device,
    ) -> None:
        layout, paths = budget.layout, [str(root.parent) for root in folder.roots]
        self.settings, self.ranks, self.layout, self.folder = settings, ranks, layout, folder
        self.resumed: ResumedState | None = None
        self.peers: Peers
        self._process = os.getpid()
        self._old = old
        self._lock, self._shares = lock, shares
        self._commits = commits
        self._found = commits[-1] if commits else None
        self._closers: list[Callable[[], None]] = []
        self._own: list[Callable[[], None]] = []
        """What this object itself has opened, to be closed behind `_closers`, the latest first."""
        self._stalled = False
        """A device does not answer at the end: a write may still arrive, so neither memory nor folders are given up."""
        try:
            self._build(budget, commits, device, paths)
        except BaseException as error:
            end_all(*reversed(self._own), cause=error)
            raise

    def _build(self, budget: Budget, commits: list[Manifest], device: torch.device, paths: Sequence[str]) -> None:
        """Reserve the space, allocate the arena, open engine, counters and files."""
        settings, ranks, layout, folder, shares = self.settings, self.ranks, self.layout, self.folder, self._shares
        folder.create()
        homes = spread(layout.pages, shares)
        retained = settings.run.retained_commits
        # Commits beyond the retained ones stay until the next one is published, where they are.
        slots = plan_slots(layout.pages, homes, _SPARE_SLOTS, max(retained, len(commits)))
        files = [folder.data_file(index, ranks.rank) for index in range(len(paths))]
        for file, size in zip(files, file_sizes(slots, len(paths)), strict=True):
            reserve(file, size)
        self.files = files
        self.arena = Arena(budget.frames, layout.page_bytes, device=device)
        self._own.append(self._close_arena)
        self.freed = FreedMemory()
        self.engine, _ = open_engine(settings.storage)
        self._own.append(self._close_engine)
        self.stats = _stats_page(settings, ranks, folder.run_id, self.engine.name, paths)
        self._own.insert(0, partial(self.stats.close, remove=True))
        self.timeline = _timeline(settings, ranks, layout)
        self.ledger = Ledger(self.stats, self.timeline)
        self.engine.register(self.arena.memory)
        self.store = PageStore(
            layout.pages,
            homes,
            files,
            slots,
            self.engine,
            name_of=layout.page_name,
            moved=self._moved,
            timeout=settings.storage.timeout_seconds,
            retries=settings.storage.retries,
            committed={commit.step: commit.pages for commit in commits},
            retained=retained,
        )
        self._own.append(self.store.close)
        self.pager = Pager(
            layout,
            self.arena,
            self.store,
            self.ledger,
            timeout=settings.storage.timeout_seconds,
            failed=lambda error: self.peers.report(error),
        )
        for role in Role:
            self.stats.gauge("tier_used_bytes", tier="nvme", state=role.value).set(layout.bytes_of(role))
        self.stats.gauge("tier_capacity_bytes", tier="host").set(self.arena.nbytes)
        self.stats.gauge("tier_capacity_bytes", tier="nvme").set(sum(file_sizes(slots, len(paths))))

    @classmethod
    def open(cls, settings: Config, ranks: Ranks, budget: Budget, optimizer: str, device: torch.device) -> _Run:
        """Take the folders, find the commit to resume from, reserve space, allocate the arena.

        Every stage is taken by all ranks together: where one fails, all fail, with its reason. What was there before is
        there still then, and nothing else.
        """
        paths = settings.storage.paths
        old_paths = settings.run.resume_paths or paths
        host = socket.gethostname()
        made: list[Path] = []
        ranks.together("making paths", lambda: made.extend(make_paths(paths)), lambda: unmake_paths(made))
        # On this node, by whatever rank: the last one that leaves them removes them.
        made = [path for name, of_rank in ranks.collect((host, made)) if name == host for path in of_rank]
        undo: list[Callable[[], object]] = [partial(unmake_paths, made)]

        def take() -> FolderLock:
            lock = FolderLock.acquire(paths, run_id, ranks.local_rank, made)
            undo.append(lock.release)
            if ranks.local_rank == 0:
                _say_where(paths)
            return lock

        try:
            resume = choose_run(old_paths, settings.run.resume, ranks)
            run_id = resume or ranks.agree(new_run_id())
            lock = ranks.together("taking the NVMe paths", take)
            folder = RunFolder.of(paths, run_id)
            commits: list[Manifest] = []
            old: ReshardSource | None = None
            if resume:
                roots = ranks.together("finding the run's folders", lambda: folders_of(old_paths, run_id, paths))
                if {root.resolve() for root in roots.roots} == {root.resolve() for root in folder.roots}:
                    folder = roots  # in the run's own order, whatever that of the settings is
                there = list_commits(roots, ranks, settings.run.resume_step)
                if lies_otherwise(roots, folder, there[-1], budget.layout, ranks):
                    reader = ranks.together("reading the commit", lambda: CommitReader(roots, there[-1]))
                    old = ReshardSource(reader, ranks)
                    folder = RunFolder.of(paths, ranks.agree(new_run_id()))
                    lock.name(folder.run_id)
            if resume and old is None:
                commits = find_commits(folder, ranks, budget.layout, optimizer, there)
                shares = list(commits[-1].weights)
            else:
                undo.append(partial(folder.remove_rank, ranks.rank, commits=ranks.local_rank == 0))
                if ranks.local_rank == 0 and old is None:
                    _report_earlier_runs(paths)
                shares = _agree_on_shares(settings, ranks)

            def build() -> _Run:
                with _naming_limit():
                    run = cls(settings, ranks, budget, folder, lock, commits, old, shares, device)
                undo.append(run.end)
                return run

            run = ranks.together("opening the run", build)
            run.peers = Peers(ranks, run.pager.fail)
            return run
        except BaseException as error:
            end_all(*reversed(undo), cause=error)
            raise

    def attach(
        self,
        sharded: ShardedModel,
        optimizer: torch.optim.Optimizer,
        kernel: UpdateKernel,
        weights: str | os.PathLike[str] | None,
        strict: bool,
        init: InitFunction | None,
    ) -> PagedOptimizer:
        """Give the model paged shards and return its optimizer."""
        settings, layout = self.settings, self.layout
        attachment: Attachment
        paged: PagedOptimizer

        def gathering(shard: int) -> bool:
            if layout.begins_unit(shard):
                self.freed.bound(measure=attachment.training_pass and paged.plan is None)
                attachment.check_frozen(layout.shards[shard].unit)
            return paged.gathering(shard, attachment.training_pass)

        limit = max(_LOAD_LIMIT, self.arena.nbytes // 2)
        content = ShardIO(
            layout,
            self.pager,
            load_limit=limit,
            gathering=gathering,
            gathered=lambda shard: paged.gathered(shard),
            copied=self.ledger.copied,
            look=lambda shard: paged.look(shard),
            part=self.ledger.part,
        )
        self._closers.append(content.close)
        initialiser = ModuleInitialiser(sharded.model, settings.run.seed, init)
        members = [member for unit in sharded.members for member in unit]
        self._committer = self._make_committer(sharded, members, optimizer)
        self._closers.append(self._committer.close)
        self.ranks.together("reserving space for commits", self._committer.reserve)
        source: FirstValues | None = None
        if self._found is None:
            source = self.ranks.together(
                "opening the weights", lambda: self._old or _first_values(sharded, initialiser, weights, strict)
            )
            check = partial(source.check, sharded.model, members, layout, optimizer)
            self.ranks.together("checking the first values", check)
        if sharded.on_meta:
            known = self.ranks.together("reading buffers", partial(self._known_buffers, source, sharded.model))
            set_buffers = partial(initialiser.set_buffers, sharded.device, known)
            self.ranks.together("computing buffers", set_buffers)
        if source is not None:
            self._write_first_values(source, sharded, content)

        def keep_beside() -> None:
            if self.ranks.rank == 0 and self._found is None:
                self._keep_companions(sharded.model, source)

        self.ranks.together("keeping what exports need", keep_beside)
        attachment = Attachment(
            sharded,
            content,
            gradient_arrived=lambda shard, local: paged.gradient_arrived(shard, local),
            part=self.ledger.part,
        )
        self._closers.append(attachment.detach)
        self._check_weights = attachment.check
        made_with_state = kernel.builds
        optimizer.state.clear()
        numbers = {
            id(param): number for number, group in enumerate(optimizer.param_groups) for param in group["params"]
        }

        def group_of(shard: int) -> Mapping[str, Any]:  # looked up when it is needed: groups may be replaced
            return optimizer.param_groups[numbers[id(attachment.parameters[shard])]]

        worker = UpdateWorker(
            self.settings.update.cores_beside(sharded.device.type, _idle_cores(self.ranks)), self.pager.fail
        )
        self._closers.append(worker.close)
        state = StepState(
            layout,
            self.pager,
            kernel,
            parameters=attachment.parameters,
            group_of=group_of,
            phase=self.ledger.phase,
            part=self.ledger.part,
            worker=worker,
        )
        if self._found is not None:
            self.resumed = restore(self._found, self.folder, sharded.model, optimizer.param_groups)
        elif source is not None:
            restored = partial(source.restore, sharded.model, members, optimizer.param_groups)
            self.resumed = self.ranks.together("restoring what belongs to the first values", restored)
        if self.resumed is not None:
            state.scalars.update(self.resumed.scalars)
            kernel.restore_own(self.resumed.own)
            state.step = self.resumed.step
        # Only now is anything changed of a run that was there before: its start has succeeded on every rank.
        if self._found is not None:
            keep = [manifest.name.commit for manifest in self._commits]
            self.ranks.together("removing commits", lambda: remove_commits(self.folder, self.ranks, keep=keep))
        self._index_of = {id(param): index for index, param in enumerate(attachment.parameters)}
        self._model, self._optimizer, self._kernel = sharded.model, optimizer, kernel
        paged = PagedOptimizer(
            optimizer,
            list(sharded.model.parameters()),
            layout=layout,
            frames=self.arena.frames,
            pager=self.pager,
            content=content,
            state=state,
            ledger=self.ledger,
            run=self,
            placement=settings.update.placement,
            steps=self.resumed.step if self.resumed else 0,
            committed=self.resuming,
            names={name: shard for shard, member in enumerate(members) for name in member.names},
            shards=self._index_of,
            made_with_state=made_with_state,
        )
        if self._old is not None:
            self._begin_resharded(paged, self._old)
        self.ledger.restart_step()
        return paged

    def _make_committer(
        self, sharded: ShardedModel, members: list[Member], optimizer: torch.optim.Optimizer
    ) -> Committer:
        described = RunDescription(
            layout=self.layout,
            tensors=tuple(map(_whole, members)),
            buffers=private.persistent_buffers(sharded.model),
        )
        file = self.folder.commits / f"rank{self.ranks.rank:05d}.room.tmp"
        room = CommitRoom(file, commit_bytes(described, sharded.model, optimizer.param_groups))
        name, commits = type(optimizer).__name__, self._commits
        return Committer(self.folder, self.ranks, described, self.store, name, self._shares, commits, room)

    def _write_first_values(self, source: FirstValues, sharded: ShardedModel, content: ShardIO) -> None:
        def write() -> None:
            for unit, (name, of_unit) in enumerate(zip(sharded.names, sharded.members, strict=True)):
                content.initialise(unit, source.values(name, of_unit))
                self.freed.bound()

        self.ranks.together("writing the first values", write)

    def _keep_companions(self, model: nn.Module, source: FirstValues | None) -> None:
        """Put beside the commits what exports need besides them."""
        try:
            if self._old is not None:
                carry_companions(self._old.reader.folder.commits, self.folder.commits)
            else:
                files = source.files if isinstance(source, PretrainedFolder) else None
                keep_companions(self.folder.commits, model, files)
        except OSError as error:
            raise StorageError("write", error.filename or str(self.folder.commits), 0, 0, error.errno) from error

    def _known_buffers(self, source: FirstValues | None, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the buffers that the first values or the commit have, by their names in the model."""
        if source is not None:
            return source.buffers(model)
        return committed_buffers(self._found, self.folder, model) if self._found is not None else {}

    def _begin_resharded(self, paged: PagedOptimizer, left: ReshardSource) -> None:
        """Make the new run one to resume from, before the old one is no longer needed."""
        paged.commit(self.resumed_extra)
        if self.ranks.rank == 0:
            old = left.reader
            _log.warning(
                "step %d of run %s (world size %d) goes on as run %s; the old one still takes its space, free it with "
                "`infinity store rm`", old.step, old.folder.run_id, old.world_size, self.folder.run_id,
            )  # fmt: skip

    def check_extra(self, extra: dict[str, Any]) -> None:
        """Check what a commit is given; where it cannot be committed on one rank, nothing is on any.

        Raises:
            CommitError: it would come back as something else.
            InfinityError: that of another rank would.
        """
        self.ranks.together("commit", partial(save_extra, extra))

    def publish(self, step: int, scalars: Mapping[int, Mapping[str, Any]], extra: dict[str, Any]) -> None:
        """Publish a commit.

        Raises:
            UnsupportedError: weights were exchanged, so that a commit would not have what the model computes with.
            StorageError: its files cannot be written.
        """
        self._check_weights()
        given = self._optimizer.param_groups
        groups = [{**group, "params": [self._index_of[id(param)] for param in group["params"]]} for group in given]
        try:
            self._committer.publish(step, self._model, scalars, groups, extra, self._kernel.kept_own)
        except OSError as error:
            file = error.filename or str(self.folder.commits)
            raise StorageError("commit", file, 0, 0, error.errno) from error

    @property
    def resuming(self) -> bool:
        """Whether this run continues one that has a commit."""
        return self._found is not None

    @property
    def resumed_extra(self) -> dict[str, Any]:
        """The `extra` of the commit that this run resumed from."""
        return self.resumed.extra if self.resumed else {}

    def _moved(self, page: Page, ticket: Ticket, path: int, retries: int, error: Exception | None) -> None:
        self.ledger.moved(
            ticket.op.value,
            page.role.value,
            path,
            ticket.length,
            ticket.completed - ticket.submitted,
            retries,
            error,
        )
        if self.timeline is not None and error is None:
            started, ended = ticket.submitted, ticket.completed
            self.timeline.moved(ticket.op.value, path, page.index, ticket.length, started, ended)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that opened the run: one that was forked from it ends nothing."""
        return os.getpid() == self._process

    def end(self) -> None:
        """Release files and memory; the folders stay, and stay locked. Raises what first went wrong."""
        end_all(*self._closers, *reversed(self._own), self._write_timeline)

    def abandon(self, error: BaseException) -> None:
        """End a run that did not come to its start because of `error`: what it has made goes, what was there stays.

        What goes on with other pages commits before it has started. If this rank has published its part, others may
        know a commit of all: it stays.
        """
        end_all(self.end, partial(self._give_up, remove=not self.resuming), cause=error)

    def _has_published(self) -> bool:
        """Whether a manifest of this rank is there, be it of a commit of which this rank does not know how it ended."""
        return any(name.rank == self.ranks.rank for name in published_in(self.folder.commits))

    @property
    def says_lost_steps(self) -> bool:
        """Whether this rank tells which steps were never committed: one does, unless nothing was to be kept."""
        return self.ranks.rank == 0 and self.settings.run.keep != "never"

    def close(self, *, committed: bool) -> None:
        """Release files, memory and lock; remove the run when nothing of it is to be kept.

        Raises:
            StallError: a device does not answer; the folder stays locked until this process ends.
        """
        live.remove(self)
        keep = self.settings.run.keep
        end_all(self.end, partial(self._give_up, remove=keep == "auto" and not committed, always=keep == "never"))

    def _give_up(self, *, remove: bool, always: bool = False) -> None:
        """Give the folders back. What this rank has in them goes too: if it has published nothing, or `always`."""

        def unmake() -> None:
            if always or (remove and not self._has_published()):
                self.folder.remove_rank(self.ranks.rank, commits=self.ranks.local_rank == 0)

        if not self._stalled:
            end_all(unmake, self._lock.release)

    def _close_engine(self) -> None:
        try:
            self.engine.close()
        except StallError:
            self._stalled = True
            raise

    def _close_arena(self) -> None:
        if not self._stalled:
            self.arena.close()

    def _write_timeline(self) -> None:
        if self.timeline is not None:
            try:
                self.timeline.write()
            except OSError as error:
                _log.warning("no timeline in %s: %s", self.timeline.file, error.strerror)


@contextmanager
def _naming_limit() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise ConfigError(
            f"this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files open, which is too few; "
            "raise the limit (ulimit -n)"
        ) from error


def _idle_cores(ranks: Ranks) -> int:
    """Return how many cores of this rank's share of the node torch does not compute on."""
    return len(os.sched_getaffinity(0)) // ranks.local_world_size - torch.get_num_threads()


def _first_values(
    sharded: ShardedModel, initialiser: ModuleInitialiser, weights: str | os.PathLike[str] | None, strict: bool
) -> FirstValues:
    if not sharded.on_meta:
        return OwnValues()
    if weights is None:
        return initialiser
    return DcpFolder(weights) if DcpFolder.is_at(weights) else PretrainedFolder(weights, initialiser, strict=strict)


def _whole(member: Member) -> TensorSpec:
    rank, size = private.shard_rank_and_size(member.param)
    return TensorSpec(
        names=member.names,
        shape=tuple(private.full_shape(member.param)),
        dim=private.shard_dim(member.param),
        shard_rank=rank,
        shard_size=size,
        tensor_parallel=private.is_tensor_parallel(member.param),
    )


def _report_earlier_runs(paths: tuple[str, ...]) -> None:
    try:
        runs, passed = look_for_runs(paths)
        files = [file for run in runs for root in run.in_order for file in root.glob("*.pages")]
        size = sum(file.stat().st_blocks * 512 for file in files)
    except OSError as error:
        _log.warning("earlier runs in %s cannot be looked at: %s", ", ".join(paths), error.strerror)
        return
    if runs:
        _log.warning(
            "%s holds %d earlier runs (%s): %s; resume with run.resume = \"latest\", or free the space with "
            "`infinity store rm`",
            ", ".join(paths), len(runs), format_size(size), ", ".join(run.run_id for run in runs),
        )  # fmt: skip
    if passed:
        _log.warning("%s", passed_over(passed))


def _say_where(paths: Sequence[str]) -> None:
    """Say of folders that are no drives of their own what that means."""
    try:
        places = [locate(path) for path in paths]
    except OSError:  # what is wrong with it is said by who uses it
        return
    for place in places:
        if place.in_memory:
            _log.warning("storage.paths: %s is in memory (tmpfs): the state takes memory, and ends with it", place.path)
    drives = [place.drive for place in places]
    for drive in dict.fromkeys(drives):
        if drives.count(drive) > 1:
            shared = ", ".join(place.path for place in places if place.drive == drive)
            _log.warning(
                "storage.paths: %s lie on one drive (%s), and are no faster than one folder", shared, drive.name
            )


def _agree_on_shares(settings: Config, ranks: Ranks) -> list[float]:
    """Return the shares of the paths as the first rank of this node has measured them."""
    measured: list[float] | None = None
    if ranks.local_rank == 0:
        measured = path_shares(settings.storage.paths, settings.storage.engine, runtime_dir(settings.telemetry))
    host = socket.gethostname()
    by_host = {name: shares for name, shares in ranks.collect((host, measured)) if shares is not None}
    return by_host.get(host, [1.0] * len(settings.storage.paths))


def _timeline(settings: Config, ranks: Ranks, layout: Layout) -> Timeline | None:
    wanted = settings.telemetry
    if not wanted.timeline:
        return None
    return Timeline(Path(wanted.timeline), rank=ranks.rank, limit=wanted.timeline_events, page_name=layout.page_name)


def _stats_page(settings: Config, ranks: Ranks, run_id: str, engine: str, folders: Sequence[str]) -> Stats:
    """Make the rank's stats page; without a usable folder, one that only this process sees: training goes on."""
    paths = [str(Path(path).resolve()) for path in folders]
    create = partial(
        Stats.create,
        run_id=run_id,
        rank=ranks.rank,
        local_rank=ranks.local_rank,
        world_size=ranks.world_size,
        devices=[f"nvme{index}" for index in range(len(paths))],
        info={
            "version": infinity.__version__,
            "torch_version": torch.__version__,
            "io_engine": engine,
            "paths": json.dumps(paths),
        },
    )
    try:
        return create(runtime_dir(settings.telemetry))
    except ConfigError as error:
        _log.warning("this rank's counters will not reach the daemon: %s", error)
        return create(None)
