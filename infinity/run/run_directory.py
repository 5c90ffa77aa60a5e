"""Management of a run's folders on the NVMe paths: locking, choosing the checkpoint to resume from, and removal."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from infinity.checkpoint.description import RunDescription
from infinity.checkpoint.held import HeldCheckpoint
from infinity.checkpoint.manifest import Manifest, published_in, read_manifest
from infinity.checkpoint.mirror import Mirror
from infinity.checkpoint.parts import located, replicas
from infinity.checkpoint.publish import NoCheckpointError, choose_run, find_checkpoints, list_checkpoints
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.remote_files import open_files
from infinity.cleanup import Undo, end_all
from infinity.config import Config, is_address, runtime_dir
from infinity.errors import CheckpointError
from infinity.io.block_devices import locate
from infinity.io.probe.targets import PREFIX
from infinity.ranks import Ranks
from infinity.sources.reshard import ReshardSource, folders_of, needs_resharding
from infinity.store.folder import UNKNOWN_RUN, FolderLock, RunFolder, make_paths, unmake_paths
from infinity.store.marker import look_for_runs, new_run_id, passed_over, run_ids
from infinity.store.path_bandwidth import path_stripe_weights
from infinity.units import format_size

_log = logging.getLogger("infinity")


class ClaimedPaths:
    """NVMe paths that this process has locked, and the checkpoint to resume from, before the page layout is known.

    The run is looked for only once, while the paths are locked. `RunDirectory.take` takes over the lock. If the startup
    fails before that, `release` restores the paths to their previous state.
    """

    lock: FolderLock
    run_id: str
    """Id of the run to resume, or of the new run."""

    def __init__(self, settings: Config, ranks: Ranks) -> None:
        """Lock the paths and look for the checkpoint. All ranks must call it together, and all of them fail together.

        Raises:
            ConfigError: if a path cannot be used.
            FolderBusyError: if another live run is using a path.
            CheckpointError: if there is no checkpoint to resume from.
        """
        self.settings, self.ranks = settings, ranks
        self.undo = Undo()
        """Cleanup functions until `RunDirectory.take` has succeeded."""
        self.resumed: RunFolder | None = None
        """Folders of the run to resume, which may be on other paths; None for a new run."""
        self.checkpoints: list[HeldCheckpoint] = []
        """Checkpoints of that run, the last of which is resumed."""
        self.mirrored: CheckpointReader | None = None
        """Checkpoint of a mirror, from which a new run starts; None if the checkpoint is on the paths."""
        try:
            self._claim()
        except BaseException as error:
            self.release(error)
            raise

    def _claim(self) -> None:
        ranks, wanted, paths = self.ranks, self.settings.run, self.settings.storage.paths
        host = socket.gethostname()
        made: list[Path] = []
        ranks.together("making paths", lambda: made.extend(make_paths(paths)), lambda: unmake_paths(made))
        # Paths that any rank created on this node. The last rank to release them removes them.
        made = [path for name, of_rank in ranks.collect((host, made)) if name == host for path in of_rank]
        self.undo.push(partial(unmake_paths, made))

        number = number_on_path(Path(paths[0]), ranks, host)

        def lock_paths() -> FolderLock:
            held = FolderLock.acquire(paths, UNKNOWN_RUN, number, made)
            self.undo.push(held.release)
            if ranks.local_rank == 0:
                _say_where(paths)
            return held

        self.lock = ranks.together("taking the NVMe paths", lock_paths)
        if is_address(wanted.resume):
            found = self._newest_in(wanted.resume)
            if found is None:
                raise CheckpointError(f"the mirror {wanted.resume} contains no complete checkpoint")
            self._open_mirrored(wanted.resume, found)
        else:
            self._find_checkpoints()
        if self.resumed is None:
            self.name_new_run()
        else:
            self._name(self.resumed.run_id)

    def _find_checkpoints(self) -> None:
        """Look for the checkpoint to resume from, on the paths and in the mirror. The newer one is used."""
        wanted, ranks = self.settings.run, self.ranks
        mirrored = None
        if wanted.resume and wanted.mirror:
            mirrored = self._newest_in(wanted.mirror, "" if wanted.resume in ("latest", "auto") else wanted.resume)
        here = reason = ""
        try:
            if resume := choose_run(self._searched, wanted.resume, ranks, wanted.resume_replica):
                self.resumed = self._folders_of(resume)
                self.checkpoints = list_checkpoints(self.resumed, ranks, wanted.resume_step, wanted.resume_replica)
                here = self.checkpoints[-1].name.identity
        except NoCheckpointError as error:
            if mirrored is None:
                raise CheckpointError(str(error)) from None
            reason = str(error)
        if mirrored is not None and mirrored[1].name.identity > here:
            if here:
                reason = f"the checkpoint of step {mirrored[1].name.step} in the mirror is newer"
            if ranks.rank == 0 and reason:
                _log.warning("resuming from the mirror, because %s", reason)
            self.resumed, self.checkpoints = None, []
            self._open_mirrored(wanted.mirror, mirrored)

    def _folders_of(self, run_id: str) -> RunFolder:
        """Return the folders of a run. Raises `NoCheckpointError` on all ranks if a rank does not have all of them."""
        reason, paths = "", self.settings.storage.paths

        def look() -> RunFolder | None:
            nonlocal reason
            try:
                return folders_of(self._searched, run_id, paths)
            except CheckpointError as error:
                reason = str(error)
                return None

        folder = self.ranks.together("finding the run's folders", look)
        if reasons := [each for each in self.ranks.collect(reason) if each]:
            raise NoCheckpointError(reason or reasons[0])
        assert folder is not None
        return folder

    def _newest_in(self, address: str, run_id: str = "") -> tuple[str, HeldCheckpoint] | None:
        """Return the newest checkpoint in a mirror, and its run; ``None`` if it has none."""
        step, replica = self.settings.run.resume_step, self.settings.run.resume_replica
        return self.ranks.on_first(
            "looking for checkpoints in the mirror", lambda: Mirror(address).newest(step, run_id, replica)
        )

    def _open_mirrored(self, address: str, found: tuple[str, HeldCheckpoint]) -> None:
        replica = self.settings.run.resume_replica
        self.mirrored = self.ranks.together("reading the mirror", lambda: Mirror(address).reader(*found, replica))

    @property
    def _searched(self) -> tuple[str, ...]:
        """Paths that may contain the run to resume."""
        return self.settings.run.resume_paths or self.settings.storage.paths

    def name_new_run(self) -> str:
        """Choose the id of a new run, which is newer than all runs on the paths of all ranks. A collective call.

        Call it while the paths are locked, so that no other run starts there.
        """
        there = partial(run_ids, {*self.settings.storage.paths, *self._searched})
        known = set[str]().union(*self.ranks.collect(self.ranks.together("looking for earlier runs", there)))
        known |= {self.mirrored.folder.run_id} if self.mirrored is not None else set()
        self._name(self.ranks.agree(new_run_id(known)))
        return self.run_id

    def _name(self, run_id: str) -> None:
        self.run_id = run_id
        self.ranks.together("writing the lock files", partial(self.lock.name, run_id))

    def page_bytes(self) -> int:
        """Return the page size of the checkpoint to resume from, or 0 if there is none. A collective call.

        A different page size would require copying the state to a new run. If a rank has no part of the checkpoint, the
        state is copied anyway, and all ranks use the same page size, so that replicas can be compared. If a manifest
        cannot be read, `RunDirectory.take` reports the error.
        """
        if self.mirrored is not None:
            return self.mirrored.first.layout.page_bytes
        own = 0
        if self.resumed is not None and self.ranks.rank in self.checkpoints[-1].holders.get(self.ranks.rank, ()):
            with suppress(OSError, CheckpointError):
                manifest = self.checkpoints[-1].name.of(self.ranks.rank).file_name
                own = read_manifest(self.resumed.checkpoints / manifest).layout.page_bytes
        everywhere = self.ranks.collect(own)
        return own if all(everywhere) else next(filter(None, everywhere), 0)

    def release(self, cause: BaseException) -> None:
        """Release the lock and restore the paths, unless `RunDirectory.take` has taken them over."""
        end_all(*self.undo.take(), cause=cause)


class RunDirectory:
    """The folders of a run, locked by this process.

    There are three kinds of runs. A new run has neither `checkpoints` nor `source`. A resumed run continues in the
    folders of its own `checkpoints`. A run whose layout differs from its checkpoint's layout starts in new folders,
    from the values of that checkpoint (`source`). `give_up` releases the lock and removes folders that contain no
    checkpoint.
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
        """Run id, and the run's folders on the NVMe paths."""
        self.stripe_weights = stripe_weights
        """Relative fraction of the pages on each path, proportional to the path's bandwidth."""
        self.checkpoints = checkpoints
        """This rank's manifests of the run's own checkpoints, the last of which is resumed. Empty for a new run."""
        self.source = source
        """Checkpoint of another run that provides the initial values and the training progress, or None."""
        self._lock, self._ranks = lock, ranks

    @property
    def found(self) -> Manifest | None:
        """Manifest of the run's own checkpoint to resume from, or None."""
        return self.checkpoints[-1] if self.checkpoints else None

    @property
    def continued(self) -> Manifest | CheckpointReader | None:
        """Checkpoint from which training continues, of this run or of another one; None for a new run."""
        return self.found or (self.source.reader if self.source is not None else None)

    @property
    def paths(self) -> list[str]:
        """The NVMe paths, in the order of the run's folders."""
        return [str(root.parent) for root in self.folder.roots]

    @classmethod
    def take(cls, claimed: ClaimedPaths, described: RunDescription, optimizer: str) -> RunDirectory:
        """Take over the locked paths, and choose the folders of the run.

        All ranks must call it together, and if one rank fails, all of them fail. After an error, `claimed` must be
        released.

        Raises:
            CheckpointError: if the checkpoint belongs to a different model.
        """
        settings, ranks, lock, undo = claimed.settings, claimed.ranks, claimed.lock, claimed.undo
        paths, there = settings.storage.paths, claimed.checkpoints
        folder = RunFolder.of(paths, claimed.run_id)
        source = ReshardSource(claimed.mirrored, ranks) if claimed.mirrored is not None else None
        if (roots := claimed.resumed) is not None:
            if {root.resolve() for root in roots.roots} == {root.resolve() for root in folder.roots}:
                folder = roots  # in the run's own order, which may differ from the order in the settings
            replica = settings.run.resume_replica
            if not needs_resharding(roots, folder, there[-1], described, ranks, replica):
                checkpoints = find_checkpoints(folder, ranks, described.layout, optimizer, there)
                undo.take()
                return cls(folder, lock, ranks, list(checkpoints[-1].stripe_weights), checkpoints, None)
            access = open_files(roots, ranks, there[-1])
            undo.push(access.close)
            read = partial(CheckpointReader, roots, there[-1], replica=replica, access=access)
            reader = ranks.together("reading the checkpoint", read)
            source = ReshardSource(reader, ranks)
            if ranks.rank == 0:
                _log.warning(
                    "run %s has %s, so its state is copied to a new run; the old run occupies space until you run "
                    "`infinity store rm %s`",
                    roots.run_id, _difference(there[-1], reader, ranks, replica), roots.run_id,
                )  # fmt: skip
            folder = RunFolder.of(paths, claimed.name_new_run())
        undo.push(partial(folder.remove_rank, ranks.rank, checkpoints=ranks.local_rank == 0))
        if ranks.local_rank == 0 and roots is None:
            _report_earlier_runs(paths)
        stripe_weights = _agree_on_stripe_weights(settings, ranks)
        undo.take()
        return cls(folder, lock, ranks, stripe_weights, [], source)

    def give_up(self, *, remove: bool, always: bool = False) -> None:
        """Release the lock and, depending on the arguments, remove this rank's files.

        Args:
            remove: whether to remove the files if this rank has published no part of a checkpoint. A published part is
                kept, because other ranks may know of a complete checkpoint.
            always: whether to remove the files in any case.
        """

        def unmake() -> None:
            published = any(name.rank == self._ranks.rank for name in published_in(self.folder.checkpoints))
            if always or (remove and not published):
                self.folder.remove_rank(self._ranks.rank, checkpoints=self._ranks.local_rank == 0)

        end_all(*([self.source.close] if self.source is not None else []), unmake, self._lock.release)


def _difference(checkpoint: HeldCheckpoint, reader: CheckpointReader, ranks: Ranks, replica: int) -> str:
    """Return the reason why the state must be copied, for a message."""
    if checkpoint.name.world_size == ranks.world_size:
        parts = reader.first.parts
        if replica >= 0 and len(replicas(parts)) > 1:
            return f"several replicas, of which run.resume_replica chooses {located(parts, reader.sources)}"
        if checkpoint.absent:
            computed = checkpoint.computed.keys() & set(reader.sources)
            source = "which are computed from copies" if computed else "which other ranks also hold"
            return f"lost the files of {located(parts, checkpoint.absent)}, {source}"
        moved = [rank for rank in range(ranks.world_size) if rank not in checkpoint.holders[rank]]
        if moved:
            return (
                f"the files of {located(parts, moved)}, where other ranks run now (torchrun with --node-rank keeps the "
                "order of the nodes)"
            )
    return "a different page layout (ranks, device mesh, paths, page size or dtype)"


def number_on_path(path: Path, ranks: Ranks, host: str) -> int:
    """Return the number of lower ranks that use the same folder, which may be on a file system that nodes share.

    Each rank creates a file and looks for the files of lower ranks by their names, because the listing of a folder on a
    network file system may be outdated.
    """
    there = ranks.collect((host, f"{PREFIX}{secrets.token_hex(8)}"))
    if all(name == host for name, _ in there):
        return ranks.local_rank
    mine = path / there[ranks.rank][1]
    try:
        ranks.together("looking for other ranks in the same folder", lambda: mine.touch(0o600))
        seen = [(path / name).exists() for _, name in there[: ranks.rank]]
        ranks.collect(None)  # a rank must not remove its file before the others have looked for it
    finally:
        mine.unlink(missing_ok=True)
    return sum(seen)


def _report_earlier_runs(paths: tuple[str, ...]) -> None:
    try:
        runs, passed = look_for_runs(paths)
        files = [file for run in runs for root in run.in_order for file in root.glob("*.pages")]
        size = sum(file.stat().st_blocks * 512 for file in files)
    except OSError as error:
        _log.warning("cannot look for earlier runs in %s: %s", ", ".join(paths), error.strerror)
        return
    if runs:
        _log.warning(
            "%s contains %d earlier run%s (%s): %s; resume with run.resume = \"latest\", or free the space with "
            "`infinity store rm`",
            ", ".join(paths), len(runs), "s" * (len(runs) > 1), format_size(size),
            ", ".join(run.run_id for run in runs),
        )  # fmt: skip
    if passed:
        _log.warning("%s", passed_over(passed))


def _say_where(paths: Sequence[str]) -> None:
    """Warn about paths that are in memory, and about paths that share a drive."""
    try:
        places = [locate(path) for path in paths]
    except OSError:  # reported when the path is used
        return
    for place in places:
        if place.in_memory:
            _log.warning(
                "storage.paths: %s is in memory (tmpfs or ramfs), so the state uses host memory and is lost on reboot",
                place.path,
            )
    drives = [place.drive for place in places]
    for drive in dict.fromkeys(drives):
        if drives.count(drive) > 1:
            shared = ", ".join(place.path for place in places if place.drive == drive)
            _log.warning(
                "storage.paths: %s are on the same drive (%s), which is no faster than a single path",
                shared,
                drive.name,
            )


def _agree_on_stripe_weights(settings: Config, ranks: Ranks) -> list[float]:
    """Return the stripe weights of the paths, as measured by the first rank on this node."""
    storage, runtime = settings.storage, runtime_dir(settings.telemetry)
    measure = partial(path_stripe_weights, storage.paths, storage.engine, runtime)
    return ranks.once_per_node(measure, otherwise=[1.0] * len(storage.paths))
