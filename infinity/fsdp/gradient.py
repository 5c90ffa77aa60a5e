"""Paged gradient: the tensor in `p.grad` while the gradient's elements are stored in pages, or have been consumed.

A `PagedGradient` is a `PagedTensor`: reading it loads the elements, and writing to it changes the gradient that the
optimizer update uses. In-place operations with numbers, such as scaling, are only recorded, and are applied slice by
slice when the elements are next read. Operations on lists of gradients process one gradient at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from infinity.fsdp.paged_tensor import PagedTensor, TensorHandle, computed
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


class Gradient(TensorHandle, Protocol):
    """Gradient of one shard, from the time it first arrives until it is consumed or dropped.

    `load` may return the gradient itself, in the local shape. `save` accepts any shape. After the gradient has been
    consumed or dropped, every method raises `InfinityError` with the reason and the fix. The only exceptions are `save`
    and `clear`, which may start a new gradient after `step()`.
    """

    def clear(self) -> None:
        """Set the elements to zero."""

    def record(self, edit: Edit) -> None:
        """Record an edit that is applied to the elements when they are next read."""

    def add(self, values: torch.Tensor) -> bool:
        """Add a gradient that FSDP2 has just reduced. Return ``False``, without adding, for any other tensor."""

    def norm(self) -> torch.Tensor | None:
        """Return the L2 norm of this rank's elements as a scalar, or ``None`` if it is not known."""


class PagedGradient(PagedTensor):
    """This rank's slice of a gradient, or a view of it."""

    handle: Gradient

    def dense(self) -> torch.Tensor:
        """Return a copy in memory. Raises `InfinityError` if the gradient has been consumed or dropped."""
        return self.clone()

    def no_memory_message(self) -> str:
        """Return the error message for operations that need memory: the reason and an alternative."""
        return (
            f"{self.handle.name} is stored in pages and has no memory of its own; to read it, call gradient.clone(); "
            "to write it, call gradient.copy_(values) or assign a new gradient to p.grad"
        )

    @property
    def data(self) -> torch.Tensor:
        """This gradient, detached. Assignment raises `UnsupportedError`, because it has no memory to replace."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self._no_memory()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Run an operation, without loading the gradient if possible."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, list | tuple) and func is _UNSCALE:
            return _unscale(*args)
        if isinstance(first, list | tuple) and func._schema.name.startswith("aten::_foreach_"):
            return _one_by_one(func, args, kwargs)
        if isinstance(first, PagedGradient):
            if func in _SHAPE_ONLY:
                return func(torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device=first.device),
                            *args[1:], **kwargs)  # fmt: skip
            if first.is_whole:
                if func is aten.linalg_vector_norm.default and _is_euclidean(args, kwargs):
                    norm = first.handle.norm()
                    if norm is not None:
                        return norm.clone()
                if func in _RECORDED and _are_numbers((*args[1:], *kwargs.values())):
                    first.handle.record(_edit(func, args[1:], kwargs))
                    return first
                if func is aten.add_.Tensor and _is_sum(first, args[1:], kwargs) and first.handle.add(args[1]):
                    return first
                if func is aten.zero_.default:
                    first.handle.clear()
                    return first
        return super().__torch_dispatch__(func, types, args, kwargs)


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    """Run a list operation on one gradient at a time, so that at most one gradient is in memory."""
    number = len(args[0])
    numbers = func in _RECORDED and _are_numbers((*args[1:], *kwargs.values()))
    edit = _edit(func, args[1:], kwargs, listed=True) if numbers else None
    normed = func is aten._foreach_norm.Scalar and _is_euclidean(args, kwargs)
    cleared = func is aten._foreach_zero_.default
    results: list[Any] = []
    for position, one in enumerate(args[0]):
        if isinstance(one, PagedGradient) and one.is_whole:
            if normed and (norm := one.handle.norm()) is not None:
                results.append(norm.clone())
                continue
            if edit is not None:
                one.handle.record(edit)
                continue
            if cleared:
                one.handle.clear()
                continue
        single = [
            arg[position : position + 1] if isinstance(arg, list | tuple) and len(arg) == number else arg
            for arg in args
        ]
        found = computed(func, tuple(single), kwargs)
        if isinstance(found, list | tuple):
            results.extend(found)
    return None if func._schema.is_mutable else results


def _unscale(gradients: Sequence[torch.Tensor], found: torch.Tensor, scale: torch.Tensor) -> None:
    """Unscale gradients and check that they are finite, as `torch.amp.GradScaler` requests.

    A finite norm proves that all elements are finite. Elements are inspected only if a norm is unknown or not finite.
    """
    norms = [g.handle.norm() if isinstance(g, PagedGradient) and g.is_whole else None for g in gradients]
    known = [norm for norm in norms if norm is not None]
    finite = bool(torch.isfinite(torch.stack(known)).all()) if known else False  # a single device synchronization
    factor = _Number(scale)

    def unscale(gradient: torch.Tensor) -> None:
        _UNSCALE([gradient], torch.zeros((), device=gradient.device), factor.on(gradient.device))

    for gradient, norm in zip(gradients, norms, strict=True):
        if isinstance(gradient, PagedGradient) and norm is not None and finite:
            gradient.handle.record(unscale)
        else:
            computed(_UNSCALE, ([gradient], found, scale), {})


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
    """Bind an in-place operation to a snapshot of its arguments, which are numbers and tensors with one element."""
    numbers = {key: _Number(value) if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()}
    given = [_Number(value) if isinstance(value, torch.Tensor) else value for value in args]

    def edit(gradient: torch.Tensor) -> None:
        device = gradient.device
        now = [value.on(device) if isinstance(value, _Number) else value for value in given]
        settings = {key: value.on(device) if isinstance(value, _Number) else value for key, value in numbers.items()}
        func([gradient] if listed else gradient, *now, **settings)

    return edit


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(value.ndim == 0 and _is_dense(value) if isinstance(value, torch.Tensor) else
               value is None or isinstance(value, int | float) for value in values)  # fmt: skip


def _is_dense(value: Any) -> bool:
    return type(value) is torch.Tensor


def _is_sum(first: PagedGradient, others: tuple[Any, ...], kwargs: dict[Any, Any]) -> bool:
    """Whether `add_` was called with an unscaled dense tensor of the same shape."""
    return not kwargs and len(others) == 1 and _is_dense(others[0]) and others[0].shape == first.shape


def _is_euclidean(args: Sequence[Any], kwargs: dict[Any, Any]) -> bool:
    """Whether the arguments of a norm operation request the L2 norm of all elements."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    others = [*args[2:], *(value for name, value in kwargs.items() if name != "ord")]
    return order == 2 and all(value is None or value is False for value in others)
