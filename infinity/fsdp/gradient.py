"""Paged gradient: the tensor in `p.grad` while the gradient's elements are stored in pages, or have been consumed.

A `PagedGradient` has a shape, a dtype and a device, but no storage. Reading it loads the elements, and writing to it
changes the gradient that the optimizer update uses. In-place operations with numbers, such as scaling, are only
recorded, and are applied slice by slice when the elements are next read. Views are lazy, so that writes to a view reach
the gradient. Operations on lists of gradients process one gradient at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from infinity import torch_private
from infinity.errors import UnsupportedError
from infinity.fsdp.paged_tensor import (
    WithoutMemory,
    changes_memory,
    is_collective,
    leaves_others_waiting,
    make_view,
    makes_views,
    written,
)
from infinity.memory.device import open_device

aten = torch.ops.aten

Edit = Callable[[torch.Tensor], object]
"""Function that modifies each element of a gradient in place, independently of the other elements. Its argument has
shape (n,) and contains all elements of this rank or a slice of them.
"""

_RECORDED = {
    aten.mul_.Tensor,
    aten.mul_.Scalar,
    aten.div_.Tensor,
    aten.div_.Scalar,
    aten.neg_.default,
    aten.clamp_.default,
    aten.clamp_min_.default,
    aten.clamp_max_.default,
    aten._foreach_mul_.Scalar,
    aten._foreach_mul_.Tensor,
    aten._foreach_div_.Scalar,
    aten._foreach_div_.Tensor,
    aten._foreach_neg_.default,
    aten._foreach_clamp_min_.Scalar,
    aten._foreach_clamp_max_.Scalar,
}
"""Element-wise in-place operations whose other arguments are numbers. They are recorded and run later."""

_SHAPE_ONLY = {
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
"""Operations that only need the shape, strides, dtype and device of a gradient."""

_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default


class Gradient(Protocol):
    """Gradient of one shard, from the time it first arrives until it is consumed or dropped.

    Afterwards, every method raises `InfinityError` with the reason and the fix. The only exceptions are `replace` and
    `clear`, which may start a new gradient after `step()`.
    """

    def load(self) -> torch.Tensor:
        """Return the elements in the local shape. The caller may modify the tensor and pass it to `replace`."""

    def replace(self, values: torch.Tensor) -> None:
        """Replace the elements by `values`, which has the local shape."""

    def clear(self) -> None:
        """Set the elements to zero."""

    def record(self, edit: Edit) -> None:
        """Record an edit that is applied to the elements when they are next read."""

    def add(self, values: torch.Tensor) -> bool:
        """Add a gradient that FSDP2 has just reduced. Return ``False``, without adding, for any other tensor."""

    def norm(self) -> torch.Tensor | None:
        """Return the L2 norm of this rank's elements as a scalar, or ``None`` if it is not known."""

    def fail(self, error: Exception) -> None:
        """End the run on all ranks with `error`."""


class PagedGradient(WithoutMemory):
    """This rank's slice of a gradient, or a view of it."""

    gradient: Gradient
    views: tuple[Callable[[torch.Tensor], Any], ...]  # operations that create this view from the full slice, in order

    @staticmethod
    def __new__(
        cls: type[PagedGradient],
        gradient: Gradient,
        like: torch.Tensor,
        device: torch.device,
        views: tuple[Callable[[torch.Tensor], Any], ...] = (),
    ) -> PagedGradient:
        """Create a gradient with the shape, strides and dtype of the tensor `like`, on the given device."""
        with torch.inference_mode(False):  # a view must not be an inference tensor, because its base is not one
            tensor: PagedGradient = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                like.shape,
                strides=like.stride(),
                dtype=like.dtype,
                device=device,
            )
        tensor.gradient, tensor.views = gradient, views
        return tensor

    def __init__(self, *args: Any) -> None:
        """Do nothing, because `__new__` has set all attributes."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return a description without loading the gradient."""
        return f"PagedGradient({self.gradient}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def dense(self) -> torch.Tensor:
        """Return a copy in memory. Raises `InfinityError` if the gradient has been consumed or dropped."""
        return self.clone()

    def no_memory_message(self) -> str:
        """Return the error message for operations that need memory. See `WithoutMemory`."""
        return (
            f"the gradient of {self.gradient} is stored in pages and has no memory of its own; to read it, call "
            "gradient.clone(); to write it, call gradient.copy_(values) or assign a new gradient to p.grad"
        )

    @property
    def data(self) -> torch.Tensor:
        """This gradient, detached. Assignment raises `UnsupportedError`, because it has no memory to replace."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self._no_memory()

    @property
    def is_whole(self) -> bool:
        """Whether this is the full slice in its own shape, as opposed to a view."""
        return not self.views

    def _view(self, content: torch.Tensor) -> torch.Tensor:
        for view in self.views:
            content = view(content)
        return content

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Run an operation, without loading the gradient if possible."""
        kwargs = kwargs or {}
        # A composite operation may return a view or a copy, which is only known for the operations that it consists of.
        if (decomposed := torch_private.decomposition(func)) is not None:
            return decomposed(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, list | tuple) and func is _UNSCALE:
            return _unscale(*args)
        if isinstance(first, list | tuple) and func._schema.name.startswith("aten::_foreach_"):
            return _one_by_one(func, args, kwargs)
        if isinstance(first, PagedGradient):
            if func is aten.detach_.default:  # autograd has already detached it
                return first
            if func in (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar) and _is_euclidean(args, kwargs):
                norm = first.gradient.norm() if first.is_whole else None
                if norm is not None:
                    return norm.clone()
            if first.is_whole and func in _RECORDED and _are_numbers((*args[1:], *kwargs.values())):
                first.gradient.record(_edit(func, args[1:], kwargs))
                return first
            if func is aten.add_.Tensor and _is_sum(first, args[1:], kwargs) and first.gradient.add(args[1]):
                return first
            if first.is_whole and func in (aten.zero_.default, aten.copy_.default):
                if func is aten.zero_.default:
                    first.gradient.clear()
                elif not _same(first, args[1]):
                    first.gradient.replace(_filled(first, _Loaded()(args[1])))
                return first
            if func in _SHAPE_ONLY:
                return func(torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device=first.device),
                            *args[1:], **kwargs)  # fmt: skip
            if makes_views(func):
                return _lazy_view(func, first, args[1:], kwargs)
        return _on_content(func, args, kwargs)


class _Loaded:
    """Maps paged gradients to their elements. Each gradient is loaded once, so that its views share memory."""

    def __init__(self) -> None:
        # By id of a gradient: the gradient, which keeps the id valid, and its elements.
        self.contents: dict[int, tuple[Gradient, torch.Tensor]] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, PagedGradient):
            return value
        if id(value.gradient) not in self.contents:
            self.contents[id(value.gradient)] = (value.gradient, value.gradient.load())
        return value._view(self.contents[id(value.gradient)][1])


def _on_content(func: Any, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    """Run an operation on loaded elements, and store the gradients that it changed."""
    changed = [value for value in written(func, args, kwargs) if isinstance(value, PagedGradient)]
    if changed and is_collective(func):
        error = UnsupportedError(
            f"{func} would write to the gradient of {changed[0].gradient}, but collectives cannot write to pages; run "
            "it on copy = gradient.clone(), and then call gradient.copy_(copy)"
        )
        if leaves_others_waiting(func):
            changed[0].gradient.fail(error)
        raise error
    if changed and changes_memory(func):
        raise UnsupportedError(f"{func} would change the gradient's shape or storage: {changed[0].no_memory_message()}")
    loaded = _Loaded()
    given, settings = tree_map(loaded, args), tree_map(loaded, kwargs)
    result = func(*given, **settings)
    for key in dict.fromkeys(id(value.gradient) for value in changed):
        gradient, content = loaded.contents[key]
        gradient.replace(content)
    return changed[0] if changed and isinstance(result, torch.Tensor) else result


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    """Run a list operation on one gradient at a time, so that at most one gradient is in memory."""
    number = len(args[0])
    numbers = func in _RECORDED and _are_numbers((*args[1:], *kwargs.values()))
    edit = _edit(func, args[1:], kwargs, listed=True) if numbers else None
    results: list[Any] = []
    for position in range(number):
        single = [
            arg[position : position + 1] if isinstance(arg, list | tuple) and len(arg) == number else arg
            for arg in args
        ]
        (one,) = single[0]
        if isinstance(one, PagedGradient) and one.is_whole:
            if func is aten._foreach_norm.Scalar and _is_euclidean(single, kwargs):
                norm = one.gradient.norm()
                if norm is not None:
                    results.append(norm.clone())
                    continue
            if edit is not None:
                one.gradient.record(edit)
                continue
            if func is aten._foreach_zero_.default:
                one.gradient.clear()
                continue
        found = _on_content(func, tuple(single), kwargs)
        if isinstance(found, list | tuple):
            results.extend(found)
    return None if func._schema.is_mutable else results


def _unscale(gradients: Sequence[torch.Tensor], found: torch.Tensor, scale: torch.Tensor) -> None:
    """Unscale gradients and check that they are finite, as `torch.amp.GradScaler` requests.

    A finite norm proves that all elements are finite. Elements are inspected only if a norm is unknown or not finite.
    """
    norms = [g.gradient.norm() if isinstance(g, PagedGradient) and g.is_whole else None for g in gradients]
    known = [norm for norm in norms if norm is not None]
    finite = bool(torch.isfinite(torch.stack(known)).all()) if known else False  # a single device synchronization
    factor = _Number(scale)

    def unscale(gradient: torch.Tensor) -> None:
        _UNSCALE([gradient], torch.zeros((), device=gradient.device), factor.on(gradient.device))

    for gradient, norm in zip(gradients, norms, strict=True):
        if isinstance(gradient, PagedGradient) and norm is not None and finite:
            gradient.gradient.record(unscale)
        else:
            _on_content(_UNSCALE, ([gradient], found, scale), {})


class _Number:
    """Snapshot of a scalar tensor for all gradients of a call. It is copied to each device on demand, at most once."""

    def __init__(self, value: torch.Tensor) -> None:
        self._copies = {value.device: value.detach().clone()}  # the first copy is on the original device
        self._device = open_device(value.device)
        self._made = self._device.record_event(self._device.current())  # after the first copy

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the number on a device. The first call for the host waits for the original device."""
        current = self._device.current()
        if device == self._device.name:
            self._made.before(current)
            self._device.keep(self._copies[device], current)
        if device not in self._copies:
            stream = self._device.stream("numbers")  # avoids waiting for other work on this thread's stream
            self._made.before(stream)
            with self._device.on(stream):
                self._copies[device] = next(iter(self._copies.values())).to(device)
        return self._copies[device]


def _edit(func: Any, args: tuple[Any, ...], kwargs: dict[Any, Any], *, listed: bool = False) -> Edit:
    """Bind an in-place operation to a snapshot of its numeric arguments."""
    args, kwargs = tree_map(lambda value: _Number(value) if isinstance(value, torch.Tensor) else value, (args, kwargs))

    def edit(gradient: torch.Tensor) -> None:
        given, settings = tree_map(
            lambda value: value.on(gradient.device) if isinstance(value, _Number) else value, (args, kwargs)
        )
        func([gradient] if listed else gradient, *given, **settings)

    return edit


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(value.ndim == 0 and _is_dense(value) if isinstance(value, torch.Tensor) else
               value is None or isinstance(value, int | float) for value in values)  # fmt: skip


def _is_dense(value: Any) -> bool:
    return type(value) is torch.Tensor


def _is_sum(first: PagedGradient, others: tuple[Any, ...], kwargs: dict[Any, Any]) -> bool:
    """Whether `add_` was called on the full slice with an unscaled dense tensor of the same shape."""
    return (
        first.is_whole and not kwargs and len(others) == 1 and _is_dense(others[0]) and (others[0].shape == first.shape)
    )


def _is_euclidean(args: Sequence[Any], kwargs: dict[Any, Any]) -> bool:
    """Whether the arguments of a norm operation request the L2 norm of all elements."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    others = [*args[2:], *(value for name, value in kwargs.items() if name != "ord")]
    return order == 2 and all(value is None or value is False for value in others)


def _same(first: PagedGradient, second: Any) -> bool:
    return isinstance(second, PagedGradient) and second.is_whole and second.gradient is first.gradient


def _filled(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return `values` broadcast and converted to the shape, dtype and device of `like`, as `copy_` does."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device).copy_(values)


def _lazy_view(func: Any, base: PagedGradient, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    if func in (aten.detach.default, aten.alias.default):
        return PagedGradient(base.gradient, base, base.device, base.views)
    shape = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    made = func(shape, *args, **kwargs)
    if isinstance(made, torch.Tensor):
        view = partial(make_view, func, args, kwargs, None)
        same = made.shape == base.shape and made.stride() == base.stride() and made.dtype == base.dtype
        if same and func in (aten.view.default, aten._unsafe_view.default):
            return PagedGradient(base.gradient, base, base.device, base.views)
        return PagedGradient(base.gradient, made, base.device, (*base.views, view))
    return type(made)(
        PagedGradient(base.gradient, part, base.device, (*base.views, partial(make_view, func, args, kwargs, position)))
        for position, part in enumerate(made)
    )
