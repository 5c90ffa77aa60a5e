"""Checkpoint reader that assembles full parameters from the pages of several ranks.

It needs no model, process group or GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint import manifest as files
from infinity.checkpoint.checkpoint_files import CheckpointFiles
from infinity.checkpoint.computed_files import with_computed
from infinity.checkpoint.description import RunDescription, TensorSpec
from infinity.checkpoint.full_state import FullState, owners_of
from infinity.checkpoint.held import HeldCheckpoint, choose, held, seen_in
from infinity.checkpoint.manifest import Manifest
from infinity.checkpoint.model_state import load_tensors, saved_buffer
from infinity.checkpoint.module_state import IGNORED, saved_state
from infinity.content.format import MASTER
from infinity.content.spans import Spans, full_spans, overlaps, sizes_of
from infinity.content.views import read_section, torch_dtype
from infinity.errors import CheckpointError
from infinity.store.folder import RunFolder

_CACHED_PAGES = 4


class CheckpointReader(FullState):
    """One checkpoint of a run. Memory use is limited to one parameter and a few pages.

    The object does not change after construction. Files are opened for each read and closed afterwards. The run may be
    live and may remove the checkpoint in the meantime, in which case the next read raises an error.
    """

    def __init__(
        self,
        folder: RunFolder,
        step: int | HeldCheckpoint = -1,
        *,
        replica: int = -1,
        access: CheckpointFiles | None = None,
    ) -> None:
        """Read the manifests of all ranks whose pages are needed.

        Args:
            folder: Folders of the run, in the order of storage.paths.
            step: Step of the checkpoint, -1 for the newest one whose slices are all present, or the checkpoint.
            replica: Replica to read, or -1 for any. It is required only if the replicas differ.
            access: Access to the files. By default, they are read from `folder`.

        Raises:
            CheckpointError: if there is no such checkpoint, or if it is incomplete or malformed.
        """
        self._folder = folder
        if not isinstance(step, HeldCheckpoint):
            step = choose(folder.run_id, held([seen_in(folder)]), step, replica)
        self._held, self._files = step, access or with_computed(CheckpointFiles(folder), step)
        self._checkpoint = step.name
        first = self._files.manifest(step.name.of(min(step.holders)))
        self._manifests = {first.rank: first}  # by rank
        """Manifests that have been read."""
        try:
            self._sources, missing = step.sources(first.parts, replica)
        except CheckpointError as error:
            raise CheckpointError(f"{step.name} of run {folder.run_id} cannot be read: {error}") from error
        if missing:
            raise CheckpointError(f"{step.name} of run {folder.run_id} is incomplete: {step.problem(replica)}")
        self._ranks: dict[int, RunDescription] = {rank: self.manifest(rank).description for rank in self._sources}
        """Descriptions of the ranks whose pages are read, by rank."""
        self._first = self.manifest(self._sources[0])
        for rank, described in self._ranks.items():
            manifest = self._manifests[rank]
            if _whole(described) != _whole(self._first.description):
                raise CheckpointError(
                    f"{manifest.file_name} of run {folder.run_id} is malformed: its parameters differ from the "
                    f"parameters of rank {self._first.rank}"
                )
            if access is None:
                self._files.state_file(manifest)  # a checkpoint that cannot be resumed is not exported
        self._page = lru_cache(_CACHED_PAGES)(self._read_page)  # bytes of a page, by rank and index

    @property
    def updated_on(self) -> str:
        """Type of the device that ran updates."""
        return self._first.updated_on

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All parameters, in the order of their shards."""
        return self._first.description.tensors

    @property
    def extra(self) -> dict[str, object]:
        """User data, as passed to `save_checkpoint()`."""
        return self._first.extra

    def dtype(self, index: int, name: str = MASTER) -> torch.dtype:
        """Return the dtype in which a parameter is trained, or the dtype of one of its optimizer states."""
        return torch_dtype(self._first.layout.format_of(index).dtypes[name])

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self._checkpoint.step

    @property
    def folder(self) -> RunFolder:
        """Folders of the run."""
        return self._folder

    @property
    def checkpoints(self) -> Path:
        """Checkpoint folder with the files for exports (see `infinity.formats.companions`)."""
        return self._files.checkpoints

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote the checkpoint."""
        return self._checkpoint.world_size

    def manifest(self, rank: int) -> Manifest:
        """Return the manifest of a rank whose files are present. Raises `CheckpointError`."""
        if rank not in self._manifests:
            self._manifests[rank] = self._files.manifest(self._checkpoint.of(rank))
        return self._manifests[rank]

    @property
    def first(self) -> Manifest:
        """Manifest of the first rank whose pages are read."""
        return self._first

    @property
    def files(self) -> CheckpointFiles:
        """Access to the files of the checkpoint."""
        return self._files

    @property
    def sources(self) -> list[int]:
        """Ranks whose pages are read."""
        return self._sources

    def source_of(self, rank: int) -> int:
        """Return the rank whose state file a rank restores: itself, if its part is present or can be computed from
        copies, and is read or equals one that is read. Otherwise, the source with the same slices, or the first source.
        """
        parts = self._first.parts
        same = parts[rank].slices if rank < len(parts) else ""
        source = next((source for source in self._sources if parts[source].slices == same), self._first.rank)
        present = rank in self._held.holders or rank in self._held.computed
        if rank in self._sources or (present and parts[rank][1:3] == parts[source][1:3]):
            return rank
        return source

    def kinds(self, index: int) -> tuple[tuple[str, str], ...]:
        """Return the optimizer states of a parameter, as (name, dtype)."""
        return self._first.layout.format_of(index).kinds

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer. Their `params` are indices into `tensors`."""
        return deepcopy(list(self._first.groups))

    def scalars(self) -> dict[int, dict[str, Any]]:
        """Return the scalar optimizer states of every parameter that has been updated, by index into `tensors`."""
        found: dict[int, dict[str, Any]] = {}
        for rank in self._sources:  # a rank with an empty slice may have no scalars, but another rank has them
            for index, values in self._manifests[rank].scalars.items():
                found.setdefault(index, values)
        return deepcopy(found)

    def read(self, index: int, name: str = MASTER, *, spans: Spans | None = None) -> torch.Tensor:
        """Return a parameter, in the dtype in which it is trained, or one of its optimizer states.

        Args:
            index: Index into `tensors`.
            name: ``master`` or one of `kinds`.
            spans: Slice to return. By default, the full parameter. Pages that are not needed are not read.

        Raises:
            StorageError: if a page cannot be read.
            CorruptPageError: if a page does not match its checksum.
            CheckpointError: if no rank holds one of the slices.
        """
        specs = {rank: described.tensors[index] for rank, described in self._ranks.items()}
        owners = owners_of(specs, self._folder.run_id)
        spans = full_spans(self.tensors[index].shape) if spans is None else spans
        boxes = [(rank, sizes_of(held), *box) for held, rank in owners.items() for box in overlaps(held, spans)]
        if len(boxes) == 1:  # the parameter is not copied
            return self._box(index, name, *boxes[0][:3])
        found = torch.empty(sizes_of(spans), dtype=self.dtype(index, name))
        for rank, sizes, source, target in boxes:
            found[target] = self._box(index, name, rank, sizes, source)
        return found

    def _box(self, index: int, name: str, rank: int, sizes: tuple[int, ...], box: tuple[slice, ...]) -> torch.Tensor:
        """Return a part of the slice of a parameter that a rank stores, whose shape is `sizes`."""
        strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
        first = sum(each.start * stride for each, stride in zip(box, strides, strict=True))
        last = sum((each.stop - 1) * stride for each, stride in zip(box, strides, strict=True))
        shape = [each.stop - each.start for each in box]
        return self._elements(rank, index, name, first, last + 1).as_strided(shape, strides)

    def _elements(self, rank: int, index: int, name: str, first: int, last: int) -> torch.Tensor:
        """Return elements [first, last) of a rank's shard as a flat tensor."""
        layout = self._ranks[rank].layout
        placed = layout.shards[index]
        segment = layout.segments[placed.segment]
        return read_section(
            segment,
            name,
            placed.start + first,
            placed.start + last,
            lambda page, copy: copy(self._page(rank, page.index)),
        )

    def _read_page(self, rank: int, page: int) -> memoryview:
        return self._files.page(self._manifests[rank], page)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's persistent buffers.

        Raises:
            CheckpointError: if the state file is missing or does not match its checksum.
        """
        if names := self._first.description.buffers:
            yield from self._from_state_file(lambda tensors: [(name, saved_buffer(tensors, name)) for name in names])

    def ignored_states(self) -> Mapping[str, tuple[int, dict[str, Any]]]:
        """Return the param group and the optimizer state of each parameter that `fully_shard` ignores, by name.

        Raises the same exceptions as `buffers`.
        """
        return self._from_state_file(lambda tensors: saved_state(tensors).get(IGNORED, {}))  # type: ignore[no-any-return]

    def _from_state_file(self, get: Callable[[Mapping[str, torch.Tensor]], Any]) -> Any:
        """Apply a function to the tensors of a state file."""
        data = self._files.state_file(self._first)
        with files.using(self._files.state_path(self._first)):
            return get(load_tensors(data))


def _whole(described: RunDescription) -> tuple[Any, ...]:
    """Return the properties of a description that must be equal on all ranks."""
    layout = described.layout
    formats = [layout.format_of(shard) for shard in range(len(layout.shards))]
    tensors = [(spec.names, spec.shape) for spec in described.tensors]
    return formats, tensors, described.buffers
