"""Where a run lies: its folders on the NVMe paths, held by this process, and what it goes on from."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from infinity.checkpoint.manifest import Manifest, choose_checkpoint, published_in, read_manifest
from infinity.checkpoint.publish import choose_run, find_checkpoints, list_checkpoints
from infinity.checkpoint.reader import CheckpointReader
from infinity.cleanup import Undo, end_all
from infinity.config import Config, runtime_dir
from infinity.content.layout import Layout
from infinity.errors import CheckpointError, InfinityError, LostRankError
from infinity.io.block_devices import locate
from infinity.ranks import Ranks
from infinity.sources.reshard import ReshardSource, folders_of, lies_otherwise
from infinity.store.folder import FolderLock, RunFolder, make_paths, unmake_paths
from infinity.store.marker import look_for_runs, new_run_id, passed_over
from infinity.store.path_bandwidth import path_stripe_weights
from infinity.units import MIB, format_size

_LEAST_RATE = float(MIB)
"""A share that is smaller is no rate of a drive in bytes per second: equal shares, where nothing was measured."""
_log = logging.getLogger("infinity")


class RunDirectory:
    """The folders of a run, and the lock that this process has on them.

    A run is *new*, *goes on* where its own checkpoints lie (`checkpoints`), or begins with what a checkpoint has that
    lies
    otherwise (`source`). The lock is held until `give_up`; folders that hold nothing to go on from are removed then.
    """

    def __init__(
        self,
        folder: RunFolder,
        lock: FolderLock,
        ranks: Ranks,
        stripe_weights: list[float],
        checkpoints: list[Manifest],
        source: ReshardSource | None,
    ) -> None:
        self.folder = folder
        """Its id, and its folders on the NVMe paths."""
        self.stripe_weights = stripe_weights
        """How much of the pages each path is to hold, relative to the others: as their bandwidths are."""
        self.checkpoints = checkpoints
        """This rank's manifests of the run's own checkpoints, the one to resume from last; none for a new run."""
        self.source = source
        """The checkpoint of another run whose values and progress this one begins with, if it does."""
        self._lock, self._ranks = lock, ranks

    @property
    def found(self) -> Manifest | None:
        """The checkpoint of this run that it resumes from."""
        return self.checkpoints[-1] if self.checkpoints else None

    @property
    def rates(self) -> list[float]:
        """Bytes per second of the paths, as far as the shares are such; 0 where they were not measured."""
        return [stripe_weight if stripe_weight > _LEAST_RATE else 0.0 for stripe_weight in self.stripe_weights]

    @property
    def paths(self) -> list[str]:
        """The NVMe paths, in the order of the run's folders."""
        return [str(root.parent) for root in self.folder.roots]

    @classmethod
    def take(cls, settings: Config, ranks: Ranks, layout: Layout, optimizer: str) -> RunDirectory:
        """Take the paths and find what to resume from; all ranks together: where one fails, all fail, with its reason.

        What was there before is there still then, and nothing else.

        Args:
            layout: of this rank.
            optimizer: name of its class.

        Raises:
            ConfigError: a path cannot be used. FolderBusyError: another live run owns one.
            CheckpointError: there is nothing to resume from, or what there is belongs to another model.
        """
        undo = Undo()
        try:
            return cls._take(settings, ranks, layout, optimizer, undo)
        except BaseException as error:
            end_all(*undo.take(), cause=error)
            raise

    @classmethod
    def _take(cls, settings: Config, ranks: Ranks, layout: Layout, optimizer: str, undo: Undo) -> RunDirectory:
        paths, wanted = settings.storage.paths, settings.run
        old_paths = wanted.resume_paths or paths
        host = socket.gethostname()
        made: list[Path] = []
        ranks.together("making paths", lambda: made.extend(make_paths(paths)), lambda: unmake_paths(made))
        # On this node, by whatever rank: the last one that leaves them removes them.
        made = [path for name, of_rank in ranks.collect((host, made)) if name == host for path in of_rank]
        undo.push(partial(unmake_paths, made))
        resume = choose_run(old_paths, wanted.resume, ranks)
        run_id = resume or ranks.agree(new_run_id())

        def lock_paths() -> FolderLock:
            held = FolderLock.acquire(paths, run_id, ranks.local_rank, made)
            undo.push(held.release)
            if ranks.local_rank == 0:
                _say_where(paths)
            return held

        lock = ranks.together("taking the NVMe paths", lock_paths)
        folder = RunFolder.of(paths, run_id)
        source: ReshardSource | None = None
        if resume:
            roots = ranks.together("finding the run's folders", lambda: folders_of(old_paths, run_id, paths))
            if {root.resolve() for root in roots.roots} == {root.resolve() for root in folder.roots}:
                folder = roots  # in the run's own order, whatever that of the settings is
            there = list_checkpoints(roots, ranks, wanted.resume_step)
            if not lies_otherwise(roots, folder, there[-1], layout, ranks):
                checkpoints = find_checkpoints(folder, ranks, layout, optimizer, there)
                return cls(folder, lock, ranks, list(checkpoints[-1].weights), checkpoints, None)
            reader = ranks.together("reading the checkpoint", lambda: CheckpointReader(roots, there[-1]))
            source = ReshardSource(reader, ranks)
            if ranks.rank == 0:
                _log.warning(
                    "the pages of run %s lie otherwise (other ranks, paths, page size or dtype): they are written "
                    "anew, as another run; the old one keeps its space until `infinity store rm %s`", resume, resume,
                )  # fmt: skip
            folder = RunFolder.of(paths, ranks.agree(new_run_id()))
            lock.name(folder.run_id)
        undo.push(partial(folder.remove_rank, ranks.rank, checkpoints=ranks.local_rank == 0))
        if ranks.local_rank == 0 and not resume:
            _report_earlier_runs(paths)
        return cls(folder, lock, ranks, _agree_on_stripe_weights(settings, ranks), [], source)

    def give_up(self, *, remove: bool, always: bool = False) -> None:
        """Give the folders back. What this rank has in them goes too: if it has published nothing, or `always`.

        If it has published its part of a checkpoint, others may know one of all ranks: it stays.
        """

        def unmake() -> None:
            published = any(name.rank == self._ranks.rank for name in published_in(self.folder.checkpoints))
            if always or (remove and not published):
                self.folder.remove_rank(self._ranks.rank, checkpoints=self._ranks.local_rank == 0)

        end_all(unmake, self._lock.release)


def page_bytes_of_checkpoint(settings: Config, ranks: Ranks) -> int:
    """Return the page size of this rank's part of the checkpoint to go on from; 0 where there is none. All ranks
    together.

    Pages of another size would be written anew, as another run beside it. What is wrong is said by `RunDirectory.take`.
    """
    paths = settings.run.resume_paths or settings.storage.paths
    try:
        run_id = choose_run(paths, settings.run.resume, ranks)
    except LostRankError:
        raise
    except InfinityError:  # on all ranks
        return 0
    with suppress(OSError, CheckpointError):
        here = [run.roots[0] for run in look_for_runs(paths)[0] if run.run_id == run_id and 0 in run.roots]
        for folder in (root / "checkpoints" for root in here):
            own = [name for name in published_in(folder) if name.rank == ranks.rank]
            newest = choose_checkpoint(run_id, [name.checkpoint for name in own], settings.run.resume_step)
            return read_manifest(folder / newest.of(ranks.rank).file_name).layout.page_bytes
    return 0


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
            "%s holds %d earlier run%s (%s): %s; resume with run.resume = \"latest\", or free the space with "
            "`infinity store rm`",
            ", ".join(paths), len(runs), "s" * (len(runs) > 1), format_size(size),
            ", ".join(run.run_id for run in runs),
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
            _log.warning(
                "storage.paths: %s is in memory (tmpfs or ramfs): the state takes memory, and ends with it", place.path
            )
    drives = [place.drive for place in places]
    for drive in dict.fromkeys(drives):
        if drives.count(drive) > 1:
            shared = ", ".join(place.path for place in places if place.drive == drive)
            _log.warning(
                "storage.paths: %s lie on one drive (%s), and are no faster than one folder", shared, drive.name
            )


def _agree_on_stripe_weights(settings: Config, ranks: Ranks) -> list[float]:
    """Return the shares of the paths as the first rank of this node has measured them."""
    storage, runtime = settings.storage, runtime_dir(settings.telemetry)
    measure = partial(path_stripe_weights, storage.paths, storage.engine, runtime)
    return ranks.once_per_node(measure, otherwise=[1.0] * len(storage.paths))
