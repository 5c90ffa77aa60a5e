"""Publishing checkpoints and resuming from them.

[Note: publish protocol] Pages are always written to free extents. A checkpoint flushes the modified pages, calls
fdatasync, writes the manifest under a temporary name, flushes it and renames it. Only after every rank has published
its manifest is the oldest checkpoint's manifest removed and are its page versions freed. Therefore, at any instant,
there is a checkpoint that all ranks hold, and a run resumes from the newest such checkpoint. All ranks give a
checkpoint the same identity, which is part of its file names. As a result, checkpointing a step again does not replace
the earlier files before every rank has published the new ones.

[Note: withdrawing] If a checkpoint is known to have failed on a rank, every rank durably removes the files that it has
published for the checkpoint, before any of its pages is overwritten. If a rank does not know the outcome (its exchange
with the other ranks was interrupted, or it lost other ranks), the other ranks may have completed the checkpoint and
removed the previous one. The rank then keeps the files of both, and the next start uses the checkpoint that all ranks
hold. The page versions of such a checkpoint stay reserved until a later checkpoint completes.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint import manifest as files
from infinity.checkpoint import model_state
from infinity.checkpoint.checkpoint_files import CheckpointFiles
from infinity.checkpoint.copier import Copier
from infinity.checkpoint.description import RunDescription
from infinity.checkpoint.durable import write_durably
from infinity.checkpoint.held import (
    HeldCheckpoint,
    Seen,
    choose,
    held,
    never_complete,
    problems,
    seen_in,
    usable,
)
from infinity.checkpoint.manifest import CheckpointName, Manifest
from infinity.checkpoint.model_state import ResumedState
from infinity.checkpoint.module_state import ExtraState, load_state, saved_state
from infinity.checkpoint.parts import Part, digest_of_content, digest_of_slices, host_name
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
    """Publishes the checkpoints of one rank.

    During its life cycle, a checkpoint passes through several states. First its page versions are *kept*, so that no
    write reuses their extents. The data files are synced, and the state file and the manifest are written. The
    checkpoint is *published* when all ranks report success (`Ranks.together`), *adopted* when older checkpoints have
    been durably removed, and removed when it is no longer retained. A checkpoint that fails on one rank is withdrawn on
    all ranks. [Note: withdrawing] Only the training thread uses this class.
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
        space: CheckpointSpace,
        updated_on: str,
        replica: int | None,
        copiers: Sequence[Copier] = (),
        copied: int = 0,
    ) -> None:
        """Initialize the writer with the checkpoints that already exist.

        Args:
            folder: Folders of the run.
            ranks: Ranks of the run. All of them must call the same methods in the same order.
            described: Description of the pages of this rank.
            store: Page store of this rank.
            optimizer: Name of the optimizer class.
            stripe_weights: Stripe weights of the paths.
            found: This rank's manifests of the retained checkpoints, in the order of their steps.
            space: Space reserved for checkpoint files.
            updated_on: Type of the device that runs updates.
            replica: Smallest rank of this rank's replica, or None if it is unknown. See `replica_of`.
            copiers: Copy this rank's checkpoints to other places.
            copied: Maximum number of checkpoints that are kept for copying, in addition to the retained ones.
        """
        # Constant after construction.
        self._copiers, self._copied = copiers, copied
        self._folder, self._ranks, self._described, self._store = folder, ranks, described, store
        self._space, self._updated_on = space, updated_on
        self._optimizer, self._stripe_weights = optimizer, stripe_weights
        self._slices, self._replica = digest_of_slices(described, ranks.rank, replica), replica
        self._pages = [page.index for page in described.layout.pages if page.role is not Role.GRAD]
        """Indices of the checkpointed pages, which are all pages except gradient pages."""
        self._checkpoints = {manifest.step: manifest.name.checkpoint for manifest in found}
        """Retained checkpoints by step. `publish` updates them once the files of other checkpoints have been removed.
        """
        self._repeated: dict[CheckpointName, Mapping[int, Version]] = {
            manifest.name.checkpoint: manifest.pages for manifest in repeated(found)
        }
        """Page versions of checkpoints that the copiers need, although their steps were checkpointed again."""
        self._newest = max((manifest.identity for manifest in found), default="")
        """Identity of the last checkpoint that was attempted or published. The next identity must be greater."""
        self._not_flushed: list[Mapping[int, Version]] = []
        """Page versions of checkpoints that are not retained but whose files may exist. [Note: withdrawing]"""
        self._read_back = False
        """``True`` once the state of modules has been restored from the data of a checkpoint."""
        if found:  # an earlier start may have ended before it was copied
            for copier in copiers:
                copier.exchanged(ranks.collect(copier.progress))
                copier.published(found[-1], tuple(self._checkpoints.values()))

    def reserve(self) -> None:
        """Reserve space for the files of future checkpoints. Raises `BudgetError` or `StorageError`."""
        self._space.reserve(self._to_come)

    @property
    def _to_come(self) -> int:
        """Number of checkpoints that need space: the retained ones not yet written, plus the one being written."""
        return max(1, self._store.retained + self._copied + 1 - len(self._checkpoints) - len(self._repeated))

    def finish(self) -> None:
        """Wait until the newest checkpoint has been copied, or has failed to be copied. All ranks call it together."""
        for copier in self._copiers:
            copier.finish()

    def close(self) -> None:
        """Release the reserved space. Raises `OSError`."""
        self._space.close()

    def publish(
        self,
        step: int,
        model: nn.Module,
        outermost: nn.Module,
        ignored: ExtraState,
        scalars: dict[int, dict[str, Any]],
        groups: list[dict[str, Any]],
        extra: dict[str, Any],
        own: dict[str, Any],
        prefer: Collection[int] = (),
    ) -> None:
        """Make the stored pages and the given state the newest checkpoint of all ranks.

        Args:
            step: Number of completed optimizer steps.
            model: Sharded model.
            outermost: Module that contains `model`, or `model` itself.
            ignored: Optimizer state of the parameters that `fully_shard` ignores.
            scalars: Scalar optimizer states, by shard index.
            groups: Parameter groups of the optimizer.
            extra: User data to save with the checkpoint.
            own: Persistent attributes of the optimizer object.
            prefer: Steps of earlier checkpoints to retain in preference to newer ones.

        Raises:
            CheckpointError: if a value cannot be saved, or if the state of a module cannot be restored from the first
                checkpoint.
            StorageError: if a drive fails.
            InfinityError: if the checkpoint failed on another rank, or if another rank was lost.

        After an error, all ranks still hold a common checkpoint. It is the new one if all ranks had published it when
        this rank was interrupted or lost the others, and otherwise the previous one.
        """
        versions = self._store.versions(self._pages)
        part = Part(host_name(), self._slices, digest_of_content(versions), self._replica)
        progress = [copier.progress for copier in self._copiers]
        everywhere = self._ranks.collect((files.new_identity(self._newest), part, progress))
        for number, copier in enumerate(self._copiers):
            copier.exchanged([of_rank[number] for _, _, of_rank in everywhere])
        self._pin()
        self._newest = everywhere[0][0]
        checkpoint = CheckpointName(step, self._newest, self._ranks.world_size)
        # Kept before any file can refer to them: from now on, no write may reuse their extents.
        self._store.keep(versions)
        self._not_flushed.append(versions)

        def write() -> Manifest:
            model_state.check_persistent(model, self._described.buffers)
            data = model_state.save_tensors(model, outermost, ignored)
            if not self._read_back:
                # A value that cannot be restored would otherwise be noticed only when the run resumes.
                model_state.load_buffers(data, model, self._described.buffers)
                load_state(saved_state(model_state.load_tensors(data)), outermost, model, ignored)
                self._read_back = True
            manifest = Manifest(
                run_id=self._folder.run_id,
                step=step,
                identity=checkpoint.identity,
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
                created=time.time(),
                description=self._described,
                optimizer=self._optimizer,
                stripe_weights=self._stripe_weights,
                pages=versions,
                scalars=scalars,
                groups=groups,
                random=model_state.save_random(),
                state_checksum=files.checksum_of(data),
                extra=extra,
                own=own,
                updated_on=self._updated_on,
                parts=[part for _, part, _ in everywhere],
            )
            # fdatasync before the manifest: a manifest must never refer to a page that a power loss can still destroy.
            self._store.sync()
            self._space.hold(self._to_come - 1)
            write_durably(self._folder.checkpoints / manifest.state_file, data)
            files.write_manifest(self._folder.checkpoints, manifest)
            self._space.took(len(data) + (self._folder.checkpoints / manifest.file_name).stat().st_size)
            return manifest

        what = f"checkpoint of step {step}"
        manifest = self._ranks.together(what, write, undo=lambda: self._withdraw(checkpoint, versions))
        # Order matters: first every rank publishes, then the manifests of older checkpoints are durably removed, and
        # only then may `adopt` free extents. Otherwise a manifest that reappears after a power loss could refer to
        # overwritten pages.
        kept = {**self._checkpoints, step: checkpoint}
        kept = {step: kept[step] for step in self._store.retained_with(step, prefer)}
        replaced = self._store.replaced_by(step, prefer)
        if step in replaced and self._checkpoints[step] in self._needed:
            self._repeated[self._checkpoints[step]] = replaced.pop(step)
            self._store.keep(self._repeated[self._checkpoints[step]])
        for name in self._repeated.keys() - self._needed:  # released once their files have been removed
            self._not_flushed.append(self._repeated.pop(name))
        removed = True
        try:
            remove_checkpoints(self._folder, self._ranks, keep=(*kept.values(), *self._repeated))
        except OSError as error:  # raising it would leave the other ranks waiting, although the checkpoint is published
            self._keep_replaced(error, replaced.values())
            removed = False
        self._checkpoints = kept
        self._store.adopt(step, versions, prefer)
        self._not_flushed.remove(versions)
        self._store.release(versions)
        while removed and self._not_flushed:
            self._store.release(self._not_flushed.pop())
        self._space.hold(self._to_come)
        for copier in self._copiers:
            copier.published(manifest, tuple(self._checkpoints.values()))

    @property
    def _needed(self) -> set[CheckpointName]:
        """Checkpoints that the copiers need."""
        return set().union(*(copier.needed for copier in self._copiers))

    def _pin(self) -> None:
        """Retain the checkpoints that the copiers need."""
        needed = self._needed
        self._store.pinned = [step for step, checkpoint in self._checkpoints.items() if checkpoint in needed]

    def _keep_replaced(self, error: OSError, replaced: Iterable[Mapping[int, Version]]) -> None:
        """Protect the pages of earlier checkpoints whose files cannot be removed, until a later removal succeeds.

        Raises:
            BudgetError, StorageError: if there is no space for further versions of these pages.
        """
        _log.warning(
            "earlier checkpoints cannot be removed: %s: %s. They occupy space until a later checkpoint removes them.",
            error.filename or self._folder.checkpoints,
            error.strerror,
        )
        for versions in replaced:
            self._store.keep(versions)
            self._not_flushed.append(versions)
        self._reserve_checkpoints(len(self._not_flushed) - 1)  # all except the checkpoint that is being published

    def _reserve_checkpoints(self, further: int) -> None:
        self._store.reserve_checkpoints(further + self._copied)

    def _withdraw(self, checkpoint: CheckpointName, versions: Mapping[int, Version]) -> None:
        """Remove the files that this rank has published for a failed checkpoint. [Note: withdrawing]"""
        name = checkpoint.of(self._ranks.rank)
        try:
            # The removal must be durable before the extents are released below; see `publish`.
            for file_name in (name.file_name, name.state_file):
                (self._folder.checkpoints / file_name).unlink(missing_ok=True)
            sync_folder(self._folder.checkpoints)
        except OSError as error:
            _log.warning(
                "%s cannot be removed: %s. Its pages stay reserved until the next checkpoint.",
                name.file_name,
                error.strerror,
            )
            self._reserve_checkpoints(len(self._not_flushed))
            return
        self._not_flushed.remove(versions)
        self._store.release(versions)
        self._space.hold(self._to_come)


def remove_checkpoints(folder: RunFolder, ranks: Ranks, *, keep: Iterable[CheckpointName]) -> None:
    """Durably remove one rank's checkpoint files, manifests first, except for the checkpoints in `keep`."""
    names = [checkpoint.of(ranks.rank) for checkpoint in keep]
    kept = {*(name.file_name for name in names), *(name.state_file for name in names)}
    others = set(fnmatch.filter(files.names_in(folder.checkpoints), f"step*.rank{ranks.rank:05d}[.-]*")) - kept
    # A manifest must not outlive its state file, so manifests come first.
    for name in sorted(others, key=lambda name: (not name.endswith(".json"), name)):
        (folder.checkpoints / name).unlink(missing_ok=True)
    if others:
        sync_folder(folder.checkpoints)


class NoCheckpointError(CheckpointError):
    """There is no complete checkpoint to resume from. All ranks raise this error together."""


def choose_run(paths: Sequence[str | Path], wanted: str, ranks: Ranks, replica: int = -1) -> str:
    """Return the id of the run to resume. Nodes need not share a file system.

    Args:
        paths: NVMe paths of this node.
        wanted: A run id; ``latest`` for the newest run with a complete checkpoint; ``auto`` for the same, or for no run
            if no run on the paths has ever had a complete checkpoint; or an empty string for no run.
        ranks: Ranks of the run.
        replica: Replica to resume from, or -1 for any.

    Returns:
        The run id, or an empty string if no run should be or can be resumed.

    Raises:
        NoCheckpointError: on all ranks, if the requested run has no complete checkpoint. The message lists the runs
            that have one. With ``auto``, if no run has a complete checkpoint but parts of a run are present, unless
            they show that its first checkpoint was interrupted.
    """
    if not wanted:
        return ""

    def look() -> tuple[dict[str, Seen], list[str], str]:
        # With "auto", missing paths are created later. With several ranks, other nodes may have them.
        optional = wanted == "auto" or ranks.world_size > 1
        there = [path for path in paths if not optional or os.path.lexists(path)]
        with files.using(Path(paths[0])):
            runs, passed = look_for_runs(there)
            headless = [run.run_id for run in runs if 0 not in run.roots]  # checkpoint folder not on this node
            found = {run.run_id: seen_in(RunFolder(run.run_id, run.in_order)) for run in runs}
            return found, headless, passed_over(passed)

    everywhere = ranks.collect(ranks.together("looking for runs", look))
    odd = next((passed for *_, passed in everywhere if passed), "")
    missing = {run_id for _, headless, _ in everywhere for run_id in headless}
    known = sorted({run_id for found, *_ in everywhere for run_id in found})
    seen = {run_id: [found.get(run_id, Seen()) for found, *_ in everywhere] for run_id in known}
    runs = {run_id: held(seen[run_id]) for run_id in known}
    checkpointed = [run_id for run_id in known if usable(runs[run_id], replica)]
    if wanted in ("latest", "auto") and checkpointed:
        for run_id in known:
            if run_id > checkpointed[-1] and runs[run_id] and ranks.rank == 0:
                _log.warning("Ignoring the newer run %s%s", run_id, problems(runs[run_id], replica))
        return checkpointed[-1]
    reasons = [f"run {run_id}{text}" for run_id in known[-1:] if (text := problems(runs[run_id], replica))]
    if wanted in runs and wanted not in checkpointed:
        reasons = [problems(runs[wanted], replica).removeprefix("; ")]
    detail = "".join(f"; {text}" for text in (*reasons, odd) if text)
    if wanted == "auto":
        interrupted = [run_id for run_id in known if run_id not in missing and never_complete(seen[run_id])]
        partial = [run_id for run_id in known if run_id not in interrupted and (runs[run_id] or run_id in missing)]
        if not partial and not odd:
            for run_id in interrupted if ranks.rank == 0 else ():
                _log.warning(
                    "starting a new run, because run %s was interrupted while it wrote its first checkpoint (step %d: "
                    "%s); free its space with `infinity store rm`",
                    run_id, runs[run_id][-1].name.step, runs[run_id][-1].count,
                )  # fmt: skip
            return ""
        what = f"part of run {', '.join(partial)}" if partial else "a folder that resembles a run"
        raise NoCheckpointError(
            f"found {what} in {', '.join(map(str, paths))}, but no complete checkpoint. Restore the missing paths or "
            f"remove the incomplete run before starting a new one{detail}"
        )
    if wanted in checkpointed:
        return wanted
    listed = ", ".join(checkpointed) or "none"
    raise NoCheckpointError(
        f"no checkpoint to resume from for run.resume = {wanted!r} in {', '.join(map(str, paths))} (runs with a "
        f"complete checkpoint: {listed}){detail}"
    )


def list_checkpoints(folder: RunFolder, ranks: Ranks, step: int, replica: int = -1) -> list[HeldCheckpoint]:
    """Return the checkpoints of a run up to the one to resume from, which is last.

    If a step has several checkpoints, the newest one and those with copies on other nodes are returned. All ranks get
    the same list. A checkpoint of which some slices are not present on any node is skipped with a warning.

    Args:
        folder: Folders of the run on this node. They may not exist.
        ranks: Ranks of the run.
        step: Step of the checkpoint to resume from, or -1 for the newest one.
        replica: Replica to resume from, or -1 for any.

    Raises:
        CheckpointError: if there is no such checkpoint.
    """
    here = seen_in(folder)
    everything = held(ranks.collect(here))
    chosen = choose(folder.run_id, everything, step, replica)
    if ranks.local_rank == 0 and folder.roots:
        for file in files.left_over(folder.checkpoints, here.published):
            _log.warning(
                "Ignoring %s: it has no manifest, because the checkpoint was interrupted or the manifest was lost", file
            )
    checkpoints = usable(everything, replica)
    if ranks.rank == 0:
        for partial in everything:
            problem = partial.problem(replica)
            if problem or (partial.absent and partial.name > chosen.name):
                _log.warning(
                    "Ignoring %s of run %s: published by %s", partial.name, folder.run_id, problem or partial.count
                )
    by_step = {checkpoint.name.step: checkpoint for checkpoint in checkpoints}
    newest = {*(found.name for found in by_step.values() if found.name.step < chosen.name.step), chosen.name}
    earlier = [found for found in checkpoints if found.name < chosen.name]
    return [*(found for found in earlier if found.name in newest or found.parities), chosen]


def repeated(found: Sequence[Manifest]) -> list[Manifest]:
    """Return the manifests of checkpoints whose step has a newer checkpoint as well.

    Args:
        found: manifests in order.
    """
    newest = {manifest.step: manifest.identity for manifest in found}
    return [manifest for manifest in found if manifest.identity != newest[manifest.step]]


def find_checkpoints(
    folder: RunFolder, ranks: Ranks, layout: Layout, optimizer: str, checkpoints: Sequence[HeldCheckpoint]
) -> list[Manifest]:
    """Return this rank's manifests of all checkpoints up to the one to resume from, which is last.

    Earlier checkpoints are included if they are valid on all ranks. They are retained at least until the run saves
    another checkpoint.

    Args:
        folder: Folders of the run.
        ranks: Ranks of the run.
        layout: Layout of the pages of this rank.
        optimizer: Name of the optimizer class.
        checkpoints: Return value of `list_checkpoints`.

    Raises:
        CheckpointError: if the last checkpoint is malformed, or belongs to a different model or optimizer.
    """
    wanted = checkpoints[-1].name

    def read(checkpoint: CheckpointName) -> Manifest:
        manifest = files.read_manifest(folder.checkpoints / checkpoint.of(ranks.rank).file_name)
        check_checkpoint(manifest, layout, optimizer, folder)
        return manifest

    found = ranks.together(f"reading the {wanted}", lambda: read(wanted))
    older: dict[CheckpointName, Manifest] = {}
    for earlier in (checkpoint.name for checkpoint in checkpoints[:-1] if not checkpoint.absent):
        try:
            older[earlier] = read(earlier)
        except CheckpointError as error:
            _log.warning("an earlier checkpoint is not retained: %s", error)
    good = ranks.collect(set(older))
    everywhere = sorted(good[0].intersection(*good[1:]))
    return [*(older[earlier] for earlier in everywhere), found]


def check_checkpoint(found: Manifest, layout: Layout, optimizer: str, folder: RunFolder) -> None:
    """Check that a checkpoint belongs to this model and optimizer, and that its pages are within the data files.
    Raises:
        CheckpointError: if a check fails.
    """
    check_optimizer(found, optimizer)
    if found.layout.fingerprint != layout.fingerprint:
        raise CheckpointError(
            f"the checkpoint of step {found.step} of run {found.run_id} belongs to a different model, optimizer or "
            f"page size (layout {found.layout.fingerprint}, but this run has layout {layout.fingerprint}). Resume with "
            "the model, dtypes and optimizer of the checkpoint."
        )
    files.check_pages(found, folder)


def check_optimizer(found: Manifest, optimizer: str) -> None:
    """Check that a checkpoint was written with an optimizer of this class.

    Raises:
        CheckpointError: if it was written with another class.
    """
    if found.optimizer != optimizer:
        raise CheckpointError(
            f"the checkpoint of step {found.step} of run {found.run_id} was written with {found.optimizer}, but this "
            f"run uses {optimizer}. Resume with {found.optimizer}."
        )


def checkpointed_buffers(found: Manifest, access: CheckpointFiles, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a model that a checkpoint contains, by name.

    Raises:
        CheckpointError: if the state file is missing or corrupt.
    """
    data = access.state_file(found)
    with files.using(access.state_path(found)):
        return model_state.saved_buffers(data, model, found.description.buffers)


def restore(
    found: Manifest,
    access: CheckpointFiles,
    model: nn.Module,
    groups: list[dict[str, Any]],
    held: Sequence[Sequence[int]],
    *,
    random: bool = True,
) -> ResumedState:
    """Restore buffers and group settings, and return the remaining state.

    Args:
        found: Manifest of the checkpoint.
        access: Access to its files.
        model: Model whose buffers are restored.
        groups: Parameter groups whose settings are restored.
        held: Parameters of each group, as the indices that they have in the checkpoint.
        random: Whether to restore the random states as well.

    Raises:
        CheckpointError: if the state file is missing or corrupt, or if the groups differ from the checkpoint.
    """
    data = access.state_file(found)
    with files.using(access.state_path(found)):
        model_state.load_buffers(data, model, found.description.buffers)
        modules = saved_state(model_state.load_tensors(data))
        if random:
            model_state.load_random(found.random, data)
    scalars, settings, own = deepcopy((found.scalars, found.groups, found.own))  # steps update tensors in place
    model_state.load_groups(settings, groups, held)
    return ResumedState(found.step, scalars, found.extra, own, modules)
