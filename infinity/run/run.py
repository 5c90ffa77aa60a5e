"""`Run`: the components that page a rank's state, from the host cache to the pager, and the connection to its peers."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

import infinity
from infinity.budget import Budget
from infinity.checkpoint.publish import repeated
from infinity.cleanup import Undo, end_all
from infinity.config import Config, runtime_dir
from infinity.content.format import Role
from infinity.content.layout import Layout, Page
from infinity.daemon_client import NodeDaemon
from infinity.errors import ConfigError, InfinityError, StallError
from infinity.heap import FreedMemory
from infinity.io import Engine, PacedEngine, Ticket, open_engine
from infinity.memory.cgroups import cores_of_groups
from infinity.memory.device import open_device
from infinity.memory.host_cache import HostCache
from infinity.optim.planning import StepPlanner
from infinity.optim.update_thread import UpdateWorker
from infinity.peer_failures import Peers
from infinity.processor import share_of_cores
from infinity.ranks import Ranks
from infinity.run.pacing import Pacing
from infinity.run.run_directory import RunDirectory
from infinity.run.space_reservation import FileSpace, UnnamedSpace
from infinity.run.update_device import choose_update_device
from infinity.schedule.activation_pages import ActivationPages, ActivationTraffic
from infinity.schedule.pager import Pager
from infinity.schedule.planner import Plan
from infinity.schedule.transfers import Transfers
from infinity.store.extents import SPARE_SLOTS
from infinity.store.folder import RunFolder
from infinity.store.page_store import PageStore, hash_threads, lay_out
from infinity.telemetry import Stats
from infinity.telemetry.ledger import Ledger
from infinity.telemetry.stats_file import MAX_HOSTS
from infinity.telemetry.timeline import Timeline

_log = logging.getLogger("infinity")
_NOT_HERE = (
    "this process was forked from the training process, which owns the weights and optimizer state. Pass only plain "
    "tensors to worker processes, and create the tensors before the workers start."
)


class Run:
    """State of a run from `offload` to `close`.

    All ranks must open it together. Each component is created from the components that it depends on and registers its
    cleanup in `undo`, as do the layers above, such as the hooks on the model. `close`, or `abandon` after a failed
    startup, releases everything in reverse order.

    The attributes `folder`, `layout`, `host_bytes`, `plan`, `stats` (counters) and `ledger` (time and bytes per step)
    are public for inspection.
    """

    def __init__(
        self,
        settings: Config,
        ranks: Ranks,
        peers: Peers,
        budget: Budget,
        directory: RunDirectory,
        device: torch.device,
        *,
        exchanges: bool = False,
    ) -> None:
        """Open the run.

        Args:
            peers: the other ranks. This rank leaves them when the run ends, or if this constructor raises an error.
            directory: locked folders of the run. The caller releases them if this constructor raises an error.
            device: compute device.
            exchanges: whether ranks exchange data during updates.

        Raises:
            BudgetError, StorageError: if there is not enough space.
            ConfigError: if the I/O engine cannot be used or the limit on open files is too low.
            InfinityError: if another rank failed. Everything that was opened is released.
        """
        self.settings, self.ranks, self.directory = settings, ranks, directory
        self._exchanges = exchanges
        self.layout: Layout = budget.layout
        self.undo = Undo()
        """Cleanup functions of all open components."""
        self.check_not_forked: list[Callable[[str], object]] = []
        """Callbacks that disable components in a forked child process. They receive the reason."""
        self._process = os.getpid()  # the process that opened the run
        # Set if a drive or device does not respond: memory and files that it may still access are not released.
        self._stalled = False
        self.device = open_device(device)
        cores, computing = _cores(ranks), torch.get_num_threads()
        self.update_cores = settings.update.thread_cores(device.type, cores=cores, computing=computing)
        """Number of cores of the update thread; 0 if updates run on the training thread."""
        self.hashers = hash_threads(cores - self.update_cores - (computing if device.type == "cpu" else 1))
        """Number of checksum threads per direction, which run on idle cores; 0 if no cores are idle."""
        self.freed = FreedMemory()
        """Limits the amount of freed memory that the C library retains."""
        self.undo.push(self.freed.close)
        self.peers = peers
        """The other ranks. A failure on one rank ends the run on all ranks."""
        try:
            with peers.starting():
                ranks.together("opening the run", partial(self._open, budget))
                self.updates_on_device = ranks.agree(
                    ranks.together("choosing where updates run", self._choose_update_device)
                )
                """``True`` if pages are updated on the compute device, ``False`` if they are updated on the host."""
            self.planner.update_on_device = self.updates_on_device
        except BaseException as error:
            end_all(*self.undo.take(), cause=error)
            raise
        self.peers.tell(self.pager.fail)

    @property
    def folder(self) -> RunFolder:
        """Run id, and the run's folders on the NVMe paths."""
        return self.directory.folder

    @property
    def keeps_companions(self) -> bool:
        """``True`` if this rank stores the files for exports. With copies on other nodes, any node may be lost."""
        return self.ranks.rank == 0 or (bool(self.settings.run.copies) and self.ranks.local_rank == 0)

    @property
    def update_device(self) -> str:
        """Type of the device on which pages are updated: ``cpu``, or the type of the compute device."""
        return self.device.name.type if self.updates_on_device else "cpu"

    @property
    def plan(self) -> Plan | None:
        """The current plan; None until the first step has been recorded."""
        return self.planner.plan

    @property
    def activation_traffic(self) -> ActivationTraffic:
        """Bytes of activations transferred to and from NVMe in the last step."""
        return self.activations.traffic if self.activations is not None else ActivationTraffic()

    @property
    def host_bytes(self) -> int:
        """Size of this rank's host cache, in bytes."""
        return self.host_cache.nbytes

    def _open(self, budget: Budget) -> None:
        settings, layout, folder, checkpoints = self.settings, self.layout, self.folder, self.directory.checkpoints
        with _naming_limit():
            folder.create()
            retained = settings.run.retained_checkpoints
            checkpointed = {checkpoint.step: checkpoint.pages for checkpoint in checkpoints}  # the newest of each step
            in_order = dict(enumerate(checkpoint.pages for checkpoint in checkpoints))
            copied = settings.run.copied_checkpoints
            paths, slots = lay_out(
                layout.pages, self.directory.stripe_weights, in_order, SPARE_SLOTS, retained + copied
            )
            files = [folder.data_file(index, self.ranks.rank) for index in range(len(folder.roots))]
            daemon = NodeDaemon(runtime_dir(settings.telemetry))
            space = FileSpace(daemon, folder.run_id, files)
            space.allocate(slots)
            self.host_cache = host_cache = HostCache(
                budget.cache_slots + budget.activation_cache_slots, layout.page_bytes, device=self.device
            )
            self.undo.push(partial(self._close_host_cache, host_cache))
            moving = open_engine(settings.storage)
            self.engine: Engine = (engine := PacedEngine(moving))
            self.undo.push(partial(self._close_engine, engine))
            self.stats = stats = _stats_file(settings, self.ranks, self.directory, engine.name, self.peers.hosts)
            # Closed last, because the engine updates it. After a step, its final values can still be scraped.
            self.undo.push_under(lambda: stats.close(keep=stats.snapshot().value("steps_total") > 0))
            self.timeline = timeline = _timeline(settings, self.ranks, layout)
            """Recorded events for `telemetry.timeline`; None if it is not set."""
            self.ledger = ledger = Ledger(stats, timeline)
            engine.register(host_cache.memory)
            self.store = store = PageStore(
                layout.pages,
                paths,
                files,
                slots,
                engine,
                space,
                name_of=layout.page_name,
                moved=partial(_book_transfer, ledger, timeline),
                timeout=settings.storage.timeout_seconds,
                spare=SPARE_SLOTS,
                retries=settings.storage.retries,
                checkpointed=checkpointed,
                kept=[checkpoint.pages for checkpoint in repeated(checkpoints)],
                retained=retained,
                hashers=self.hashers,
            )
            self.undo.push(store.close)
            store.reserve_checkpoints(copied)
            store.expect_gradients(True)  # until the first step shows whether gradients are stored
            folders = [str(Path(path).resolve()) for path in self.directory.paths]
            pacing = Pacing(daemon, folder.run_id, folders, [str(file.parent) for file in files], engine.pace)
            self.undo.push(pacing.close)
            capacity = stats.gauge("tier_capacity_bytes", tier="nvme")
            of_activations = stats.gauge("tier_used_bytes", tier="nvme", state=Role.ACTIVATION.value)
            activation_space = (
                UnnamedSpace(daemon, folder, self.ranks.rank) if settings.activations.tier == "nvme" else None
            )
            if activation_space is not None:
                self.undo.push(activation_space.close)

            def changed() -> None:
                extra = activation_space.nbytes if activation_space is not None else 0
                capacity.set(space.nbytes + extra)
                of_activations.set(extra)

            changed()
            space.changed = changed
            if activation_space is not None:
                activation_space.changed = changed
            timeout = settings.storage.timeout_seconds
            cache_slots = host_cache.cache_slots[: budget.cache_slots]
            transfers = Transfers(ledger, timeout=timeout, failed=self.peers.report)
            self.pager = pager = Pager(layout, cache_slots, self.device, store, transfers)
            self.undo.push(partial(self._drain, pager))
            self.activations: ActivationPages | None = None
            """Stores offloaded activations in additional cache slots; None if activations stay on the device."""
            if budget.activation_cache_slots:
                further = host_cache.cache_slots[budget.cache_slots :]
                self.activations = self._open_activations(further, activation_space)
            self.worker = UpdateWorker(self.update_cores, pager.fail, self.device.enter_thread)
            self.undo.push(self.worker.close)
        self.planner = StepPlanner(
            layout, pager, ledger, cache_slots=budget.cache_slots, wanted=settings.update.schedule,
            threaded=self.worker.threaded, exchanges=self._exchanges, device_limit=settings.memory.device_bytes,
        )  # fmt: skip
        for role in set(Role) - {Role.ACTIVATION}:
            stats.gauge("tier_used_bytes", tier="nvme", state=role.value).set(layout.bytes_of(role))
        stats.gauge("tier_capacity_bytes", tier="host").set(host_cache.nbytes)

    def _open_activations(self, slots: Sequence[memoryview], space: UnnamedSpace | None) -> ActivationPages:
        """Create the pages for activations, in cache slots and, if `space` is given, in files."""
        store, settings = None, self.settings.storage
        if space is not None:
            store = PageStore(
                (),
                (),
                space.files,
                (),
                self.engine,
                space,
                name_of=lambda page: f"activations/{Role.ACTIVATION.value}[{page}]",
                moved=partial(_book_transfer, self.ledger, None),
                timeout=settings.timeout_seconds,
                spare=SPARE_SLOTS,
                retries=settings.retries,
                retained=0,
                hashers=self.hashers,
            )
            space.unname()
            self.undo.push(store.close)
        activations = ActivationPages(
            slots, self.layout.page_bytes, self.device, store, self.directory.stripe_weights, self.pager.transfers
        )
        self.undo.push(partial(self._drain, activations))
        return activations

    def _choose_update_device(self) -> bool:
        """Return whether pages are updated on the device, and log the reason."""
        continued = self.directory.continued
        before = continued.updated_on if continued is not None else None
        on_device, why = choose_update_device(
            self.settings, self.device, self.layout, self.worker, before, exchanges=self._exchanges
        )
        if self.device.asynchronous and self.ranks.rank == 0:
            _log.info("updates run on the %s: %s", self.device.name.type if on_device else "cpu", why)
        return on_device

    @property
    def is_here(self) -> bool:
        """``True`` if this process opened the run. A forked child process must not close it."""
        return os.getpid() == self._process

    def leave_to_parent(self) -> None:
        """Disable the run in a forked child process: it releases no resources and rejects all calls.

        Threads, drives and counters belong to the parent, so the child could only hang or interfere with the parent.
        """
        self.pager.transfers.leave_to_parent(InfinityError(_NOT_HERE))
        for refuse in self.check_not_forked:
            refuse(_NOT_HERE)

    def abandon(self, error: BaseException) -> None:
        """End a run whose startup failed with `error`.

        Files that the startup created are removed; earlier files are kept.
        """
        if self.is_here:
            self._release(error, remove=self.directory.found is None)

    def close(self, cause: BaseException | None, *, checkpointed: bool, suspend: bool = False) -> None:
        """Release files, memory and the folder lock, and remove the run if its files are not kept.

        Args:
            cause: reason why the run ends early, or None. It also ends the other ranks.
            checkpointed: whether the run has a checkpoint to resume from.
            suspend: whether to keep the files in any case, because this process resumes the run.

        Raises:
            StallError: if a device does not respond. The folder stays locked until this process exits.
            Exception: the first error during cleanup, if `cause` is None.
        """
        keep = self.settings.run.keep
        remove = not suspend and keep == "auto" and not checkpointed
        self._release(cause, remove=remove, always=not suspend and keep == "never")

    def _release(self, cause: BaseException | None, *, remove: bool, always: bool = False) -> None:
        def give_up() -> None:
            if not self._stalled:
                self.directory.give_up(remove=remove, always=always)

        end_all(partial(self.peers.leave, cause), *self.undo.take(), self._write_timeline, give_up, cause=cause)

    def _drain(self, pages: Pager | ActivationPages) -> None:
        if not pages.drain():
            self._stalled = True

    def _close_engine(self, engine: Engine) -> None:
        try:
            engine.close()
        except StallError:
            self._stalled = True
            raise

    def _close_host_cache(self, host_cache: HostCache) -> None:
        if not self._stalled:
            host_cache.close()

    def _write_timeline(self) -> None:
        if self.timeline is not None:
            try:
                self.timeline.write()
            except OSError as error:
                _log.warning("telemetry.timeline: cannot write %s: %s", self.timeline.file, error.strerror)


def _book_transfer(
    ledger: Ledger,
    timeline: Timeline | None,
    page: Page,
    ticket: Ticket,
    path: int,
    retries: int,
    error: Exception | None,
) -> None:
    started, ended = ticket.submitted, ticket.completed
    ledger.moved(ticket.op.value, page.role.value, path, ticket.length, ended - started, retries, error)
    if error is None and timeline is not None:
        timeline.moved(ticket.op.value, path, page.index, ticket.length, started, ended)


@contextmanager
def _naming_limit() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise ConfigError(
            f"the limit of {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open files per process is too low. Raise it "
            "with ulimit -n."
        ) from error


def _timeline(settings: Config, ranks: Ranks, layout: Layout) -> Timeline | None:
    wanted = settings.telemetry
    if not wanted.timeline:
        return None
    return Timeline(Path(wanted.timeline), rank=ranks.rank, limit=wanted.timeline_events, page_name=layout.page_name)


def _stats_file(settings: Config, ranks: Ranks, directory: RunDirectory, engine: str, hosts: Sequence[str]) -> Stats:
    """Create this rank's stats file. If there is no usable folder, the counters stay private to this process."""
    paths = [str(Path(path).resolve()) for path in directory.paths]
    continued = directory.continued
    distinct = tuple(dict.fromkeys((hosts[ranks.rank], *hosts)))  # beginning with this host
    create = partial(
        Stats.create,
        run_id=directory.folder.run_id,
        rank=ranks.rank,
        local_rank=ranks.local_rank,
        world_size=ranks.world_size,
        devices=[f"nvme{index}" for index in range(len(paths))],
        info={
            "version": infinity.__version__,
            "torch_version": torch.__version__,
            "io_engine": engine,
            "paths": json.dumps(paths),
            "hosts": json.dumps(distinct[:MAX_HOSTS]),
            "weight": str(settings.storage.bandwidth_weight),
            "name": settings.run.name,
            "steps_before": str(continued.step if continued is not None else 0),
        },
    )
    try:
        return create(runtime_dir(settings.telemetry))
    except ConfigError as error:
        _log.warning("this rank's counters are not published to infinityd: %s", error)
        return create(None)


def _cores(ranks: Ranks) -> int:
    """Return this rank's share of the node's cores. All ranks must call it together."""
    host, mine = socket.gethostname(), os.sched_getaffinity(0)
    of_node = [cores for name, cores in ranks.collect((host, mine)) if name == host]
    return share_of_cores(mine, of_node, cores_of_groups())
