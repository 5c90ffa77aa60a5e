"""Arithmetic of an update within one page access: read gradients, and update master weights, states and weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.content.encoding import decode, encode
from infinity.content.format import HALVES, MASTER, SHARD_ALIGNMENT, Role
from infinity.content.layout import RANGE_ALIGNMENT, Layout, Page, Range, Segment, overlapping
from infinity.content.views import (
    Content,
    bytes_of,
    component_of,
    gradient_of,
    put,
    read_section,
    section,
    stored,
    torch_dtype,
)
from infinity.fsdp.gradient import Edit
from infinity.memory.device import DeviceEvent
from infinity.optim import optimizer_clone
from infinity.optim.fetch import Slices
from infinity.optim.full_parameter import FullParameters
from infinity.optim.kernel import Own, Piece, Scalars, UpdateKernel
from infinity.units import align_up

_DECODED = 256 * RANGE_ALIGNMENT
"""Maximum number of elements to decode at once. It limits the memory that an update uses besides the pages to 2 MiB per
section, which fits into a last-level cache. With fewer elements, Python overhead becomes measurable."""
_ALIGNED = 64
"""Alignment of PyTorch's CPU allocations, in bytes."""


def same_setting(a: Any, b: Any) -> bool:
    """Return whether setting `a` equals `b`, a copy by `settings_of`. Both may contain tensors of any size."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            return False
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
            optimizer_clone.bits(a.detach()), optimizer_clone.bits(b)
        )
    if type(a) is not type(b):
        return bool(a == b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same_setting, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_setting(value, b[key]) for key, value in a.items())
    if optimizer_clone.copied(b) is b:  # a number, a function or a dtype, which cannot change in place
        return bool(a == b)
    return bool(optimizer_clone.content(a) == optimizer_clone.content(b))


class RangePages:
    """One range (contiguous elements of a segment that are updated together), and its pages in memory.

    The master weights of a segment, and each of its optimizer states, are a *section*. Sections may be encoded, for
    example as 8-bit numbers.

    Args:
        item: the range.
        held: its pages with their bytes, in cache slots or on the GPU.
        grads: gradients of the range; ``None`` if they are in GRAD pages.
    """

    def __init__(
        self, layout: Layout, segment: Segment, item: Range, held: Sequence[tuple[Page, Content]], grads: Slices | None
    ) -> None:
        self.segment, self.item, self.grads = segment, item, grads
        self._layout, self._held = layout, held
        self._found: dict[str, tuple[int, int, torch.Tensor]] = {}  # last results of `_section_in_page`

    @classmethod
    def of(
        cls, layout: Layout, segment: Segment, position: int, contents: Mapping[int, Content], grads: Slices | None
    ) -> RangePages:
        """Return the range at a position of a segment. `contents` are the bytes of its pages, by page."""
        pages = segment.range_pages[position]
        held = [(page, contents[page.index]) for page in pages if page.index in contents]
        return cls(layout, segment, segment.ranges[position], held, grads)

    def sections(self, names: Collection[str], cuts: Sequence[tuple[int, int, int]]) -> list[dict[str, torch.Tensor]]:
        """Return views of unencoded sections, for each slice (shard, first, last). A slice must be in one page."""
        views: list[dict[str, torch.Tensor]] = []
        for _, start, stop in cuts:
            views.append({})
            for name in names:
                if (page := self._found.get(name)) is None or not page[0] <= start < page[1]:
                    page = self._found[name] = self._section_in_page(name, start)
                views[-1][name] = page[2][start - page[0] : stop - page[0]]
        return views

    def _section_in_page(self, name: str, start: int) -> tuple[int, int, torch.Tensor]:
        """Return the section in the page with element `start`, with the first element and the one after the last."""
        (component,) = self.segment.format.components[name]
        for page, content in self._held:
            if page.role is component.role and page.start <= start < page.stop:
                return page.start, page.stop, component_of(content, page, component, page.start, page.stop)
        raise AssertionError

    def pages(self, role: Role) -> list[tuple[Page, Content]]:
        """Return the pages of one role, and their bytes."""
        return [(page, content) for page, content in self._held if page.role is role]

    def gradient(self, start: int, stop: int) -> torch.Tensor:
        """Return a copy of elements [start, stop) of the stored gradient.

        A copy is needed because an optimizer may modify its gradient while the page is being written, or being read by
        the update of another range.
        """
        if start == stop:
            return torch.empty(0, dtype=torch_dtype(self.segment.format.dtypes[MASTER]), device=self._device)
        components: dict[int, list[torch.Tensor]] = {}
        for page, content in self.pages(Role.GRAD):
            low, high = max(start, page.start), min(stop, page.stop)
            if low < high:
                components.setdefault(page.component, []).append(section(content, page, self._layout, low, high))
        halved = self.segment.format.grads == HALVES  # joining halves creates a copy anyway
        whole = [
            parts[0] if len(parts) == 1 and halved else torch.cat(parts) for _, parts in sorted(components.items())
        ]
        return gradient_of(self.segment.format, whole)

    @property
    def _device(self) -> torch.device:
        content = self._held[0][1]
        return torch.device("cpu") if isinstance(content, memoryview) else bytes_of(content).device

    def decode(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return a decoded copy of elements [start, stop) of any section. The elements may span several pages."""
        contents = {page.index: content for page, content in self._held}

        def visit(page: Page, copy: Callable[[Content], None]) -> None:
            copy(contents[page.index])

        def pages(role: Role) -> list[Page]:
            return [page for page, _ in self.pages(role)]

        return read_section(self.segment, name, start, stop, visit, pages=pages, device=self._device)

    def decode_into(self, name: str, start: int, values: torch.Tensor) -> None:
        """Decode the elements of an encoded section that begin at `start` into `values`.

        The number of elements must be a multiple of the block size of the encoding.
        """
        stop, encoding = start + values.numel(), self.segment.format.encoded[name]
        if (parts := self._parts(name, start, stop)) is None:
            values.copy_(self.decode(name, start, stop))
        else:
            decode(parts, encoding, values)

    def encode(self, name: str, start: int, values: torch.Tensor, step: int) -> None:
        """Encode `values` if the section is encoded, and store them as its elements from `start` on."""
        encoding = self.segment.format.encoded.get(name)
        whole_blocks = not values.numel() % SHARD_ALIGNMENT
        if encoding and whole_blocks and (parts := self._parts(name, start, start + values.numel())) is not None:
            encode(values, encoding, step, parts)
            return
        for component, items in stored(self.segment.format, name, values, step):
            for page, content in self.pages(component.role):
                put(content, page, component, start, items)

    def _parts(self, name: str, start: int, stop: int) -> list[torch.Tensor] | None:
        """Return views of all components of elements [start, stop), or ``None`` if a component spans several pages."""
        found = []
        for component in self.segment.format.components[name]:
            for page, content in self._held:
                if page.role is component.role and page.start <= start and stop <= page.stop:
                    found.append(component_of(content, page, component, start, stop))
                    break
            else:
                return None
        return found

    def replace_weights(self) -> None:
        """Write the weights that follow from the updated master, unless they are stored as a part of the master."""
        if self.segment.format.replaces_weights:
            for page, content in self.pages(Role.PARAM):
                low, high = max(page.start, self.item.start), min(page.stop, self.item.stop)
                parts = overlapping(self.segment.update_pages, low, high) if self.segment.whole else [(None, low, high)]
                for _, first, last in parts:
                    (views,) = self.sections((MASTER,), [(-1, first, last)])
                    section(content, page, self._layout, first, last).copy_(views[MASTER])


@dataclass
class Update:
    """Update of one FSDP module.

    Updates run one after the other, and `after` is merged into `before` only at the end of an update. Therefore,
    entries of `before` do not change during an update.

    Attributes:
        layout: pages of this rank.
        kernel: update kernel.
        settings: settings of the param group of every shard with a gradient, by shard.
        before: scalar states of all shards, shared with `Updates`.
        step: number of completed steps.
        grads: flat gradients on the device, by shard; ``None`` if they are in GRAD pages.
        arrived: events after which `grads` are complete.
        edits: edits that must still be applied to gradients in GRAD pages, by shard.
        components: number of components of each gradient in GRAD pages.
        own: attributes of the optimizer at the time of the step.
        method: optimizer method to run in place of `step()`, without gradients; empty for a step.
    """

    layout: Layout
    kernel: UpdateKernel
    settings: Mapping[int, Mapping[str, Any]]
    before: Mapping[int, Scalars]
    step: int
    grads: Mapping[int, torch.Tensor] | None = None
    arrived: Sequence[DeviceEvent] = ()
    edits: Mapping[int, tuple[Edit, ...]] = field(default_factory=dict)
    components: int = 0
    own: Own = field(default_factory=dict)
    whole: FullParameters | None = None
    """Gathers parameters that must be updated as full parameters; ``None`` if this rank has all of their elements."""
    after: dict[int, Scalars] = field(default_factory=dict)
    """Scalar states of the shards after the step."""
    elements: int = 0
    """Number of elements updated so far."""
    method: str = ""
    _decoded: dict[str, torch.Tensor] = field(default_factory=dict)
    """Buffers for decoded elements, by section."""

    def run(self, ranges: Sequence[RangePages]) -> None:
        """Update the elements of several ranges. Unencoded ranges of a param group share one call of the optimizer."""
        plain = [opened for opened in ranges if not (opened.segment.format.encoded or opened.segment.whole)]
        self._run([(opened, opened.item.start, opened.item.stop) for opened in plain])
        for opened in ranges:
            item = opened.item
            if opened.segment.whole:
                self._run_whole(opened)
            elif opened.segment.format.encoded:
                for start in range(item.start, item.stop, _DECODED):
                    self._run([(opened, start, min(start + _DECODED, item.stop))])
        for opened in ranges:
            opened.replace_weights()

    def run_empty(self) -> None:
        """Advance the scalar states of shards that have no elements on this rank and therefore belong to no range."""
        for shard, group in self.settings.items():
            spec = self.layout.shards[shard].spec
            if not spec.numel and not (spec.whole and spec.padded):
                dtypes = self.layout.format_of(shard).dtypes
                views = {name: torch.empty(0, dtype=torch_dtype(dtype)) for name, dtype in dtypes.items()}
                master = views.pop(MASTER)
                piece = Piece(shard, master, torch.empty_like(master), views)
                self.after.update(self.kernel.update([piece], group, self.before, self.own))

    def _run(self, parts: Sequence[tuple[RangePages, int, int]]) -> None:
        """Update elements [start, stop) of several ranges: in the pages or, if they are encoded, in decoded buffers."""
        decoded: list[tuple[RangePages, int, str, torch.Tensor]] = []
        by_group: dict[int, tuple[Mapping[str, Any], list[Piece]]] = {}
        for opened, start, stop in parts:
            fmt, cuts = opened.segment.format, self._cuts(opened, start, stop)
            plain = [name for name in fmt.dtypes if name not in fmt.encoded] if fmt.encoded else fmt.dtypes
            sections, grads = opened.sections(plain, cuts), self._gradients(opened, cuts, start, stop)
            for (shard, low, high), views, grad in zip(cuts, sections, grads, strict=True):
                for name in fmt.encoded:
                    values = self._buffer(name, low - start, align_up(high, SHARD_ALIGNMENT) - start)
                    opened.decode_into(name, low, values)
                    decoded.append((opened, low, name, values))
                    views[name] = values[: high - low]
                group = self.settings[shard]
                piece = Piece(shard, views.pop(MASTER), grad, views)
                by_group.setdefault(id(group), (group, []))[1].append(piece)
                self.elements += high - low
        for group, pieces in by_group.values():
            self.after.update(self.kernel.update(pieces, group, self.before, self.own, self.method))
        for opened, low, name, values in decoded:
            opened.encode(name, low, values, self.step)

    def _buffer(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of the decoding buffer of a section, which the whole FSDP module shares."""
        if name not in self._decoded:
            self._decoded[name] = torch.empty(_DECODED)
        return self._decoded[name][start:stop]

    def _run_whole(self, opened: RangePages) -> None:
        """Update a full parameter on copies of its pages, after gathering the slices of other ranks if necessary."""
        (shard,) = opened.item.shards
        if shard not in self.settings:
            return
        placed, fmt = self.layout.shards[shard], opened.segment.format
        start, stop = placed.start, placed.start + placed.spec.numel
        views = {name: opened.decode(name, start, stop) for name in fmt.dtypes}
        (grad,) = self._gradients(opened, [(shard, start, stop)], start, stop)
        if grad is not None and grad.data_ptr() % _ALIGNED:
            grad = grad.clone()  # matrix products of unaligned tensors may be summed in a different order
        if self.whole is not None:
            self.whole.meet(shard, self.step)
            grad = self.whole.gather(shard, grad) if grad is not None else None
            views = {name: self.whole.gather(shard, values) for name, values in views.items()}
        piece = Piece(shard, views.pop(MASTER), grad, views)
        self.after.update(self.kernel.update([piece], self.settings[shard], self.before, self.own, self.method))
        self.elements += placed.spec.numel
        for name, values in {MASTER: piece.master, **views}.items():
            opened.encode(name, start, self.whole.own(shard, values) if self.whole is not None else values, self.step)

    def _cuts(self, opened: RangePages, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return (shard, first, last) for each slice of a shard with a gradient within elements [start, stop).

        If the PARAM pages hold the master weights, no slice crosses a page boundary.
        """
        borders = [] if opened.segment.format.master else [page.start for page, _ in opened.pages(Role.PARAM)]
        found = []
        for shard in opened.item.shards:
            placed = self.layout.shards[shard]
            low, high = max(placed.start, start), min(placed.start + placed.spec.numel, stop)
            if shard not in self.settings or low >= high:
                continue
            for border in borders:
                if low < border < high:
                    found.append((shard, low, border))
                    low = border
            found.append((shard, low, high))
        return found

    def _gradients(
        self, opened: RangePages, cuts: Sequence[tuple[int, int, int]], start: int, stop: int
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradients of slices (shard, first, last) of a range, which are within elements [start, stop)."""
        if self.method or not cuts:
            return [None] * len(cuts)
        if opened.grads is not None:
            found = []
            for shard, low, high in cuts:
                first, flat = opened.grads[shard]
                found.append(flat[low - first : high - first])
            return found
        whole = opened.gradient(start, stop)
        parts = [whole[low - start : high - start] for _, low, high in cuts]
        edits = [self.edits.get(shard, ()) for shard, _, _ in cuts]
        # Operations such as clipping record the same edits for all gradients, so apply them in one piece
        alike = len(set(edits)) == 1
        for part, of_part in [(whole, edits[0])] if alike else zip(parts, edits, strict=True):
            for edit in of_part:
                edit(part)
        return parts
