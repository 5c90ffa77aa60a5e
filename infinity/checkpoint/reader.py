"""Checkpoint reader that assembles full parameters from the pages of all ranks.

It needs no model, process group or GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch

from infinity.checkpoint import manifest as files
from infinity.checkpoint.description import RunDescription, TensorSpec
from infinity.checkpoint.full_state import FullState, owners_of
from infinity.checkpoint.manifest import CheckpointName, Manifest
from infinity.checkpoint.model_state import load_tensors, saved_buffer
from infinity.checkpoint.module_state import IGNORED, saved_state
from infinity.content.format import MASTER
from infinity.content.views import read_section, torch_dtype
from infinity.errors import CheckpointError
from infinity.store.folder import RunFolder
from infinity.store.page_store import Version, read_version

_CACHED_PAGES = 4
ReadPage = Callable[[int, int, Version, str], memoryview]
"""Function that returns the verified bytes of a page. Arguments: rank, page, version, and readable name of the page."""


class CheckpointReader(FullState):
    """One checkpoint of a run. Memory use is limited to one parameter and a few pages.

    The object does not change after construction. Files are opened for each read and closed afterwards. The run may be
    live and may remove the checkpoint in the meantime, in which case the next read raises an error.
    """

    def __init__(
        self, folder: RunFolder, step: int | CheckpointName = -1, *, read_page: ReadPage | None = None
    ) -> None:
        """Read the manifests of all ranks.

        Args:
            folder: Folders of the run, in the order of storage.paths.
            step: Step of the checkpoint, -1 for the newest one that all ranks hold, or the name of the checkpoint.
            read_page: Function that reads a page, if pages are not in the data files of `folder`.

        Raises:
            CheckpointError: if there is no such checkpoint, or if it is incomplete or malformed.
        """
        self._folder = folder
        if isinstance(step, CheckpointName):
            checkpoint = step
        else:
            checkpoints = files.complete_checkpoints(files.published_in(folder.checkpoints))
            checkpoint = files.choose_checkpoint(folder.run_id, checkpoints, step)
        self._step = checkpoint.step
        names = [checkpoint.of(rank).file_name for rank in range(checkpoint.world_size)]
        self._manifests: list[Manifest] = [files.read_manifest(folder.checkpoints / name) for name in names]  # by rank
        self._ranks: list[RunDescription] = [manifest.description for manifest in self._manifests]  # by rank
        for described, manifest in zip(self._ranks, self._manifests, strict=True):
            if _whole(described) != _whole(self._ranks[0]):
                file = folder.checkpoints / manifest.file_name
                raise CheckpointError(f"{file} is malformed: its parameters differ from the parameters of rank 0")
            if read_page is None:
                files.check_pages(manifest, folder)
            files.read_state_file(folder.checkpoints, manifest)  # a checkpoint that cannot be resumed is not exported
        self._read_file = read_page or self._read_data_file
        self._page = lru_cache(_CACHED_PAGES)(self._read_page)  # bytes of a page, by rank and index

    @property
    def updated_on(self) -> str:
        """Type of the device that ran updates."""
        return self._manifests[0].updated_on

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All parameters, in the order of their shards."""
        return self._ranks[0].tensors

    @property
    def extra(self) -> dict[str, object]:
        """User data, as passed to `save_checkpoint()`."""
        return self._manifests[0].extra

    def dtype(self, index: int, name: str = MASTER) -> torch.dtype:
        """Return the dtype in which a parameter is trained, or the dtype of one of its optimizer states."""
        return torch_dtype(self._ranks[0].layout.format_of(index).dtypes[name])

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self._step

    @property
    def folder(self) -> RunFolder:
        """Folders of the run."""
        return self._folder

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote the checkpoint."""
        return len(self._ranks)

    def manifest(self, rank: int) -> Manifest:
        """Return the manifest of one rank."""
        return self._manifests[rank]

    def kinds(self, index: int) -> tuple[tuple[str, str], ...]:
        """Return the optimizer states of a parameter, as (name, dtype)."""
        return self._ranks[0].layout.format_of(index).kinds

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer. Their `params` are indices into `tensors`."""
        return deepcopy(list(self._manifests[0].groups))

    def scalars(self) -> dict[int, dict[str, Any]]:
        """Return the scalar optimizer states of every parameter that has been updated, by index into `tensors`."""
        found: dict[int, dict[str, Any]] = {}
        for manifest in self._manifests:  # a rank with an empty slice may have no scalars, but another rank has them
            for index, values in manifest.scalars.items():
                found.setdefault(index, values)
        return deepcopy(found)

    def read(self, index: int, name: str = MASTER, *, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Return a parameter, in the dtype in which it is trained, or one of its optimizer states, in full shape.

        Args:
            index: Index into `tensors`.
            name: ``master`` or one of `kinds`.
            rows: Rows [first, last) to return along the sharded dimension. By default, all rows. Pages that contain
                none of these rows are not read.

        Raises:
            StorageError: if a page cannot be read.
            CorruptPageError: if a page does not match its checksum.
            CheckpointError: if no rank holds one of the slices, or if the parameter is tensor-parallel.
        """
        spec = self.tensors[index]
        owners = owners_of([described.tensors[index] for described in self._ranks], self._folder.run_id)
        first, last = rows or (0, spec.shape[spec.dim] if spec.shape else 1)
        parts = []
        for position in range(spec.shard_size):
            start, stop = spec.slice_of(position)
            low, high = max(first, start), min(last, stop)
            if low < high:
                parts.append(self._rows(owners[position], index, name, stop - start, low - start, high - start))
        if not parts:
            empty = (*spec.shape[: spec.dim], 0, *spec.shape[spec.dim + 1 :])
            return torch.empty(empty, dtype=self.dtype(index, name))
        whole = torch.cat(parts, dim=spec.dim) if len(parts) > 1 else parts[0]
        return whole if spec.shape else whole.view(())

    def _rows(self, rank: int, index: int, name: str, held: int, low: int, high: int) -> torch.Tensor:
        """Return rows [low, high) of the `held` rows of a parameter that a rank stores."""
        spec = self.tensors[index]
        before, after = spec.shape[: spec.dim], spec.shape[spec.dim + 1 :]
        if math.prod(before) == 1:  # the rows are contiguous
            width = math.prod(after)
            return self._elements(rank, index, name, low * width, high * width).view(*before, high - low, *after)
        numel = self._ranks[rank].layout.shards[index].spec.numel
        return self._elements(rank, index, name, 0, numel).view(*before, held, *after).narrow(spec.dim, low, high - low)

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
        version = self._manifests[rank].pages[page]
        return self._read_file(rank, page, version, self._ranks[rank].layout.page_name(page))

    def _read_data_file(self, rank: int, page: int, version: Version, name: str) -> memoryview:
        return read_version(self._folder.data_file(version.extent.path, rank), page, version, name)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's persistent buffers.

        Raises:
            CheckpointError: if the state file is missing or does not match its checksum.
        """
        if names := self._ranks[0].buffers:
            yield from self._from_state_file(lambda tensors: [(name, saved_buffer(tensors, name)) for name in names])

    def ignored_states(self) -> Mapping[str, tuple[int, dict[str, Any]]]:
        """Return the param group and the optimizer state of each parameter that `fully_shard` ignores, by name.

        Raises the same exceptions as `buffers`.
        """
        return self._from_state_file(lambda tensors: saved_state(tensors).get(IGNORED, {}))  # type: ignore[no-any-return]

    def _from_state_file(self, get: Callable[[Mapping[str, torch.Tensor]], Any]) -> Any:
        """Apply a function to the tensors of the state file of rank 0."""
        data = files.read_state_file(self._folder.checkpoints, self._manifests[0])
        with files.using(self._folder.checkpoints / self._manifests[0].state_file):
            return get(load_tensors(data))


def _whole(described: RunDescription) -> tuple[Any, ...]:
    """Return the properties of a description that must be equal on all ranks."""
    layout = described.layout
    formats = [layout.format_of(shard) for shard in range(len(layout.shards))]
    tensors = [(spec.names, spec.dim, spec.shard_size, spec.tensor_parallel) for spec in described.tensors]
    shapes = [() if spec.tensor_parallel else spec.shape for spec in described.tensors]
    return formats, tensors, shapes, described.buffers
