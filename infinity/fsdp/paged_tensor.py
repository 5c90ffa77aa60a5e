"""Tensors without memory of their own, whose elements are stored elsewhere.

A `PagedTensor` has a shape, strides, a dtype and a device, but no storage. A view of it is also a `PagedTensor`, and
records how it was created. Before any other operation, each stored tensor among the arguments is loaded once, and the
views are rebuilt on the loaded copy so that arguments overlap as they would in memory. After the operation, the tensors
that it wrote to are saved. Reads, in-place writes and writes through views are therefore bitwise identical to the same
operations on tensors in memory, at the cost of a load and a save per call.

Operations that need real memory raise `UnsupportedError`: those that access the storage or its address, or change the
dtype or shape in place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from infinity import torch_private
from infinity.errors import UnsupportedError

aten = torch.ops.aten
Paged = TypeVar("Paged", bound="PagedTensor")


class TensorHandle(Protocol):
    """Access to the elements of one stored tensor.

    Two tensors are views of the same stored tensor if their handles are the same object.
    """

    @property
    def name(self) -> str:
        """Name for error messages."""

    def load(self) -> torch.Tensor:
        """Return a copy of all elements, flat.

        Raises:
            UnsupportedError: If the tensor is too large to be loaded. The message suggests an alternative.
        """

    def save(self, content: torch.Tensor) -> None:
        """Replace all elements.

        Args:
            content: New elements in the shape, dtype and device of the tensor that `load` returns.
        """

    def fail(self, error: Exception) -> None:
        """End the run on all ranks with `error`."""


_DATA: Any = torch.Tensor.data


class _NoStorage:
    """Storage stand-in for a tensor that has no memory.

    `torch.distributed.checkpoint` clones a tensor if the size of its storage differs from the size of its elements, and
    keeps the clones of all tensors of a file until the file is complete. With equal sizes, it pickles the tensor
    itself, and only one copy is in memory at a time.
    """

    def __init__(self, nbytes: int, message: str) -> None:
        self._nbytes, self._message = nbytes, message

    def size(self) -> int:
        return self._nbytes

    def __getattr__(self, name: str) -> NoReturn:
        raise UnsupportedError(self._message)


class PagedTensor(torch.Tensor):
    """Stored tensor, or a view of one. Use `stored` to create a stored tensor.

    Methods that bypass the dispatcher operate on a copy or raise `UnsupportedError`.
    """

    __torch_function__ = torch_private.NO_TORCH_FUNCTION  # type: ignore[assignment]

    handle: TensorHandle
    _likeness: torch.Tensor  # on the meta device: shape, strides, offset and dtype of this view
    _whole: torch.Tensor  # the same for the stored tensor
    _steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...]  # create this view from the stored tensor
    is_whole: bool
    """``True`` if this is the full stored tensor in its original shape, not a slice or a reshaped view of it."""

    @classmethod
    def stored(
        cls: type[Paged], handle: TensorHandle, shape: Iterable[int], dtype: torch.dtype, device: torch.device
    ) -> Paged:
        """Create a contiguous tensor whose elements are accessed through a handle.

        Args:
            shape: Shape of the tensor. Its number of elements must match the elements that `handle` loads.
        """
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
        if torch.is_inference_mode_enabled():  # a view must not be an inference tensor, because its base is not one
            with torch.inference_mode(False):
                return cls._made(handle, likeness, whole, steps, device)
        made: Paged = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            likeness.shape,
            strides=likeness.stride(),
            storage_offset=likeness.storage_offset(),
            dtype=likeness.dtype,
            device=device,
        )
        made.handle, made._likeness, made._whole, made._steps = handle, likeness, whole, steps
        made.is_whole = not steps or (made._is_all and likeness.shape == whole.shape)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return a description without loading the tensor."""
        return f"{type(self).__name__}({self.handle.name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def data(self) -> torch.Tensor:
        """The same elements, detached from the graph. Assigning to it raises `UnsupportedError` unless this is a view.

        Before PyTorch 2.13, `DTensor.to_local()` returns this object itself under `no_grad`. If it were in memory, the
        optimizer would see an assigned value, but a gather would not. Since PyTorch 2.13, `to_local()` returns a view,
        and an assignment changes only that view.
        """
        found: torch.Tensor = _DATA.__get__(self)
        return found

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if not self._steps:
            self._no_memory()
        _DATA.__set__(self, values)

    # Methods that bypass the dispatcher #

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle an in-memory copy. Raises the same exceptions as `dense`."""
        return self.dense().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return an in-memory copy. Raises the same exceptions as `dense`."""
        copied = self.dense().requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def tolist(self) -> Any:
        """Return the elements as nested lists of numbers. Raises the same exceptions as `dense`."""
        return self.dense().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return a copy as a NumPy array. It is read-only, because writes to it would not reach this tensor."""
        array = self.dense().requires_grad_(self.requires_grad).numpy(force=force)
        array.setflags(write=False)
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """See `numpy`."""
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def _no_memory(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(self.no_memory_message())

    def untyped_storage(self) -> Any:
        """Return a storage stand-in whose size matches the elements. Other attributes raise `UnsupportedError`."""
        return _NoStorage(self.nbytes, self.no_memory_message())

    def data_ptr(self) -> int:
        """Raise `UnsupportedError`.

        PyTorch's CUDA sanitizer requests the address of every argument, and therefore receives 0 instead.
        """
        if sys._getframe(1).f_globals.get("__name__") == torch_private.SANITIZER:
            return 0
        self._no_memory()

    storage = _typed_storage = const_data_ptr = _no_memory
    share_memory_ = pin_memory = __dlpack__ = _no_memory

    # Loading #

    def dense(self) -> torch.Tensor:
        """Return a copy in memory, of the same shape and strides. Raises the same exceptions as `TensorHandle.load`."""
        return self._seen_in(self.handle.load())

    def _seen_in(self, content: torch.Tensor) -> torch.Tensor:
        """Rebuild this view on the loaded elements."""
        seen = content.view(self._whole.shape)
        for step in self._steps:
            seen = step(seen)
        return seen

    @property
    def _is_all(self) -> bool:
        """Whether the view contains all stored elements in their stored order and dtype."""
        likeness, whole = self._likeness, self._whole
        same = likeness.dtype == whole.dtype and likeness.numel() == whole.numel() and likeness.is_contiguous()
        return same and not likeness.is_conj() and not likeness.is_neg()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Keep views paged. Run any other operation on loaded copies, and save the tensors that it wrote to."""
        kwargs = kwargs or {}
        # A composite operation may return a view or a copy, which is only known for the operations that it consists of.
        if (decomposed := torch_private.decomposition(func)) is not None:
            return decomposed(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, PagedTensor):
            if func is aten.detach_.default:  # autograd has already detached it
                return first
            if func is aten.is_pinned.default:  # torch.distributed.checkpoint asks each tensor before saving it
                return False
            if makes_views(func):
                return first._viewed(func, args[1:], kwargs)
            if func is aten.copy_.default and first._is_all:  # overwrites all elements, so no load is needed
                value = args[1]
                if isinstance(value, PagedTensor):
                    if value.handle == first.handle and value._is_all:
                        return first
                    value = value._seen_in(value.handle.load())
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

    def no_memory_message(self) -> str:
        """Return the error message for operations that need memory: the reason and an alternative."""
        return (
            f"{self.handle.name} is on NVMe and has no memory of its own; to work on this tensor, use a copy, "
            "tensor.clone(); to save the model, call torch.distributed.checkpoint.save (dcp.save), "
            "optimizer.save_pretrained or optimizer.save_checkpoint"
        )


def make_view(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int | None, seen: torch.Tensor
) -> torch.Tensor:
    """Repeat a view operation on loaded elements.

    Args:
        args: Positional arguments of the operation, after the tensor.
        kwargs: Keyword arguments of the operation.
        index: Position of the view in the returned list, or ``None`` if the operation returns a single view.
    """
    made = func(seen, *args, **kwargs)
    view: torch.Tensor = made if index is None else made[index]
    return view


@cache
def makes_views(func: Any) -> bool:
    """Return whether an operation returns views of its first argument and does not modify any argument."""
    schema = func._schema
    return not schema.is_mutable and any(value.alias_info is not None for value in schema.returns)


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to, with lists flattened."""
    found: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if marked or (position == 0 and _receives(func)):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found.extend(tree_leaves(value))
    return found


def is_collective(func: Any) -> bool:
    """Return whether an operation communicates with other ranks. Such an operation may write after it has returned."""
    return func.namespace in ("c10d", "_c10d_functional")


@cache
def _receives(func: Any) -> bool:
    """Whether a collective writes to its first argument. Judged by its name, because c10d schemas do not tell."""
    return is_collective(func) and func._schema.name.endswith(("_", "::irecv"))


def leaves_others_waiting(func: Any) -> bool:
    """Return whether an operation that is not supported on this rank is supported on other ranks, which would wait.

    All ranks write to the tensors of most collectives, so all of them raise an error. However, the sender of a message
    only reads, as do the ranks whose tensors another rank gathers.
    """
    return func._schema.name.rpartition("::")[2] in _ONE_RANK_WRITES and dist.get_world_size() > 1


_ONE_RANK_WRITES = {"recv_", "recv_any_source_", "irecv", "gather_"}


def changes_memory(func: Any) -> bool:
    """Return whether an operation changes the shape, strides or storage of a tensor in place."""
    return torch.Tag.inplace_view in func.tags or func.overloadpacket in _REPLACES


def computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on loaded copies of its stored arguments, and save the copies that it wrote to.

    Raises:
        UnsupportedError: If the operation would change a dtype, shape or storage in place, if it is a collective that
            would write to a stored tensor, or if a tensor is too large to be loaded.
    """
    changed = {id(tensor.handle): tensor for tensor in written(func, args, kwargs) if isinstance(tensor, PagedTensor)}
    names = ", ".join(tensor.handle.name for tensor in changed.values())
    if changed and is_collective(func):
        error = UnsupportedError(
            f"{func} would write to {names}, but collectives cannot write to pages; run it on "
            "copy = tensor.clone(), and then call tensor.copy_(copy) under torch.no_grad()"
        )
        if leaves_others_waiting(func):
            next(iter(changed.values())).handle.fail(error)
        raise error
    if changed and changes_memory(func):
        raise UnsupportedError(
            f"{func} would change the shape or storage of {names} (stored in pages); use tensor.copy_(values)"
        )
    contents: dict[int, torch.Tensor] = {}  # by id of the handle
    paged: dict[int, PagedTensor] = {}  # by id of the loaded tensor
    kept: list[torch.Tensor] = []  # keeps the keys of `paged` unique: a freed tensor's id could be reused

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
