"""Tensors whose elements are stored elsewhere: what is done to them is done to a loaded copy, and saved back.

A `PagedTensor` has shape, strides, dtype and device, but no memory. A view of one is one too, and remembers how it was
made. Any other operation loads the whole of every stored tensor among its arguments once, makes their views of that, so
that arguments overlap as they would in memory, runs, and saves what it wrote to. So reading, writing in place and
writing through views give the bits that they give in memory, at the price of a load and a save for each call.

What memory has and a stored tensor has not (a storage, its address, other dtypes and shapes in place) is refused: here
and for gradients, which are `WithoutMemory` too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from infinity import torch_private
from infinity.errors import UnsupportedError

aten = torch.ops.aten
Paged = TypeVar("Paged", bound="PagedTensor")


class TensorHandle(Protocol):
    """Where the elements of one stored tensor are. Two tensors are views of one if their homes are one object."""

    @property
    def name(self) -> str:
        """What errors call it."""

    def load(self) -> torch.Tensor:
        """Return a copy of all elements, flat.

        Raises:
            UnsupportedError: they are too many to be loaded; says what to do instead.
        """

    def save(self, content: torch.Tensor) -> None:
        """Replace all elements.

        Args:
            content: as `load` returned them: same shape, dtype and device.
        """


class WithoutMemory(torch.Tensor):
    """A tensor without memory: what Python asks of it without an operation is answered by a copy, or refused."""

    __torch_function__ = torch_private.NO_TORCH_FUNCTION  # type: ignore[assignment]

    def dense(self) -> torch.Tensor:
        """Return a copy in memory, of the same shape."""
        raise NotImplementedError

    def refusal(self) -> str:
        """Return what to say where memory is asked for: what this is, and what to do."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as a tensor in memory. Raises what `dense` raises."""
        return self.dense().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a tensor in memory. Raises what `dense` raises."""
        copied = self.dense().requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def tolist(self) -> Any:
        """Return the elements as numbers. Raises what `dense` raises."""
        return self.dense().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return a copy as an array that cannot be written to, since that would change nothing here."""
        array = self.dense().requires_grad_(self.requires_grad).numpy(force=force)
        array.setflags(write=False)
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """See `numpy`."""
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def _no_memory(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: there is no memory whose address, or whose sharing, would mean anything."""
        raise UnsupportedError(self.refusal())

    def untyped_storage(self) -> Any:
        """Return what has a size, 0, and refuses all else."""
        return _NoStorage(self.refusal())

    def data_ptr(self) -> int:
        """Refuse; but tell torch's CUDA sanitizer, which asks all that an operator is given, that there is none."""
        if sys._getframe(1).f_globals.get("__name__") == torch_private.SANITIZER:
            return 0
        self._no_memory()

    storage = _typed_storage = const_data_ptr = _no_memory
    share_memory_ = pin_memory = __dlpack__ = _no_memory


_DATA: Any = torch.Tensor.data


class _NoStorage:
    """The storage of a tensor without memory.

    Who saves a tensor compares the size of its storage with its own, and copies it where these differ
    (`torch.distributed.checkpoint`).
    """

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal  # what is said of everything else

    def size(self) -> int:
        """Return 0: nothing is in memory."""
        return 0

    def __getattr__(self, name: str) -> NoReturn:
        raise UnsupportedError(self._refusal)


class PagedTensor(WithoutMemory):
    """A stored tensor or a view of one; make the first of each with `stored`."""

    handle: TensorHandle
    _likeness: torch.Tensor  # on the meta device: shape, strides, offset and dtype of this view
    _whole: torch.Tensor  # the same of what is stored
    _steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...]  # make this view of the whole

    @classmethod
    def stored(
        cls: type[Paged], handle: TensorHandle, shape: Iterable[int], dtype: torch.dtype, device: torch.device
    ) -> Paged:
        """Return the stored tensor of `handle`, contiguous, of a shape with as many elements as `handle` loads."""
        likeness = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return cls._made(handle, likeness, likeness, (), device)

    @classmethod
    def _made(
        cls: type[Paged],
        handle: TensorHandle,
        likeness: torch.Tensor,
        whole: torch.Tensor,
        steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...],
        device: torch.device,
    ) -> Paged:
        with torch.inference_mode(False):  # a view is no inference tensor, as what it is of is none
            made: Paged = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                likeness.shape,
                strides=likeness.stride(),
                storage_offset=likeness.storage_offset(),
                dtype=likeness.dtype,
                device=device,
            )
        made.handle, made._likeness, made._whole, made._steps = handle, likeness, whole, steps
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Name the tensor without loading it."""
        return f"{type(self).__name__}({self.handle.name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def data(self) -> torch.Tensor:
        """The same elements, without a graph. Setting it is refused for the stored tensor itself.

        Before torch 2.13 `to_local()` of a DTensor returns that, under no_grad; in memory a gather would not see the
        new elements then, and the optimizer would. Later it is a view, and nothing but that gets other elements.
        """
        found: torch.Tensor = _DATA.__get__(self)
        return found

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if not self._steps:
            self._no_memory()
        _DATA.__set__(self, values)

    # Loading #

    def dense(self) -> torch.Tensor:
        """Return a copy in memory, of the same shape and strides. Raises what `TensorHandle.load` raises."""
        return self._seen_in(self.handle.load())

    def _seen_in(self, content: torch.Tensor) -> torch.Tensor:
        """Return this view of the loaded elements."""
        seen = content.view(self._whole.shape)
        for step in self._steps:
            seen = step(seen)
        return seen

    @property
    def _is_all(self) -> bool:
        """Whether it has all stored elements, in order, as they are stored."""
        likeness, whole = self._likeness, self._whole
        same = likeness.dtype == whole.dtype and likeness.numel() == whole.numel() and likeness.is_contiguous()
        return same and not likeness.is_conj() and not likeness.is_neg()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Keep views paged; load for everything else, and save what was written to."""
        kwargs = kwargs or {}
        if (
            decomposed := torch_private.decomposition(func)
        ) is not None:  # what it returns may be a view, and may be a copy
            return decomposed(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, PagedTensor):
            if func is aten.detach_.default:  # autograd did what there is to do
                return first
            if makes_views(func):
                return first._viewed(func, args[1:], kwargs)
            if func is aten.copy_.default and first._is_all:  # needs no load
                value = args[1].dense() if isinstance(args[1], PagedTensor) else args[1]
                whole = torch.empty(first.shape, dtype=first.dtype, device=first.device).copy_(value)
                first.handle.save(whole.view(-1))
                return first
        return computed(func, args, kwargs)

    def _viewed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = func(self._likeness, *args, **kwargs)
        several = isinstance(made, list | tuple)
        likenesses = made if several else (made,)
        views = []
        for index, likeness in enumerate(likenesses):
            step = partial(make_view, func, args, kwargs, index if several else None)
            views.append(self._made(self.handle, likeness, self._whole, (*self._steps, step), self.device))
        return views if several else views[0]

    def refusal(self) -> str:
        """See `WithoutMemory`."""
        return (
            f"{self.handle.name} is on NVMe and has no memory of its own; to save the model call "
            "optimizer.save_pretrained(folder), optimizer.save_dcp(folder) or, to go on from, optimizer.save_checkpoint(); to "
            "work on this tensor take a copy, tensor.clone()"
        )


def make_view(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int | None, seen: torch.Tensor
) -> torch.Tensor:
    """Do again what made a view, or one of several, on the elements that it is of."""
    made = func(seen, *args, **kwargs)
    view: torch.Tensor = made if index is None else made[index]
    return view


@cache
def makes_views(func: Any) -> bool:
    """Whether an operation returns views of its first argument, and changes nothing."""
    schema = func._schema
    return not schema.is_mutable and any(value.alias_info is not None for value in schema.returns)


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments of an operation that it writes to, those in lists one by one."""
    found: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if marked or (position == 0 and _receives(func)):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found.extend(tree_leaves(value))
    return found


def is_collective(func: Any) -> bool:
    """Whether an operation speaks with other ranks; it may write later than it returns."""
    return func.namespace in ("c10d", "_c10d_functional")


@cache
def _receives(func: Any) -> bool:
    """Whether a collective writes to its first argument. Schemas of c10d do not say it, but names of operations do."""
    return is_collective(func) and func._schema.name.endswith(("_", "::irecv"))


def changes_memory(func: Any) -> bool:
    """Whether an operation changes shape, strides or storage in place."""
    return torch.Tag.inplace_view in func.tags or func.overloadpacket in _REPLACES


def computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on loaded copies of the stored tensors among its arguments; save those that it wrote to.

    Raises:
        UnsupportedError: it would change dtype, shape or storage in place; or it is a collective that would write to
            one; or a tensor is too large to be loaded.
    """
    changed = {id(tensor.handle): tensor for tensor in written(func, args, kwargs) if isinstance(tensor, PagedTensor)}
    names = ", ".join(tensor.handle.name for tensor in changed.values())
    if changed and is_collective(func):
        raise UnsupportedError(
            f"{func} would write to {names}, which is on NVMe, where a collective cannot; run it on a copy, "
            "copy = tensor.clone(), and then, under torch.no_grad(), tensor.copy_(copy)"
        )
    if changed and changes_memory(func):
        raise UnsupportedError(
            f"{func} would change the shape or the storage of {names}, which is on NVMe; copy_ into it"
        )
    contents: dict[int, torch.Tensor] = {}  # by handle
    paged: dict[int, PagedTensor] = {}  # by the tensor that stands for it
    kept: list[torch.Tensor] = []  # so that no other one has its id

    def loaded(value: Any) -> Any:
        if not isinstance(value, PagedTensor):
            return value
        key = id(value.handle)
        if key not in contents:
            contents[key] = value.handle.load()
        seen = value._seen_in(contents[key])
        paged[id(seen)] = value
        kept.append(seen)
        return seen

    result = func(*tree_map(loaded, args), **tree_map(loaded, kwargs))
    for key, tensor in changed.items():
        tensor.handle.save(contents[key])
    return tree_map(lambda value: paged.get(id(value), value), result) if changed else result


_REPLACES = {aten.set_, aten.resize_, aten.resize_as_}
