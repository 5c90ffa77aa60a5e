"""Read and write the content of whole shards through the pager."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple, Protocol

import torch

from infinity import interrupts, torch_private
from infinity.content.format import MASTER
from infinity.content.layout import Layout, Page, WeightPart, overlapping
from infinity.content.views import Content, bytes_of, clear, put, read_section, stored, torch_dtype
from infinity.errors import InfinityError, UnsupportedError
from infinity.fsdp.staging import GpuPrefetcher, ModuleWeights
from infinity.memory.device import Device
from infinity.schedule.pager import Pager
from infinity.schedule.trace import Access, Mode, Use
from infinity.telemetry.ledger import Ledger
from infinity.units import format_size


class GatherListener(Protocol):
    """Listener that is notified when shards are used."""

    def gathering(self, fsdp_module: int) -> bool:
        """Called before the weights of an FSDP module are copied for an all-gather.

        Returns:
            Whether the all-gather belongs to a training step.
        """

    def gathered(self, fsdp_module: int) -> None:
        """Called after the weights of an FSDP module have been copied for an all-gather in a training step."""

    def look(self, shard: int) -> None:
        """Flush the pending updates of a shard before its weights or optimizer states are read or written."""


class _OpenRun(NamedTuple):
    pager: Pager
    listener: GatherListener
    ledger: Ledger
    gpu_prefetcher: GpuPrefetcher
    allow_new_versions: Callable[[Iterable[int]], None]


class _Gather:
    """Gather of one FSDP module, from its first shard to its last.

    FSDP2 provides the destination of one shard at a time. If the weights are in the host cache, the pages of a batch
    are held until another batch is needed. If they are in device memory (`inputs`), FSDP2 itself copies all shards but
    the last one.
    """

    def __init__(self, device: Device, opened: _OpenRun, weights: ModuleWeights) -> None:
        self._device, self._opened, self._weights, self.fsdp_module = device, opened, weights, weights.fsdp_module
        # Parts of every shard, by shard and by number of the batch whose pages contain them
        self._parts: dict[int, dict[int, list[WeightPart]]] = defaultdict(dict)
        self._nbytes = Counter[int]()  # bytes of the weights by shard, padding included
        for number, (_, parts) in enumerate(weights.batches):
            for part in parts:
                self._parts[part.shard].setdefault(number, []).append(part)
                self._nbytes[part.shard] += part.nbytes
        self.nbytes = self._nbytes.total()
        """Bytes of all weights."""
        self.planned = False
        """``True`` if the current gather is part of a training step."""
        self.inputs: Mapping[int, torch.Tensor] = {}
        """Weights that are in device memory during the current gather, flat, in the compute dtype, by shard. Empty if
        the weights are in the host cache.
        """
        self.prefetched = False
        """``True`` if the weights of the current gather were prefetched."""
        self._held: AbstractContextManager[list[Content]] | None = None
        self._batch = -1  # number of the batch that is held
        self._contents: dict[int, Content] = {}  # contents of its pages, by page

    def begin(self, *, planned: bool) -> None:
        """Begin to gather. `planned` is whether the gather belongs to a training step."""
        self.planned, self.inputs = planned, {}
        self.prefetched = planned and self._opened.gpu_prefetcher.has(self.fsdp_module)
        if self.prefetched:
            self.inputs = self._opened.gpu_prefetcher.weights(self.fsdp_module)
        elif planned and self._opened.pager.gpu_resident(self.fsdp_module):
            self._hold(tuple(dict.fromkeys(use for access, _ in self._weights.batches for use in access)))
            self.inputs = self._opened.pager.gpu_resident_weights(self.fsdp_module)

    def copy(self, shard: int, destination: torch.Tensor) -> None:
        """Copy the weights of a shard, padding included, on the current stream."""
        assert destination.nbytes == self._nbytes[shard], "the all-gather input has a different dtype"
        if self.inputs:
            destination.view(-1).copy_(self.inputs[shard].view(destination.dtype))
            return
        into = destination.view(-1).view(torch.uint8)
        for batch, parts in self._parts[shard].items():
            if batch != self._batch:
                self._hold(self._weights.batches[batch][0])
                self._batch = batch
            targets, sources = [], []
            for _, page, offset, start, nbytes in parts:
                targets.append(into[start : start + nbytes])
                sources.append(bytes_of(self._contents[page], offset, nbytes))
            with self._opened.ledger.part("copy"):
                self._device.copy_all(targets, sources)

    def _hold(self, uses: Access) -> None:
        self.release()
        copied = partial(self._device.record_event, self._device.current())
        held = self._opened.pager.access(uses, planned=self.planned, copies=copied)
        with interrupts.held(waits=False):  # an interrupt before `_held` is set would keep the pages pinned
            contents = held.__enter__()
            self._held = held
        self._contents = {use.page: content for use, content in zip(uses, contents, strict=True)}

    def release(self) -> None:
        """Release the pages and the device memory that are held. Idempotent."""
        self.inputs = {}
        if self._held is not None:
            interrupts.begin()  # after an interrupt, the pages would stay pinned
            try:
                held, self._held, self._batch, self._contents = self._held, None, -1, {}
                held.__exit__(None, None, None)
            finally:
                interrupts.end()


class ShardIO:
    """Gathers, loads and saves whole shards through the pager.

    The object exists as long as the tensors of the model. After `close`, its methods raise `InfinityError` with the
    reason. Only the training thread calls its methods.
    """

    def __init__(
        self,
        layout: Layout,
        pager: Pager,
        device: Device,
        gpu_prefetcher: GpuPrefetcher,
        listener: GatherListener,
        ledger: Ledger,
        *,
        load_limit: int,
        allow_new_versions: Callable[[Iterable[int]], None],
    ) -> None:
        """Create the source of a model's shards.

        Args:
            gpu_prefetcher: GPU prefetch buffer, which may hold weights ahead of their gather.
            load_limit: Maximum total size, in bytes, of loaded tensors that are alive at the same time. They are stored
                outside the host cache.
            allow_new_versions: Callback that frees drive space for new versions of frozen pages. It receives the
                indices of the pages before they are rewritten.
        """
        self._layout, self._device, self._load_limit = layout, device, load_limit
        self._open: _OpenRun | None  # None once closed
        self._open = _OpenRun(pager, listener, ledger, gpu_prefetcher, allow_new_versions)
        self._why_closed = "the optimizer of this model was closed, so the model's values are no longer available"
        self._gathers: dict[int, _Gather] = {}  # by FSDP module
        self._gather: _Gather | None = None  # gather in progress
        self.inputs: Mapping[int, torch.Tensor] = {}
        """Weights that are in device memory during the gather in progress, except those of its first and last shard."""
        # Bytes that `load` has returned, minus the entries that `_held` has consumed from `_returned`.
        self._loaded = 0
        # Sizes, in bytes, of loaded tensors that have been freed. Any thread may append to it, even from within the
        # garbage collector, where taking a lock could deadlock. `deque.append` is atomic and needs no lock.
        self._returned: deque[int] = deque()

    def close(self, why: str = "") -> None:
        """Release the objects of the run, because uncollectable reference cycles may keep this object alive.

        Args:
            why: Message of later errors. By default, it states that the optimizer was closed.
        """
        self._drop_gather()
        self._open, self._gathers = None, {}
        self._why_closed = why or self._why_closed

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._open is None

    @property
    def _opened(self) -> _OpenRun:
        if self._open is None:
            raise InfinityError(self._why_closed)
        return self._open

    def fail(self, error: Exception) -> None:
        """End the run on all ranks with `error`. Without an open run, do nothing."""
        if self._open is not None:
            self._open.pager.fail(error)

    def gather_input(self, shard: int) -> torch.Tensor | None:
        """Return the weights of a shard that is not in `inputs`. The first shard of an FSDP module begins the gather.

        Returns:
            The weights in the compute dtype, padding included, flat. ``None`` if the caller must gather the shard with
            `gather_into`, because the weights are not in device memory, or because the shard is the last one.
        """
        fsdp_module = self._layout.shards[shard].fsdp_module
        shards = self._layout.fsdp_module_shards[fsdp_module]
        if shard != shards[0]:
            return None
        inputs = dict(self._begin_gather(fsdp_module).inputs)
        inputs.pop(shards[-1], None)
        first = inputs.pop(shard, None)
        self.inputs = inputs
        return first

    def gather_into(self, shard: int, destination: torch.Tensor) -> None:
        """Copy the elements of a shard in the compute dtype, padding included.

        Args:
            destination: Contiguous tensor in the compute dtype, or its bytes as uint8.
        """
        fsdp_module = self._layout.shards[shard].fsdp_module
        shards = self._layout.fsdp_module_shards[fsdp_module]
        gather = self._gather
        try:
            if gather is None or gather.fsdp_module != fsdp_module:
                gather = self._begin_gather(fsdp_module)
            with torch_private.profiled(f"infinity::gather ({self._layout.shards[shard].spec.name})"):
                gather.copy(shard, destination)
            if shard == shards[-1]:
                self._end_gather(gather, self._opened)
        except BaseException:
            self._drop_gather()
            raise

    def _begin_gather(self, fsdp_module: int) -> _Gather:
        if self._gather is not None:
            self._drop_gather()
        opened, name = self._opened, self._layout.fsdp_modules[fsdp_module].name
        with opened.ledger.part("python", name, name="gather"):
            planned = opened.listener.gathering(fsdp_module)
        if fsdp_module not in self._gathers:
            self._gathers[fsdp_module] = _Gather(self._device, opened, opened.gpu_prefetcher.modules[fsdp_module])
        self._gather = gather = self._gathers[fsdp_module]
        try:
            gather.begin(planned=planned)
        except BaseException:
            self._drop_gather()
            raise
        return gather

    def _end_gather(self, gather: _Gather, opened: _OpenRun) -> None:
        if gather.prefetched:
            opened.gpu_prefetcher.release(gather.fsdp_module)
        self._drop_gather()
        opened.ledger.copied(gather.nbytes)
        if gather.planned:
            with opened.ledger.part("python"):
                opened.listener.gathered(gather.fsdp_module)

    def _drop_gather(self) -> None:
        """Release the gather in progress, even if FSDP2 did not complete it."""
        gather, self._gather, self.inputs = self._gather, None, {}
        if gather is not None:
            gather.release()

    def _held(self) -> int:
        """Return the total size, in bytes, of the loaded tensors that are still alive."""
        while self._returned:
            self._loaded -= self._returned.popleft()
        return self._loaded

    def load(self, shard: int, name: str = MASTER) -> torch.Tensor:
        """Return one section of a shard (its master or one optimizer state) without padding, shape (numel,).

        Args:
            name: ``master`` or the name of an optimizer state.

        Raises:
            UnsupportedError: If this tensor and the loaded tensors that are still alive would exceed the load limit.
            InfinityError: If the shard was updated in backward and `step()` has not been called, or if the run is
                closed.
        """
        placed = self._layout.shards[shard]
        segment = self._layout.segments[placed.segment]
        size = placed.spec.numel * torch_dtype(segment.format.dtypes[name]).itemsize
        if size + self._held() > self._load_limit:
            gc.collect()  # the traceback of an earlier error may keep loaded tensors alive
        if size + self._held() > self._load_limit:
            held = f" in addition to {format_size(self._loaded)} already loaded" if self._loaded else ""
            raise UnsupportedError(
                f"loading {placed.spec.name} would use {format_size(size)} of host memory outside the host cache{held} "
                f"(limit {format_size(self._load_limit)}); to save in bounded memory, call "
                "torch.distributed.checkpoint.save (dcp.save), optimizer.save_pretrained or optimizer.save_checkpoint"
            )
        content = self.read(shard, name)
        self._loaded += content.nbytes
        weakref.finalize(content.untyped_storage(), self._returned.append, content.nbytes).atexit = False
        return content

    def read(self, shard: int, name: str) -> torch.Tensor:
        """Return the same section as `load`, without applying the load limit.

        The caller must free the tensor before the next read.

        Raises:
            InfinityError: See `load`.
        """
        placed = self._layout.shards[shard]
        segment = self._layout.segments[placed.segment]
        self._opened.listener.look(shard)

        def visit(page: Page, copy: Callable[[Content], None]) -> None:
            with self._opened.pager.access((Use(page.index, Mode.READ),), planned=False) as (content,):
                copy(content)

        return read_section(segment, name, placed.start, placed.start + placed.spec.numel, visit)

    def save(self, shard: int, content: torch.Tensor, name: str = MASTER) -> None:
        """Replace one section of a shard.

        Args:
            content: New elements, without padding, shape (numel,).
            name: ``master``, which also replaces the weights in the compute dtype, or the name of an optimizer state.

        Raises:
            UnsupportedError: If `content` has a different number of elements.
            BudgetError: If the shard is frozen and the drives have no space for a new version.
            InfinityError: See `load`.
        """
        placed = self._layout.shards[shard]
        segment = self._layout.segments[placed.segment]
        if content.numel() != placed.spec.numel:
            raise UnsupportedError(
                f"{placed.spec.name} has {placed.spec.numel} elements on this rank, but the new value has "
                f"{content.numel()}"
            )
        self._opened.listener.look(shard)
        self._opened.gpu_prefetcher.drop(placed.fsdp_module)
        begin, end = placed.start, placed.start + placed.spec.numel
        if not segment.trainable:
            pages = (*segment.param_pages, *segment.update_pages)
            self._opened.allow_new_versions(page.index for page in pages if page.start < end and page.stop > begin)
        with interrupts.held():
            for component, items in stored(segment.format, name, content.detach().cpu()):
                for page, _, _ in overlapping(segment.pages(component.role), begin, end):
                    with self._opened.pager.access((Use(page.index, Mode.UPDATE),), planned=False) as (held,):
                        put(held, page, component, placed.start, items)

    def write_module(
        self, fsdp_module: int, value_of: Callable[[int, str], torch.Tensor | None], *, frozen: bool = True
    ) -> None:
        """Write the content of an FSDP module's pages without reading them first.

        Args:
            value_of: Function that returns one section of a shard, without padding, shape (numel,), or ``None`` for
                zeros. Its arguments are the position of the shard in the FSDP module, and ``master`` or the name of an
                optimizer state. The master has the dtype of the parameter.
            frozen: Whether to write the pages of frozen parameters, too.
        """
        first = self._layout.fsdp_module_shards[fsdp_module][0]
        for segment in self._layout.segments:
            if segment.fsdp_module != fsdp_module or not (frozen or segment.trainable):
                continue
            parts = [
                (self._layout.shards[shard].start, component, items)
                for shard in segment.shards
                for name in segment.format.dtypes
                if (value := value_of(shard - first, name)) is not None
                for component, items in stored(segment.format, name, self.checked(shard, name, value))
            ]
            for page in (*segment.param_pages, *segment.update_pages):
                with self._opened.pager.access((Use(page.index, Mode.WRITE),), planned=False) as (content,):
                    clear(content)
                    for start, component, items in parts:
                        if component.role is page.role:
                            put(content, page, component, start, items)

    def checked(self, shard: int, name: str, value: torch.Tensor) -> torch.Tensor:
        """Check the size and dtype of a value, because excess elements would overwrite the next shard.

        Raises:
            UnsupportedError: If they do not match the section.
        """
        spec, segment = self._layout.shards[shard].spec, self._layout.segments[self._layout.shards[shard].segment]
        wanted = torch_dtype(segment.format.dtypes[name])
        if value.numel() != spec.numel or value.dtype != wanted:
            raise UnsupportedError(
                f"the value of {spec.name} ({name}) has {value.numel()} elements of {value.dtype} on this "
                f"rank, but must have {spec.numel} of {wanted}"
            )
        return value
