"""Page bytes as tensors: views of a page's content, and conversion between state sections and their components."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from infinity.content.encoding import decode, encode
from infinity.content.format import HALVES, MASTER, SHARD_ALIGNMENT, Component, Role, StateFormat
from infinity.content.halves import halves, joined
from infinity.content.layout import Layout, Page, Segment, overlapping
from infinity.units import align_down, align_up

Content = memoryview | torch.Tensor | Mapping[int, torch.Tensor]
"""Bytes of a page: in a cache slot, as a one-dimensional uint8 tensor on a device, or as several such tensors by their
offset in the page, one for each array in the page (see `JoinedPages`).
"""


def bytes_of(content: Content, offset: int = 0, nbytes: int = -1) -> torch.Tensor:
    """Return bytes of a page as a view: a one-dimensional uint8 tensor.

    Args:
        content: Bytes of a page with one array, or of any page in a cache slot.
        offset: Offset in the page.
        nbytes: Number of bytes; by default, all bytes from `offset` on.
    """
    if isinstance(content, memoryview):
        return torch.frombuffer(content, dtype=torch.uint8, offset=offset, count=nbytes)
    whole = content if isinstance(content, torch.Tensor) else content[0]
    return whole[offset : offset + nbytes] if nbytes >= 0 else whole[offset:]


def clear(content: Content) -> None:
    """Set all bytes of a page to zero."""
    for part in content.values() if isinstance(content, Mapping) else (bytes_of(content),):
        part.zero_()


@cache
def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype with the given name in a `StateFormat`.

    Raises:
        TypeError: If the name refers to an object in torch that is not a dtype.
    """
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name by which a `StateFormat` refers to a dtype."""
    return str(dtype).removeprefix("torch.")


def section(content: Content, page: Page, layout: Layout, start: int, stop: int) -> torch.Tensor:
    """Return elements [start, stop) of a segment from a PARAM or GRAD page, as a view of shape (stop - start,)."""
    fmt = layout.segments[page.segment].format
    return _items(
        content,
        fmt.param if page.role is Role.PARAM else fmt.grads[page.component],
        0,
        start - page.start,
        stop - page.start,
    )


def array_of(content: Content, dtype: str, count: int) -> torch.Tensor:
    """Return the only array in a page as a view of shape (count,)."""
    if isinstance(content, memoryview):
        return torch.frombuffer(content, dtype=torch_dtype(dtype), count=count)
    return bytes_of(content, 0, count * torch_dtype(dtype).itemsize).view(torch_dtype(dtype))


def _items(content: Content, dtype: str, offset: int, low: int, high: int) -> torch.Tensor:
    """Return items [low, high) of an array of `dtype` that begins `offset` bytes into a page.

    This is a single call that keeps the GIL. Every call that releases the GIL lets another thread run and then has to
    wait for that thread.
    """
    kind = torch_dtype(dtype)
    if isinstance(content, memoryview):
        return torch.frombuffer(content, dtype=kind, count=high - low, offset=offset + low * kind.itemsize)
    if not isinstance(content, torch.Tensor):
        content, offset = content[offset], 0
    return content[offset + low * kind.itemsize : offset + high * kind.itemsize].view(kind)


def component_of(content: Content, page: Page, component: Component, start: int, stop: int) -> torch.Tensor:
    """Return the items of a component for elements [start, stop) of the segment, as a view of the page.

    The shape is ((stop - start) / component.each,). Both bounds must be multiples of `component.each`.
    """
    low, high = (start - page.start) // component.each, (stop - page.start) // component.each
    return _items(content, component.dtype, int(component.offset * page.count), low, high)


def put(content: Content, page: Page, component: Component, start: int, items: torch.Tensor) -> None:
    """Write the items that fall within a page, and skip the others.

    Args:
        content: Bytes of the page.
        page: The page.
        component: Component that the items belong to.
        start: Index of the segment element at which the items begin.
        items: Items to write, shape (n,).
    """
    low, high = max(start, page.start), min(start + len(items) * component.each, page.stop)
    if low < high:
        component_of(content, page, component, low, high).copy_(
            items[(low - start) // component.each : (high - start) // component.each]
        )


def take(content: Content, page: Page, component: Component, start: int, items: torch.Tensor) -> None:
    """Read the items that fall within a page, and leave the others unchanged. The arguments are as for `put`."""
    low, high = max(start, page.start), min(start + len(items) * component.each, page.stop)
    if low < high:
        items[(low - start) // component.each : (high - start) // component.each] = component_of(
            content, page, component, low, high
        )


def read_section(
    segment: Segment,
    name: str,
    start: int,
    stop: int,
    visit: Callable[[Page, Callable[[Content], None]], None],
    *,
    pages: Callable[[Role], Sequence[Page]] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return elements [start, stop) of one section of a segment, decoded.

    Args:
        segment: Segment to read.
        name: ``master`` or the name of an optimizer state.
        start: Index of the first element.
        stop: Index after the last element.
        visit: Function that calls its second argument with the content of the page that is its first argument.
        pages: Function that returns the pages of a role, in order. Default: all pages of the segment.
        device: Device of the result. Default: the CPU.

    Returns:
        A new tensor of shape (stop - start,), in the dtype that the optimizer sees.
    """
    components, encoding = segment.format.components[name], segment.format.encoded.get(name)
    low, high = (align_down(start, SHARD_ALIGNMENT), align_up(stop, SHARD_ALIGNMENT)) if encoding else (start, stop)
    items = [
        torch.empty((high - low) // component.each, dtype=torch_dtype(component.dtype), device=device)
        for component in components
    ]
    for role in dict.fromkeys(component.role for component in components):
        for page, _, _ in overlapping((pages or segment.pages)(role), low, high):

            def copy(content: Content, page: Page = page) -> None:
                for component, part in zip(components, items, strict=True):
                    if component.role is page.role:
                        take(content, page, component, low, part)

            visit(page, copy)
    return decode(items, encoding)[start - low : stop - low] if encoding else items[0]


def stored(
    fmt: StateFormat, name: str, values: torch.Tensor, step: int | None = None
) -> list[tuple[Component, torch.Tensor]]:
    """Return the components of a section with their items. For a master, this includes the weights.

    Args:
        fmt: State format of the shard.
        name: ``master`` or the name of an optimizer state.
        values: Elements of a shard, flat, starting at a multiple of `SHARD_ALIGNMENT`.
        step: See `encode`.
    """
    if name not in fmt.encoded:
        components = [*fmt.components[name], *([fmt.weights] if name == MASTER and fmt.replaces_weights else [])]
        return [(component, values) for component in components]
    padding = align_up(len(values), SHARD_ALIGNMENT) - len(values)
    padded = torch.nn.functional.pad(values, (0, padding)) if padding else values
    return list(zip(fmt.components[name], encode(padded, fmt.encoded[name], step), strict=True))


def gradient_components(fmt: StateFormat, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the components of a gradient as stored in GRAD pages: views of `values`, shape (n,)."""
    return halves(values) if fmt.grads == HALVES else (values,)


def gradient_of(fmt: StateFormat, components: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a gradient, shape (n,), from its stored components."""
    return joined(components) if fmt.grads == HALVES else components[0]
