"""The arithmetic of an update inside one access: gradients, master and moments in, weights out."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.content.encoding import decode, encode
from infinity.content.format import HALVES, MASTER, SHARD_ALIGNMENT, Component, Role
from infinity.content.layout import RANGE_ALIGNMENT, Layout, Page, Range, Segment, overlapping
from infinity.content.views import Content, component_of, gradient_of, put, read_section, section, stored, torch_dtype
from infinity.errors import UnsupportedError
from infinity.fsdp.gradient import Edit
from infinity.memory.device import DeviceEvent
from infinity.optim import optimizer_clone
from infinity.optim.fetch import Slices
from infinity.optim.full_parameter import FullParameters
from infinity.optim.kernel import Own, Piece, Scalars, UpdateKernel
from infinity.schedule.trace import Access
from infinity.units import align_up

_DECODED = 256 * RANGE_ALIGNMENT
"""Most elements that are decoded at once: what an update needs beside the pages is bounded, to 2 MiB for each section,
which a last-level cache holds. With fewer, Python between them shows."""
_ALIGNED = 64
"""Bytes to which torch aligns what it allocates."""


def snapshot(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a param group as they are now; what is changed in place later is not changed there.

    Raises:
        UnsupportedError: a setting cannot be copied.
    """
    return {key: _fixed(key, value) for key, value in group.items() if key != "params"}


def _fixed(key: str, value: Any) -> Any:
    if isinstance(value, tuple | list) and all(isinstance(item, float | int | str) for item in value):
        return value if type(value) is tuple else copy.copy(value)  # such as betas, or the names of all parameters
    try:
        return optimizer_clone.copied(value)
    except Exception as error:
        raise UnsupportedError(
            f"{key}, of type {type(value).__name__}, in a param group cannot be copied, and updates use the settings "
            f"as the step has found them: {error}"
        ) from error


def same_setting(a: Any, b: Any) -> bool:
    """Whether a setting is the same as one of a `snapshot`; tensors of any size may be among them."""
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
    if optimizer_clone.copied(b) is b:  # a number, a function, a dtype: what is never changed in place
        return bool(a == b)
    return bool(optimizer_clone.content(a) == optimizer_clone.content(b))


class RangePages:
    """One range of a segment's update, and the pages that it needs, in memory.

    `access` is what `range_access` returns for it, `contents` are the bytes of the pages of the access, in cache slots
    or on
    the device. `grads` are its gradients; None where they are in GRAD pages.
    """

    def __init__(
        self,
        layout: Layout,
        segment: Segment,
        item: Range,
        access: Access,
        contents: Sequence[Content],
        grads: Slices | None,
    ) -> None:
        self.segment, self.item, self.grads = segment, item, grads
        self._layout = layout
        # Pages and their bytes.
        self._held = [(layout.pages[use.page], content) for use, content in zip(access, contents, strict=True)]

    def pages(self, role: Role) -> list[tuple[Page, Content]]:
        """Return pages and their bytes."""
        return [(page, content) for page, content in self._held if page.role is role]

    def state(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop), of one page, of a section that is stored as the optimizer sees it: a view."""
        (component,) = self.segment.format.components[name]
        page, content = next(held for held in self.pages(component.role) if held[0].start <= start < held[0].stop)
        return component_of(content, page, component, start, stop)

    def gradient(self, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of the gradient that is stored: a copy.

        Optimizers may change what they are given, while the page is being written, or read by another range's update.
        """
        if start == stop:
            return torch.empty(0, dtype=torch_dtype(self.segment.format.dtypes[MASTER]), device=self._device)
        components: dict[int, list[torch.Tensor]] = {}
        for page, content in self.pages(Role.GRAD):
            low, high = max(start, page.start), min(stop, page.stop)
            if low < high:
                components.setdefault(page.component, []).append(section(content, page, self._layout, low, high))
        halved = self.segment.format.grads == HALVES  # what is joined from halves is a copy anyway
        whole = [
            parts[0] if len(parts) == 1 and halved else torch.cat(parts) for _, parts in sorted(components.items())
        ]
        return gradient_of(self.segment.format, whole)

    @property
    def _device(self) -> torch.device:
        """Where the pages are."""
        content = self._held[0][1]
        return content.device if isinstance(content, torch.Tensor) else torch.device("cpu")

    def decode(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of a section that is stored otherwise, or in several pages: a copy."""
        contents = {page.index: content for page, content in self._held}

        def visit(page: Page, copy: Callable[[Content], None]) -> None:
            copy(contents[page.index])

        return read_section(self.segment, name, start, stop, visit, device=self._device)

    def decode_into(self, name: str, start: int, values: torch.Tensor) -> None:
        """Decode elements from `start` on of a section that has an encoding; their number is one of whole blocks."""
        stop, encoding = start + len(values), self.segment.format.encoded[name]
        if (parts := self._parts(name, start, stop)) is None:
            values.copy_(self.decode(name, start, stop))
        else:
            decode(parts, encoding, values)

    def encode(self, name: str, start: int, values: torch.Tensor, step: int) -> None:
        """Store elements from `start` on of a section as `decode` and `decode_into` read them."""
        encoding = self.segment.format.encoded.get(name)
        whole_blocks = not len(values) % SHARD_ALIGNMENT
        if encoding and whole_blocks and (parts := self._parts(name, start, start + len(values))) is not None:
            encode(values, encoding, step, parts)
            return
        for component, items in stored(self.segment.format, name, values, step):
            for page, content in self.pages(component.role):
                put(content, page, component, start, items)

    def _parts(self, name: str, start: int, stop: int) -> list[torch.Tensor] | None:
        """Return the components of elements [start, stop) of a section as views, if each of them is in one page."""
        found = [self._part(component, start, stop) for component in self.segment.format.components[name]]
        parts = [part for part in found if part is not None]
        return parts if len(parts) == len(found) else None

    def _part(self, component: Component, start: int, stop: int) -> torch.Tensor | None:
        for page, content in self.pages(component.role):
            if page.start <= start and stop <= page.stop:
                return component_of(content, page, component, start, stop)
        return None

    def replace_weights(self) -> None:
        """Write the weights that the updated master makes, where they are no part of it."""
        if self.segment.format.replaces_weights:
            for page, content in self.pages(Role.PARAM):
                low, high = max(page.start, self.item.start), min(page.stop, self.item.stop)
                parts = overlapping(self.segment.update_pages, low, high) if self.segment.whole else [(None, low, high)]
                for _, first, last in parts:
                    section(content, page, self._layout, first, last).copy_(self.state(MASTER, first, last))


@dataclass
class Update:
    """The update of one FSDP module.

    `settings` has those of its group for every shard that has a gradient; `before` is what `Updates` keeps of all
    shards: of these nothing changes there until this update has ended, as updates run one after the other and `after`
    is taken over last. The number of the step is `step`. Gradients are in `grads` by shard, flat, on the device, which
    has them behind all of `arrived`; or else `components` of each are in GRAD pages, and `edits` are still to be done
    to them, by shard. `own` is what the optimizer keeps on itself, as the step found it.
    With a `method`, that runs in place of a step, and there are no gradients.
    """

    layout: Layout
    kernel: UpdateKernel
    settings: Mapping[int, Mapping[str, Any]]
    before: Mapping[int, Scalars]
    step: int
    grads: Mapping[int, torch.Tensor] | None = None
    arrived: Sequence[DeviceEvent] = ()
    edits: Mapping[int, Sequence[Edit]] = field(default_factory=dict)
    components: int = 0
    own: Own = field(default_factory=dict)
    whole: FullParameters | None = None
    """Brings slices of parameters that are updated whole together; None where this rank has all of each."""
    after: dict[int, Scalars] = field(default_factory=dict)
    """Scalars of the shards after the step."""
    elements: int = 0
    """Elements updated so far."""
    method: str = ""
    _decoded: dict[str, torch.Tensor] = field(default_factory=dict)
    """Memory for what is decoded, by section."""

    def run(self, ranges: Sequence[RangePages]) -> None:
        """Update the elements of some ranges; those that are stored as the optimizer sees them in one call of it."""
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
        """Advance the scalars of shards of which this rank has no elements, which are in no range."""
        for shard, group in self.settings.items():
            spec = self.layout.shards[shard].spec
            if not spec.numel and not (spec.whole and spec.padded):
                dtypes = self.layout.format_of(shard).dtypes
                views = {name: torch.empty(0, dtype=torch_dtype(dtype)) for name, dtype in dtypes.items()}
                master = views.pop(MASTER)
                piece = Piece(shard, master, torch.empty_like(master), views)
                self.after.update(self.kernel.update([piece], group, self.before, self.own))

    def _run(self, parts: Sequence[tuple[RangePages, int, int]]) -> None:
        """Update elements [start, stop) of some ranges: in the pages, or, what is stored otherwise, decoded."""
        decoded: list[tuple[RangePages, int, str, torch.Tensor]] = []
        by_group: dict[int, tuple[Mapping[str, Any], list[Piece]]] = {}
        for opened, start, stop in parts:
            fmt = opened.segment.format
            for shard, low, high in self._cuts(opened, start, stop):
                views = {name: opened.state(name, low, high) for name in fmt.dtypes if name not in fmt.encoded}
                for name in fmt.encoded:
                    values = self._room(name, low - start, align_up(high, SHARD_ALIGNMENT) - start)
                    opened.decode_into(name, low, values)
                    decoded.append((opened, low, name, values))
                    views[name] = values[: high - low]
                group = self.settings[shard]
                piece = Piece(shard, views.pop(MASTER), self._gradient(opened, shard, low, high), views)
                by_group.setdefault(id(group), (group, []))[1].append(piece)
        for group, pieces in by_group.values():
            self.after.update(self.kernel.update(pieces, group, self.before, self.own, self.method))
            self.elements += sum(piece.master.numel() for piece in pieces)
        for opened, low, name, values in decoded:
            opened.encode(name, low, values, self.step)

    def _room(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return memory for elements [start, stop) of those that are decoded at once:

        the same for all of the FSDP module.
        """
        if name not in self._decoded:
            self._decoded[name] = torch.empty(_DECODED)
        return self._decoded[name][start:stop]

    def _run_whole(self, opened: RangePages) -> None:
        """Update a shard all at once, with what other ranks have of its parameter: pages are copied out and in."""
        (shard,) = opened.item.shards
        if shard not in self.settings:
            return
        placed, fmt = self.layout.shards[shard], opened.segment.format
        start, stop = placed.start, placed.start + placed.spec.numel
        views = {name: opened.decode(name, start, stop) for name in fmt.dtypes}
        grad = self._gradient(opened, shard, start, stop)
        if grad is not None and grad.data_ptr() % _ALIGNED:
            grad = grad.clone()  # products over unaligned memory may be added up in another order
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
        """Return (shard, first, last) for the slices in [start, stop) of shards with a gradient, in elements.

        Where the PARAM pages are the master, a slice ends where its page does.
        """
        borders = [] if opened.segment.format.master else [page.start for page, _ in opened.pages(Role.PARAM)]
        found = []
        for shard in opened.item.shards:
            placed = self.layout.shards[shard]
            low, high = max(placed.start, start), min(placed.start + placed.spec.numel, stop)
            if shard not in self.settings or low >= high:
                continue
            points = [low, *(border for border in borders if low < border < high), high]
            found += [(shard, a, b) for a, b in itertools.pairwise(points)]
        return found

    def _gradient(self, opened: RangePages, shard: int, low: int, high: int) -> torch.Tensor | None:
        if self.method:
            return None
        if opened.grads is not None:
            start, flat = opened.grads[shard]
            return flat[low - start : high - start]
        grad = opened.gradient(low, high)
        for edit in self.edits.get(shard, ()):
            edit(grad)
        return grad
