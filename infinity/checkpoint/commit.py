"""Publishing a commit and resuming from one.

[Note: the publish protocol] The pages are already in free extents; a commit flushes what is modified, calls
fdatasync, and writes the manifest under a temporary name, flushed and renamed. Only when every rank has
published are the versions of the oldest commit freed and its manifest removed. So at any instant there is
a step that all ranks hold, and resuming takes the newest such step. A commit has one name, its step, and a
step that is committed again replaces the commit that had that name.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from infinity.checkpoint import manifest as files
from infinity.checkpoint import state
from infinity.checkpoint.manifest import Manifest
from infinity.errors import CommitError
from infinity.fsdp.first_values import ResumedState
from infinity.layout import Layout, Role
from infinity.ranks import Ranks
from infinity.store.folder import RunFolder
from infinity.store.marker import look_for_runs, passed_over
from infinity.store.pages import PageStore, Version

_log = logging.getLogger(__name__)


class Committer:
    """Publishes commits of one rank."""

    def __init__(
        self, folder: RunFolder, ranks: Ranks, layout: Layout, store: PageStore, optimizer: str, weights: list[float]
    ) -> None:
        self._folder, self._ranks, self._layout, self._store = folder, ranks, layout, store
        self._optimizer, self._weights = optimizer, weights
        self._pages = [page.index for page in layout.pages if page.role is not Role.GRAD]

    def publish(
        self,
        step: int,
        model: nn.Module,
        scalars: Mapping[int, Mapping[str, Any]],
        groups: list[dict[str, Any]],
        extra: dict[str, Any],
    ) -> None:
        """Make the stored pages and the given state the newest commit of all ranks.

        Raises:
            CommitError: something cannot be written as plain data.
            StorageError: a device refused.
            InfinityError: it failed on another rank. In all cases the commit before is intact.
        """
        written: dict[int, Version] = {}

        def write() -> None:
            versions = self._store.versions(self._pages)
            data = state.save_tensors(model)
            # A name of its own: a second commit of a step must not replace what the first one names.
            state_file = f"step{step:012d}.rank{self._ranks.rank:05d}.{secrets.token_hex(4)}.safetensors"
            manifest = Manifest(
                run_id=self._folder.run_id,
                step=step,
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
                created=time.time(),
                layout=self._layout.fingerprint,
                page_bytes=self._layout.page_bytes,
                optimizer=self._optimizer,
                weights=self._weights,
                pages=versions,
                scalars=state.save_scalars(scalars),
                groups=state.save_groups(groups),
                random=state.save_random(),
                state_file=state_file,
                state_checksum=files.checksum_of(data),
                extra=extra,
            )
            self._store.sync()
            files.write_durably(self._folder.commits / state_file, data)
            files.write_manifest(self._folder.commits, manifest)
            written.update(versions)

        try:
            self._ranks.together(f"commit of step {step}", write)
        except BaseException:
            self._withdraw(step, written)
            raise
        # Removed for good before a slot is free that it names: a manifest that comes back after a loss of power
        # must not be of pages that were written over.
        remove_commits(self._folder, self._ranks, keep=self._store.retained_with(step))
        self._store.adopt(step, written)

    def _withdraw(self, step: int, written: Mapping[int, Version]) -> None:
        """Undo what this rank has published of a commit that failed elsewhere."""
        if step not in self._store.commits:
            name = files.Published(step, self._ranks.rank, self._ranks.world_size)
            (self._folder.commits / name.file_name).unlink(missing_ok=True)
        elif written:  # it replaced an earlier commit of this very step, whose pages say the same
            self._store.adopt(step, written)


def remove_commits(folder: RunFolder, ranks: Ranks, *, keep: Sequence[int]) -> None:
    """Remove the commits of a rank, except those of the steps `keep`: manifests first, then the rest."""
    names = [files.Published(step, ranks.rank, ranks.world_size).file_name for step in keep]
    kept = {*names, *(files.read_manifest(folder.commits / name).state_file for name in names)}
    others = [file for file in folder.commits.glob(f"step*.rank{ranks.rank:05d}[.-]*") if file.name not in kept]
    for file in sorted(others, key=lambda file: file.suffix != ".json"):
        file.unlink(missing_ok=True)
    if others:
        files.sync_folder(folder.commits)


def choose_run(paths: Sequence[str | Path], wanted: str, ranks: Ranks) -> str:
    """Return the id of the run to resume; nodes need not see each other's folders.

    Args:
        wanted: an id, or ``latest`` for the newest run that has a commit of all its ranks.

    Raises:
        CommitError: there is none; the runs that have a commit are listed.
    """

    def seen() -> tuple[dict[str, list[files.Published]], str]:
        with files.using(Path(paths[0])):
            runs, passed = look_for_runs(paths)
            return {run.run_id: files.published_in(run.in_order[0] / "commits") for run in runs}, passed_over(passed)

    published: dict[str, set[files.Published]] = {}
    odd = ""
    for found, passed in ranks.collect(ranks.together("looking for runs", seen)):
        odd = odd or passed
        for run_id, names in found.items():
            published.setdefault(run_id, set()).update(names)
    committed = sorted(run_id for run_id, names in published.items() if files.complete_steps(names))
    if wanted == "latest" and committed:
        return committed[-1]
    if wanted in committed:
        return wanted
    listed = ", ".join(committed) or "none"
    raise CommitError(
        f"no commit to resume from: {wanted!r} in {', '.join(map(str, paths))} (runs with a commit: {listed})"
        f"{'; ' * bool(odd)}{odd}"
    )


def find_commits(folder: RunFolder, ranks: Ranks, layout: Layout, optimizer: str, step: int) -> list[Manifest]:
    """Return this rank's manifests of the commits up to the one to resume from, which is the last.

    Older ones are returned as far as they are good on all ranks: they are kept until the run commits again.

    Args:
        step: of the commit to resume from; -1 is the newest that all ranks hold.

    Raises:
        CommitError: there is none, it is malformed, belongs to another model or optimizer, or it was made by another
            number of ranks.
    """
    published = set[files.Published]().union(*ranks.collect(files.published_in(folder.commits)))
    sizes = sorted({name.world_size for name in published})
    if sizes and ranks.world_size not in sizes:
        raise CommitError(
            f"run {folder.run_id} was committed by {sizes[0]} ranks, this run has {ranks.world_size}; "
            f"start it with {sizes[0]}"
        )
    steps = files.complete_steps(name for name in published if name.world_size == ranks.world_size)
    step = files.choose_step(folder.run_id, steps, step)

    def read(step: int) -> Manifest:
        return files.read_manifest(folder.commits / files.Published(step, ranks.rank, ranks.world_size).file_name)

    found = ranks.together(f"reading the commit of step {step}", lambda: read(step))
    ranks.together("checking the commit", lambda: check_commit(found, layout, optimizer, folder))
    older: dict[int, Manifest] = {}
    for earlier in (earlier for earlier in steps if earlier < step):
        try:
            manifest = read(earlier)
            check_commit(manifest, layout, optimizer, folder)
            older[earlier] = manifest
        except CommitError as error:
            _log.warning("an earlier commit is not kept: %s", error)
    good = ranks.collect(set(older))
    everywhere = sorted(good[0].intersection(*good[1:]))
    return [*(older[earlier] for earlier in everywhere), found]


def check_commit(found: Manifest, layout: Layout, optimizer: str, folder: RunFolder) -> None:
    """Check that a commit belongs to this model and optimizer, and that its pages are where they can be.

    Raises:
        CommitError: it does not.
    """
    check_optimizer(found, optimizer)
    if found.layout != layout.fingerprint:
        raise CommitError(
            f"the commit of step {found.step} of run {found.run_id} belongs to another model, optimizer or page size "
            f"(layout {found.layout}, here {layout.fingerprint}); resume with the model, dtypes and optimizer it was "
            "made with"
        )
    files.check_pages(found, layout, folder)


def check_optimizer(found: Manifest, optimizer: str) -> None:
    """Check that a commit was made with an optimizer of this class.

    Raises:
        CommitError: it was not.
    """
    if found.optimizer != optimizer:
        raise CommitError(
            f"the commit of step {found.step} of run {found.run_id} was made with {found.optimizer}, this run has "
            f"{optimizer}; resume with {found.optimizer}"
        )


def restore(
    found: Manifest, folder: RunFolder, model: nn.Module, groups: list[dict[str, Any]], *, random: bool = True
) -> ResumedState:
    """Put back buffers, group settings and, if `random`, random states; return the rest.

    Raises:
        CommitError: the state file is missing or corrupt.
    """
    data = files.read_state_file(folder.commits, found)
    with files.using(folder.commits / found.state_file):
        state.load_buffers(data, model)
        if random:
            state.load_random(found.random, data)
    state.load_groups(found.groups, groups)
    return ResumedState(found.step, state.load_scalars(found.scalars), found.extra)
