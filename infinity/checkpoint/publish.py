"""Publishing a checkpoint and resuming from one.

[Note: the publish protocol] The pages are already in free extents; a checkpoint flushes what is modified, calls
fdatasync, and writes the manifest under a temporary name, flushed and renamed. Only when every rank has
published are the versions of the oldest checkpoint freed and its manifest removed. So at any instant there is
a checkpoint that all ranks hold, and resuming takes the newest such checkpoint. All ranks give a checkpoint the same
identity,
which is in its files' names: a step that is checkpointed again does not replace what was there before all have it.

[Note: withdrawing] Where it is known that a checkpoint failed on a rank, what each has published is removed, for good,
before a page of it is written over. Where a rank does not know how it ended (the exchange was interrupted, or others
were lost), they may have gone on and removed the checkpoint before: it leaves both, and the next start takes that of
all.
The pages of a checkpoint are out of use until what became of its files is settled, by its end or by that of a later
one.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint import manifest as files
from infinity.checkpoint import model_state
from infinity.checkpoint.description import RunDescription
from infinity.checkpoint.durable import write_durably
from infinity.checkpoint.manifest import CheckpointName, Manifest
from infinity.checkpoint.model_state import ResumedState
from infinity.checkpoint.reserved_space import CheckpointSpace
from infinity.content.format import Role
from infinity.content.layout import Layout
from infinity.errors import CheckpointError
from infinity.ranks import Ranks
from infinity.store.folder import RunFolder
from infinity.store.marker import look_for_runs, passed_over
from infinity.store.page_store import PageStore, Version
from infinity.untrusted_files import sync_folder

_log = logging.getLogger(__name__)


class CheckpointWriter:
    """Publishes checkpoints of one rank.

    The life of a checkpoint: its versions are *kept* (no write takes their extents); data files are synced, state file
    and
    manifest written; it is *published* when all ranks say so (`Ranks.together`), *adopted* when older ones are removed
    for good, and removed when it is no longer among the retained. One that fails on a rank is withdrawn on all.
    [Note: withdrawing] Used by the training thread alone.
    """

    def __init__(
        self,
        folder: RunFolder,
        ranks: Ranks,
        described: RunDescription,
        store: PageStore,
        optimizer: str,
        stripe_weights: list[float],
        found: Sequence[Manifest],
        room: CheckpointSpace,
        updated_on: str,
    ) -> None:
        """Go on from the checkpoints that are there.

        Args:
            folder: of the run.
            ranks: of the run; all call the same methods in the same order.
            described: what the pages of this rank hold.
            store: of the pages.
            optimizer: name of its class.
            shares: of the paths, relative bandwidths.
            found: this rank's manifests of the checkpoints that are kept, by step.
            room: for the files of checkpoints.
            updated_on: type of the device that updates run on.
        """
        # None of these changes.
        self._folder, self._ranks, self._described, self._store = folder, ranks, described, store
        self._room, self._updated_on = room, updated_on
        self._optimizer, self._stripe_weights = optimizer, stripe_weights
        self._pages = [page.index for page in described.layout.pages if page.role is not Role.GRAD]
        """What is checkpointed: gradients are not."""
        self._checkpoints = {manifest.step: manifest.name.checkpoint for manifest in found}
        """Checkpoints that are kept, by step. Changed by `publish` once the files of the others are gone."""
        self._newest = max((checkpoint.identity for checkpoint in self._checkpoints.values()), default="")
        """The last identity that was tried or published; the next sorts behind it."""
        self._not_flushed: list[Mapping[int, Version]] = []
        """Versions of checkpoints whose files may be there, besides those that are kept. [Note: withdrawing]"""

    def reserve(self) -> None:
        """Hold space for the files of the checkpoints to come. Raises `BudgetError` or `StorageError`."""
        self._room.reserve(self._to_come)

    @property
    def _to_come(self) -> int:
        """Checkpoints for which there is to be space: those that are kept, and one more that is being written."""
        return max(1, self._store.retained + 1 - len(self._checkpoints))

    def close(self) -> None:
        """Give back what is held. Raises `OSError`."""
        self._room.close()

    def publish(
        self,
        step: int,
        model: nn.Module,
        scalars: Mapping[int, Mapping[str, Any]],
        groups: list[dict[str, Any]],
        extra: dict[str, Any],
        own: Mapping[str, Any],
        prefer: Collection[int] = (),
    ) -> None:
        """Make the stored pages and the given state the newest checkpoint of all ranks.

        `prefer` are steps of earlier checkpoints that are kept before newer ones.

        Raises:
            CheckpointError: something cannot be written as plain data.
            StorageError: a device refused.
            InfinityError: it failed on another rank, or that one was lost. In all cases all ranks hold a checkpoint:
                the
                one before or, if all had published when this rank was interrupted or lost the others, the new one.
        """
        self._newest = self._ranks.agree(files.new_identity(self._newest))
        checkpoint = CheckpointName(step, self._newest, self._ranks.world_size)
        versions = self._store.versions(self._pages)
        self._store.keep(versions)
        self._not_flushed.append(versions)

        def write() -> None:
            data = model_state.save_tensors(model)
            manifest = Manifest(
                run_id=self._folder.run_id,
                step=step,
                identity=checkpoint.identity,
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
                created=time.time(),
                description=self._described,
                optimizer=self._optimizer,
                weights=self._stripe_weights,
                pages=versions,
                scalars=model_state.save_scalars(scalars),
                groups=model_state.save_groups(groups),
                random=model_state.save_random(),
                state_checksum=files.checksum_of(data),
                extra=extra,
                own=model_state.save_settings(own),
                updated_on=self._updated_on,
            )
            self._store.sync()
            self._room.hold(self._to_come - 1)
            write_durably(self._folder.checkpoints / manifest.state_file, data)
            files.write_manifest(self._folder.checkpoints, manifest)
            self._room.took(len(data) + (self._folder.checkpoints / manifest.file_name).stat().st_size)

        self._ranks.together(f"checkpoint of step {step}", write, undo=lambda: self._withdraw(checkpoint, versions))
        # Removed for good before a slot is free that it names: a manifest that comes back after a loss of power
        # must not be of pages that were written over.
        kept = {**self._checkpoints, step: checkpoint}
        kept = {step: kept[step] for step in self._store.retained_with(step, prefer)}
        remove_checkpoints(self._folder, self._ranks, keep=kept.values())
        self._checkpoints = kept
        self._store.adopt(step, versions, prefer)
        while self._not_flushed:
            self._store.release(self._not_flushed.pop())
        self._room.hold(self._to_come)

    def _withdraw(self, checkpoint: CheckpointName, versions: Mapping[int, Version]) -> None:
        """Undo what this rank has published of a checkpoint that failed on a rank. [Note: withdrawing]"""
        name = checkpoint.of(self._ranks.rank)
        try:
            for file_name in (name.file_name, name.state_file):
                (self._folder.checkpoints / file_name).unlink(missing_ok=True)
            sync_folder(self._folder.checkpoints)
        except OSError as error:
            _log.warning(
                "%s cannot be removed: %s; its pages are not used before the next checkpoint",
                name.file_name,
                error.strerror,
            )
            return
        self._not_flushed.remove(versions)
        self._store.release(versions)
        self._room.hold(self._to_come)


def remove_checkpoints(folder: RunFolder, ranks: Ranks, *, keep: Iterable[CheckpointName]) -> None:
    """Remove what a rank has published, except of the checkpoints `keep`: manifests first, then the rest, for good."""
    names = [checkpoint.of(ranks.rank) for checkpoint in keep]
    kept = {*(name.file_name for name in names), *(name.state_file for name in names)}
    others = set(fnmatch.filter(files.names_in(folder.checkpoints), f"step*.rank{ranks.rank:05d}[.-]*")) - kept
    for name in sorted(others, key=lambda name: (not name.endswith(".json"), name)):
        (folder.checkpoints / name).unlink(missing_ok=True)
    if others:
        sync_folder(folder.checkpoints)


def choose_run(paths: Sequence[str | Path], wanted: str, ranks: Ranks) -> str:
    """Return the id of the run to resume; nodes need not see each other's folders.

    Args:
        wanted: an id; ``latest`` for the newest run that has a checkpoint of all its ranks; ``auto`` for the same, or
            none;
            or nothing.

    Returns:
        The id; nothing where nothing is wanted, or for ``auto`` where there is nothing to resume.

    Raises:
        CheckpointError: there is none; the runs that have a checkpoint are listed. For ``auto``: there is none, but
            something
            that may be one of which a part is missing.
    """
    if not wanted:
        return ""

    def seen() -> tuple[dict[str, list[files.Published]], list[str], str]:
        there = [path for path in paths if wanted != "auto" or os.path.lexists(path)]  # else they will be made
        with files.using(Path(paths[0])):
            runs, passed = look_for_runs(there)
            headless = [run.run_id for run in runs if 0 not in run.roots]  # the folder of its checkpoints is not here
            found = {run.run_id: files.published_in(run.in_order[0] / "checkpoints") for run in runs}
            return found, headless, passed_over(passed)

    published: dict[str, set[files.Published]] = {}
    missing: set[str] = set()
    odd = ""
    for found, headless, passed in ranks.collect(ranks.together("looking for runs", seen)):
        odd = odd or passed
        missing.update(headless)
        for run_id, names in found.items():
            published.setdefault(run_id, set()).update(names)
    checkpointed = sorted(run_id for run_id, names in published.items() if files.complete_checkpoints(names))
    if wanted in ("latest", "auto") and checkpointed:
        return checkpointed[-1]
    if wanted == "auto":
        partial = sorted(run_id for run_id, names in published.items() if names or run_id in missing)
        if not partial and not odd:
            return ""
        what = f"a part of run {', '.join(partial)}" if partial else "something like a run"
        raise CheckpointError(
            f"{', '.join(map(str, paths))} has {what}, but no checkpoint of all its ranks: neither resumed nor begun anew; "
            f"bring back what is missing, or remove what is there{'; ' * bool(odd)}{odd}"
        )
    if wanted in checkpointed:
        return wanted
    listed = ", ".join(checkpointed) or "none"
    raise CheckpointError(
        f"no checkpoint to resume from: {wanted!r} in {', '.join(map(str, paths))} (runs with a checkpoint: {listed})"
        f"{'; ' * bool(odd)}{odd}"
    )


def list_checkpoints(folder: RunFolder, ranks: Ranks, step: int) -> list[CheckpointName]:
    """Return the checkpoints of a run up to the one to resume from, which is the last; one of every step, the newest.

    All ranks get the same list; what is not there on all of them is no checkpoint, and is said.

    Args:
        step: of the checkpoint to resume from; -1 is the newest that all ranks hold.

    Raises:
        CheckpointError: there is none.
    """
    here = files.published_in(folder.checkpoints)
    published = set[files.Published]().union(*ranks.collect(here))
    checkpoints = files.complete_checkpoints(published)
    chosen = files.choose_checkpoint(folder.run_id, checkpoints, step)
    if ranks.local_rank == 0:
        for file in files.left_over(folder.checkpoints, here):
            _log.warning("%s is of no checkpoint: it was cut off, or its manifest was lost; it is passed over", file)
    if ranks.rank == 0:
        for partial in sorted({name.checkpoint for name in published} - set(checkpoints)):
            number = sum(name.checkpoint == partial for name in published)
            _log.warning(
                "%s of run %s was published by %d of %d ranks: it is passed over",
                partial, folder.run_id, number, partial.world_size,
            )  # fmt: skip
    return [
        *{checkpoint.step: checkpoint for checkpoint in checkpoints if checkpoint.step < chosen.step}.values(),
        chosen,
    ]


def find_checkpoints(
    folder: RunFolder, ranks: Ranks, layout: Layout, optimizer: str, checkpoints: Sequence[CheckpointName]
) -> list[Manifest]:
    """Return this rank's manifests of the checkpoints up to the one to resume from, which is the last.

    Older ones are returned as far as they are good on all ranks: they are kept until the run checkpoints again.

    Args:
        checkpoints: what `list_checkpoints` returned.

    Raises:
        CheckpointError: the last is malformed, belongs to another model or optimizer, or was made by another number of
            ranks.
    """
    wanted = checkpoints[-1]
    if wanted.world_size != ranks.world_size:
        raise CheckpointError(
            f"run {folder.run_id} was checkpointed by {wanted.world_size} ranks, this run has {ranks.world_size}; "
            f"start it with {wanted.world_size}"
        )

    def read(checkpoint: CheckpointName) -> Manifest:
        manifest = files.read_manifest(folder.checkpoints / checkpoint.of(ranks.rank).file_name)
        check_checkpoint(manifest, layout, optimizer, folder)
        return manifest

    found = ranks.together(f"reading the {wanted}", lambda: read(wanted))
    older: dict[CheckpointName, Manifest] = {}
    for earlier in checkpoints[:-1]:
        try:
            older[earlier] = read(earlier)
        except CheckpointError as error:
            _log.warning("an earlier checkpoint is not kept: %s", error)
    good = ranks.collect(set(older))
    everywhere = sorted(good[0].intersection(*good[1:]))
    return [*(older[earlier] for earlier in everywhere), found]


def check_checkpoint(found: Manifest, layout: Layout, optimizer: str, folder: RunFolder) -> None:
    """Check that a checkpoint belongs to this model and optimizer, and that its pages are where they can be.

    Raises:
        CheckpointError: it does not.
    """
    check_optimizer(found, optimizer)
    if found.layout.fingerprint != layout.fingerprint:
        raise CheckpointError(
            f"the checkpoint of step {found.step} of run {found.run_id} belongs to another model, optimizer or page size "
            f"(layout {found.layout.fingerprint}, here {layout.fingerprint}); resume with the model, dtypes and "
            "optimizer it was made with"
        )
    files.check_pages(found, folder)


def check_tensors(found: Manifest, described: RunDescription) -> None:
    """Check that a checkpoint's pages hold the same slices of the same parameters as this model's.

    Raises:
        CheckpointError: they do not: another shape, or another way of sharding, of as many elements.
    """
    for there, here in zip(found.description.tensors, described.tensors, strict=True):
        for what, one, other in (
            ("is called", there.names, here.names),
            ("has shape", there.shape, here.shape),
            ("is sharded along dimension", there.dim, here.dim),
            ("is sharded over", there.shard_size, here.shard_size),
            ("is on this rank in slice", there.shard_rank, here.shard_rank),
        ):
            if one != other:
                raise CheckpointError(
                    f"{here.names[0]} {what} {one} in the checkpoint of step {found.step} of run {found.run_id}, {other} "
                    "here; build model and mesh as they were"
                )


def check_optimizer(found: Manifest, optimizer: str) -> None:
    """Check that a checkpoint was made with an optimizer of this class.

    Raises:
        CheckpointError: it was not.
    """
    if found.optimizer != optimizer:
        raise CheckpointError(
            f"the checkpoint of step {found.step} of run {found.run_id} was made with {found.optimizer}, this run has "
            f"{optimizer}; resume with {found.optimizer}"
        )


def checkpointed_buffers(found: Manifest, folder: RunFolder, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a checkpoint has of a model, by their names in it.

    Raises:
        CheckpointError: the state file is missing or corrupt.
    """
    data = files.read_state_file(folder.checkpoints, found)
    with files.using(folder.checkpoints / found.state_file):
        return model_state.saved_buffers(data, model, found.description.buffers)


def restore(
    found: Manifest,
    folder: RunFolder,
    model: nn.Module,
    groups: list[dict[str, Any]],
    held: Sequence[Sequence[int]],
    *,
    random: bool = True,
) -> ResumedState:
    """Put back buffers, group settings and, if `random`, random states; return the rest.

    `held` are the parameters of each of `groups`, by the indices that the checkpoint has for them.

    Raises:
        CheckpointError: the state file is missing or corrupt, or the groups are not those of the checkpoint.
    """
    data = files.read_state_file(folder.checkpoints, found)
    with files.using(folder.checkpoints / found.state_file):
        model_state.load_buffers(data, model, found.description.buffers)
        if random:
            model_state.load_random(found.random, data)
    model_state.load_groups(found.groups, groups, held)
    return ResumedState(
        found.step, model_state.load_scalars(found.scalars), found.extra, model_state.load_settings(found.own)
    )
