"""Publishing a commit and resuming from one.

[Note: the publish protocol] The pages are already in free extents; a commit flushes what is modified, calls
fdatasync, and writes the manifest under a temporary name, flushed and renamed. Only when every rank has
published are the versions of the commit before it freed and its manifest removed. So at any instant there is
a step that all ranks hold, and resuming takes the newest such step.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from infinity.checkpoint import manifest as files
from infinity.checkpoint import state
from infinity.checkpoint.manifest import Manifest
from infinity.errors import CommitError
from infinity.layout import Layout, Role
from infinity.ranks import Ranks
from infinity.store.folder import RunFolder
from infinity.store.pages import PageStore


@dataclass(frozen=True)
class ResumedState:
    """What a resumed run gets besides its pages."""

    step: int
    scalars: dict[int, dict[str, Any]]
    extra: dict[str, Any]


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
    ) -> Path:
        """Make the stored pages and the given state the newest commit of all ranks.

        Raises:
            CommitError: something cannot be written as plain data.
            StorageError: a device refused.
            InfinityError: it failed on another rank. In all cases the commit before is intact.
        """

        def write() -> tuple[Path, dict[int, Any]]:
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
            return files.write_manifest(self._folder.commits, manifest), versions

        path, versions = self._ranks.together(f"commit of step {step}", write)
        self._store.adopt(versions)
        remove_commits(self._folder, self._ranks.rank, keep=path)
        return path


def remove_commits(folder: RunFolder, rank: int, *, keep: Path) -> None:
    """Remove the commits of a rank, except the one whose manifest is `keep`: manifests first, then the rest."""
    kept = {keep.name, files.read_manifest(keep).state_file}
    others = [file for file in folder.commits.glob(f"step*.rank{rank:05d}.*") if file.name not in kept]
    for file in sorted(others, key=lambda file: file.suffix != ".json"):
        file.unlink(missing_ok=True)


def find_commit(folder: RunFolder, ranks: Ranks) -> Manifest:
    """Return this rank's manifest of the newest step that all ranks hold.

    Raises:
        CommitError: there is none, it is malformed, or it was made by another number of ranks.
    """
    held = ranks.collect(sorted(files.commits_in(folder.commits, ranks.rank)))
    common = set(held[0]).intersection(*held[1:])
    if not common:
        raise CommitError(
            f"no step of run {folder.run_id} was committed by all {ranks.world_size} ranks (per rank: {held}); a run "
            "resumes with the number of ranks that committed it"
        )
    step = max(common)
    found = ranks.together(
        f"reading the commit of step {step}",
        lambda: files.read_manifest(files.commits_in(folder.commits, ranks.rank)[step]),
    )
    if found.world_size != ranks.world_size:
        raise CommitError(
            f"run {folder.run_id} was committed by {found.world_size} ranks, this run has {ranks.world_size}; "
            f"start it with {found.world_size}"
        )
    return found


def check_commit(found: Manifest, layout: Layout, optimizer: str, paths: int) -> None:
    """Check that a commit belongs to this model and optimizer, and to this number of paths.

    Raises:
        CommitError: it does not.
    """
    if found.optimizer != optimizer:
        raise CommitError(
            f"the commit of step {found.step} of run {found.run_id} was made with {found.optimizer}, this run has "
            f"{optimizer}; resume with {found.optimizer}"
        )
    if found.layout != layout.fingerprint:
        raise CommitError(
            f"the commit of step {found.step} of run {found.run_id} belongs to another model, optimizer or page size "
            f"(layout {found.layout}, here {layout.fingerprint}); resume with the model, dtypes and optimizer it was "
            "made with"
        )
    expected = {page.index for page in layout.pages if page.role is not Role.GRAD}
    if set(found.pages) != expected:
        raise CommitError(f"the commit of step {found.step} of run {found.run_id} lacks pages: it is malformed")
    if len(found.weights) != paths:
        raise CommitError(f"run {found.run_id} lies on {len(found.weights)} paths, storage.paths names {paths}")


def restore(found: Manifest, folder: RunFolder, model: nn.Module, groups: list[dict[str, Any]]) -> ResumedState:
    """Put back buffers, random states and group settings; return the rest.

    Raises:
        CommitError: the state file is missing or corrupt.
    """
    file = folder.commits / found.state_file
    try:
        data = file.read_bytes()
    except OSError as error:
        raise CommitError(f"state file {file} of the commit cannot be read: {error.strerror}") from error
    if files.checksum_of(data) != found.state_checksum:
        raise CommitError(f"state file {file} of the commit does not match its checksum")
    state.load_tensors(data, model)
    state.load_random(found.random, data)
    state.load_groups(found.groups, groups)
    return ResumedState(found.step, state.load_scalars(found.scalars), found.extra)
