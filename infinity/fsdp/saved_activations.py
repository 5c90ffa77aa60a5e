"""What a forward keeps for its backward of what passes between FSDP modules: in pages instead of memory.

[Note: what is paged] The inputs of FSDP modules, where autograd saves them: with activation checkpointing (torch's,
that of
transformers, `infinity.micro_batches`) they are all that is kept of a layer. Everything else that autograd saves stays
as it is: gathered weights, what the root keeps between its FSDP modules, and what layers without checkpointing keep
inside.

Checkpointing around the call of an FSDP module saves its input before the call: so what is saved outside of FSDP
modules is held until
an FSDP module is called with it, or nobody needs it any more.

[Note: hooks of others] Hooks for saved tensors that were set around the model have all that it saves, and nothing is
paged: `torch.utils.checkpoint` of the whole model counts what is saved, and `save_on_cpu` has a place for it already.

[Note: modified in place] What is in pages is what was saved, so it may be modified behind that, where autograd without
hooks would raise; but not while a device copies it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch.autograd.graph import saved_tensors_hooks

from infinity import torch_private
from infinity.errors import BudgetError
from infinity.fsdp.sharded_model import ShardedModel
from infinity.memory.device import DeviceEvent
from infinity.schedule.activation_pages import ActivationPages, StoredActivation
from infinity.units import KIB

_log = logging.getLogger("infinity")
_LEAST_BYTES: Final = 16 * KIB
"""Smaller tensors are not worth a page."""
_Key = tuple[int, int, int]
"""Memory by `cdata`, offset and length in bytes."""

_MODIFIED = "one of the variables needed for gradient computation has been modified by an inplace operation"


class _Saved:
    """What autograd has in the place of a tensor that it saves. It is held until it is paged, if it ever is."""

    __slots__ = ("__weakref__", "_version", "like", "paged", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Not the tensor itself: of what an operation returns, that would lead back here, and never be freed.
        self.tensor: torch.Tensor | None = tensor.detach()
        """The tensor, without its graph; None when it is paged."""
        self._version = tensor._version
        self.paged: _Paged | None = None
        """Where its bytes are then."""
        self.like: torch.Tensor | None = None
        """A tensor without memory, of its shape, strides and dtype, when it is paged."""

    def page(self, paged: _Paged) -> None:
        """Let go of the tensor: its bytes are in pages."""
        assert self.tensor is not None
        shape, strides = self.tensor.shape, self.tensor.stride()
        self.like = torch.empty_strided(shape, strides, dtype=self.tensor.dtype, device="meta")
        self.paged, self.tensor = paged, None

    @property
    def modified(self) -> bool:
        """Whether the tensor was modified in place since: autograd does not look where there are hooks."""
        return self.tensor is not None and self.tensor._version != self._version


class _Paged:
    """A stretch of memory in pages, for all that have saved a tensor in it, whatever its shape."""

    __slots__ = ("__weakref__", "kept", "modified")

    def __init__(self, kept: StoredActivation) -> None:
        self.kept = kept
        self.modified = False
        """Whether it was modified before all of it was copied. Changed by `_end_copies`."""


class SavedActivations:
    """Pages what training forwards of a model keep of what passes between its FSDP modules.

    Life cycle: hooks on the model, until `detach`. Only the training thread runs forwards; backwards run on autograd's.

    Args:
        sharded: the model.
        pages: keep the bytes.
    """

    def __init__(self, sharded: ShardedModel, pages: ActivationPages) -> None:
        self._pages = pages
        self._inputs: dict[int, Any] = {}
        """Memory that FSDP modules of the forward that runs were called with, by `cdata`."""
        self._held: weakref.WeakValueDictionary[int, _Saved] = weakref.WeakValueDictionary()
        """What was saved outside of FSDP modules and may be the input of one, by `id`."""
        self._paged: dict[_Key, tuple[Any, int, weakref.ref[_Paged]]] = {}
        """Memory and version of what has been paged in the forward that runs: it may be saved again."""
        self._copying: list[tuple[torch.Tensor, int, DeviceEvent, _Paged]] = []
        """Tensors that a device still copies into pages, with their versions."""
        self._inside: list[Any] = []
        """FSDP modules that are running, but for the root; the innermost last."""
        self._begun: set[int] = set()
        """FSDP modules that have begun in the forward that runs, but for the root, by `id`."""
        self._entered: list[saved_tensors_hooks | None] = []
        """For each forward of the root that runs, what it lets autograd save by."""
        self._warned = False
        """Whether it was said that nothing is paged. [Note: hooks of others]"""
        fsdp_modules = [module for module in sharded.model.modules() if torch_private.is_sharded_module(module)]
        self._fsdp_modules = sum(fsdp_module is not sharded.model for fsdp_module in fsdp_modules)
        """All that there are, but for the root."""
        with ExitStack() as undo:
            for fsdp_module in fsdp_modules:
                if fsdp_module is not sharded.model:
                    self._hook(fsdp_module, self._begin_fsdp_module, self._end_fsdp_module, undo)
                    # FSDP2 may give it its inputs in another dtype.
                    undo.callback(fsdp_module.register_forward_pre_hook(_eager(self._look), with_kwargs=True).remove)
            self._hook(sharded.model, self._begin, self._end, undo)
            self._undo = undo.pop_all()

    @staticmethod
    def _hook(module: Any, before: Callable[..., None], behind: Callable[..., None], undo: ExitStack) -> None:
        hook = module.register_forward_pre_hook(_eager(before), prepend=True, with_kwargs=True)
        undo.callback(hook.remove)
        hook = module.register_forward_hook(_eager(behind), with_kwargs=True, always_call=True)
        undo.callback(hook.remove)

    def detach(self) -> None:
        """Remove the hooks. What has been saved can be loaded as long as there are pages. Idempotent."""
        self._drop_interrupted()
        self._undo.close()

    # Forwards #

    def _begin(self, module: Any, args: Any, kwargs: Any) -> None:
        """Begin a forward of the root."""
        if not torch_private.in_backward():
            self._drop_interrupted()
        hooks = None
        if torch.is_grad_enabled() and not torch_private.in_backward():
            self._inputs.clear()
            self._begun.clear()
            self._paged.clear()
            if torch_private.saved_tensors_are_hooked():
                self._warn()
            else:
                hooks = saved_tensors_hooks(_eager(self._save), _eager(self._load))
                hooks.__enter__()
        self._entered.append(hooks)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "activations.tier has no effect: hooks for saved tensors around the model (torch.utils.checkpoint, "
                "save_on_cpu) have all that it saves; leave them out, or checkpoint its layers"
            )

    def _end(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """End a forward of the root, well or not."""
        hooks = self._entered.pop() if self._entered else None  # a hook of others may have failed before `_begin`
        if hooks is not None:
            hooks.__exit__()  # type: ignore[no-untyped-call]
        self._end_copies()

    def _drop_interrupted(self) -> None:
        """Forget forwards that were interrupted: torch calls `_end` behind an `Exception` only."""
        self._inside.clear()
        for hooks in filter(None, reversed(self._entered)):
            hooks.__exit__()  # type: ignore[no-untyped-call]
        self._entered.clear()

    def _begin_fsdp_module(self, module: Any, args: Any, kwargs: Any) -> None:
        """Begin a forward of another FSDP module."""
        self._inside.append(module)
        self._begun.add(id(module))
        self._look(module, args, kwargs)

    def _end_fsdp_module(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """End a forward of another FSDP module, well or not."""
        if self._inside and self._inside[-1] is module:
            self._inside.pop()

    def _look(self, module: Any, args: Any, kwargs: Any) -> None:
        """Note what an FSDP module is called with, and page what was saved of it before."""
        if not any(self._entered) or torch_private.in_backward():
            return
        self._end_copies()
        for tensor in _tensors((args, kwargs)):
            if self._can_be_paged(tensor) and _is_activation(tensor):
                memory = torch_private.weak_memory(tensor)
                self._inputs[memory.cdata] = memory
        for saved in list(self._held.values()):
            if saved.tensor is not None and self._is_input(saved.tensor) and not saved.modified:
                saved.page(self._page(saved.tensor))
                del self._held[id(saved)]

    def _can_be_paged(self, tensor: torch.Tensor) -> bool:
        """Whether pages can hold a tensor, and it is worth it."""
        return (
            type(tensor) is torch.Tensor
            and tensor.is_floating_point()
            and tensor.device == self._pages.device
            and tensor.nbytes >= _LEAST_BYTES
            and _is_dense(tensor)
        )

    def _is_input(self, tensor: torch.Tensor) -> bool:
        memory = self._inputs.get(torch_private.weak_memory(tensor).cdata)
        return memory is not None and not memory.expired()

    # What autograd calls #

    def _save(self, tensor: torch.Tensor) -> _Saved:
        """Return what autograd is to keep of a tensor."""
        saved = _Saved(tensor)
        if self._can_be_paged(tensor):
            if self._is_input(tensor):  # also where it has been detached, as in what torch.compile makes
                saved.page(self._page(tensor))
            elif not self._inside and _is_activation(tensor):
                self._held[id(saved)] = saved
        return saved

    def _load(self, saved: _Saved) -> torch.Tensor:
        """Return the tensor. Raises `RuntimeError`, as autograd does, if it was modified meanwhile."""
        paged = saved.paged
        if paged is None:
            assert saved.tensor is not None
            if saved.modified:
                raise RuntimeError(f"{_MODIFIED}: a tensor of shape {tuple(saved.tensor.shape)}")
            return saved.tensor
        like = saved.like
        assert like is not None
        found = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self._pages.device)
        self._pages.load(paged.kept, _bytes(found))
        self._end_copies()  # behind `load`, which waits for those of these pages
        if paged.modified:
            raise RuntimeError(
                f"{_MODIFIED} while it was copied: the input of an FSDP module, of shape {tuple(like.shape)}"
            )
        return found

    def _page(self, tensor: torch.Tensor) -> _Paged:
        """Copy the memory of a tensor into pages, unless that has been done. Raises as `ActivationPages.keep`."""
        memory = torch_private.weak_memory(tensor)
        key: _Key = memory.cdata, int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes
        if key in self._paged:
            before, version, known = self._paged[key]
            there = known()
            if there is not None and not before.expired() and version == tensor._version:
                self._pages.keep_again(there.kept)
                return there
        tensor = tensor.detach()  # has the same version, also later
        try:
            kept, device_event = self._pages.keep(_bytes(tensor))
        except BudgetError as error:
            raise BudgetError(
                f"{error}. There was no room in layer {len(self._begun)} of {self._fsdp_modules}"
            ) from None
        paged = _Paged(kept)
        self._paged[key] = memory, tensor._version, weakref.ref(paged)
        if not device_event.passed():
            self._copying.append((tensor, tensor._version, device_event, paged))
        return paged

    def _end_copies(self) -> None:
        """Let go of what has been copied."""
        while self._copying and self._copying[0][2].passed():
            tensor, version, _, paged = self._copying.pop(0)
            paged.modified = tensor._version != version


def _eager(hook: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(hook)  # type: ignore[no-untyped-call, no-any-return]


def _is_activation(tensor: torch.Tensor) -> bool:
    """Whether a tensor was computed, and a gradient goes on from it: no parameter nor view of one, mask or position."""
    return tensor.requires_grad and not (tensor if tensor._base is None else tensor._base).is_leaf


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether it has each element of a stretch of memory once, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as bytes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
