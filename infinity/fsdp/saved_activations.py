"""Page the activations that the forward of an FSDP module saves for its backward.

[Note: paged activations] `SavedActivations` pages the inputs of FSDP modules when autograd saves them. With activation
checkpointing (PyTorch's, transformers', or `infinity.micro_batches`), these inputs are the only tensors that each layer
keeps. Other saved tensors stay in memory: gathered weights, tensors that the root saves between its FSDP modules, and
tensors saved by layers without checkpointing.

If checkpointing wraps the call of an FSDP module, autograd saves the module's input before the call. A tensor that is
saved outside FSDP modules is therefore held until an FSDP module is called with it, or until it is freed.

[Note: hooks around the model] If a user sets saved-tensor hooks around the model, these hooks receive every saved
tensor, and no activation is paged. Examples are `torch.utils.checkpoint` around the whole model, which counts the saved
tensors, and `save_on_cpu`, which already moves them elsewhere.

[Note: in-place modification] Pages hold the values that the tensor had when it was saved. Once a device has copied the
tensor to pages, it may be modified in place, although autograd without hooks would reject this. If it is modified
during the copy, loading it raises `RuntimeError`.
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
"""Minimum size of a paged tensor. Smaller tensors are not worth a page."""
_Key = tuple[int, int, int]
"""Identity of a memory range: `cdata` of the storage, offset in bytes, and length in bytes."""

_MODIFIED = "one of the variables needed for gradient computation has been modified by an inplace operation"


class _Saved:
    """Object that autograd saves in place of a tensor. Until the tensor is paged, it holds the tensor itself."""

    __slots__ = ("__weakref__", "_version", "like", "paged", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached, because the output of an operation refers to its graph, and the graph holds this object. This
        # reference cycle would never be freed.
        self.tensor: torch.Tensor | None = tensor.detach()
        """The tensor without its graph. ``None`` once it is paged."""
        self._version = tensor._version
        self.paged: StoredActivation | None = None
        """Paged copy of the tensor's memory. ``None`` until it is paged."""
        self.like: torch.Tensor | None = None
        """Meta tensor with its shape, strides and dtype. ``None`` until it is paged."""

    def page(self, paged: StoredActivation) -> None:
        """Replace the tensor by its paged copy."""
        assert self.tensor is not None
        shape, strides = self.tensor.shape, self.tensor.stride()
        self.like = torch.empty_strided(shape, strides, dtype=self.tensor.dtype, device="meta")
        self.paged, self.tensor = paged, None

    @property
    def modified(self) -> bool:
        """Whether the tensor was modified in place after it was saved. With hooks, autograd does not check this."""
        return self.tensor is not None and self.tensor._version != self._version


class SavedActivations:
    """Saved-tensor and module hooks that page the inputs of FSDP modules in training forwards.

    The hooks stay on the model until `detach`. Only the training thread runs forwards; backward runs on an autograd
    thread.
    """

    def __init__(self, sharded: ShardedModel, pages: ActivationPages) -> None:
        self._pages = pages
        self._inputs: dict[int, Any] = {}
        """Memory of the inputs of FSDP modules in the current forward, by `cdata`."""
        self._held: weakref.WeakValueDictionary[int, _Saved] = weakref.WeakValueDictionary()
        """Tensors saved outside FSDP modules that may later be passed to an FSDP module, by `id`."""
        self._paged: dict[_Key, tuple[Any, int, weakref.ref[StoredActivation]]] = {}
        """Memory, version and copy of each tensor paged in the current forward, because it may be saved again."""
        self._copying: list[tuple[torch.Tensor, int, DeviceEvent, StoredActivation]] = []
        """Tensors that a device is still copying into pages, with their versions."""
        self._inside: list[Any] = []
        """FSDP modules, except for the root, whose forward is running, innermost last."""
        self._begun: set[int] = set()
        """FSDP modules, except for the root, that the current forward has called, by `id`."""
        self._entered: list[saved_tensors_hooks | None] = []
        """Saved-tensor hooks for each running forward of the root."""
        self._warned = False
        """Whether the warning was logged. See [Note: hooks around the model]."""
        fsdp_modules = [module for module in sharded.model.modules() if torch_private.is_sharded_module(module)]
        self._fsdp_modules = sum(fsdp_module is not sharded.model for fsdp_module in fsdp_modules)
        """Number of FSDP modules, excluding the root."""
        with ExitStack() as undo:
            for fsdp_module in fsdp_modules:
                if fsdp_module is not sharded.model:
                    self._hook(fsdp_module, self._begin_fsdp_module, self._end_fsdp_module, undo)
                    # Inspect the inputs again after FSDP2's hook, which may cast them.
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
        """Remove the hooks. Idempotent.

        Saved activations can still be loaded as long as their pages exist.
        """
        self._drop_interrupted()
        self._undo.close()

    # Forwards #

    def _begin(self, module: Any, args: Any, kwargs: Any) -> None:
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
                "activations.tier has no effect: saved-tensor hooks around the model (torch.utils.checkpoint, "
                "save_on_cpu) receive all saved tensors; remove them, or apply checkpointing to individual layers"
            )

    def _end(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        hooks = self._entered.pop() if self._entered else None  # a user's hook may have failed before `_begin`
        if hooks is not None:
            hooks.__exit__()  # type: ignore[no-untyped-call]
        self._end_copies()

    def _drop_interrupted(self) -> None:
        """Discard interrupted forwards. After exceptions like `KeyboardInterrupt`, torch does not call `_end`."""
        self._inside.clear()
        for hooks in filter(None, reversed(self._entered)):
            hooks.__exit__()  # type: ignore[no-untyped-call]
        self._entered.clear()

    def _begin_fsdp_module(self, module: Any, args: Any, kwargs: Any) -> None:
        self._inside.append(module)
        self._begun.add(id(module))
        self._look(module, args, kwargs)

    def _end_fsdp_module(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self._inside and self._inside[-1] is module:
            self._inside.pop()

    def _look(self, module: Any, args: Any, kwargs: Any) -> None:
        """Register the inputs of an FSDP module, and page the saved tensors that turn out to be such inputs."""
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

    # Called by autograd #

    def _save(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        if self._can_be_paged(tensor):
            if self._is_input(tensor):  # also if it is detached, as in torch.compile graphs
                saved.page(self._page(tensor))
            elif not self._inside and _is_activation(tensor):
                self._held[id(saved)] = saved
        return saved

    def _load(self, saved: _Saved) -> torch.Tensor:
        """Return the saved tensor.

        Raises:
            RuntimeError: If an in-place modification invalidated the tensor. See [Note: in-place modification].
        """
        paged = saved.paged
        if paged is None:
            assert saved.tensor is not None
            if saved.modified:
                raise RuntimeError(f"{_MODIFIED}: a tensor of shape {tuple(saved.tensor.shape)}")
            return saved.tensor
        like = saved.like
        assert like is not None
        found = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self._pages.device)
        self._pages.load(paged, _bytes(found))
        self._end_copies()  # must come after `load`, which waits for the copies into these pages
        if paged.modified:
            raise RuntimeError(
                f"{_MODIFIED} while it was copied to pages: the input of an FSDP module, of shape {tuple(like.shape)}"
            )
        return found

    def _page(self, tensor: torch.Tensor) -> StoredActivation:
        """Copy the memory of a tensor into pages, unless they already hold it.

        Raises:
            BudgetError: If the space for activations is exhausted.
        """
        memory = torch_private.weak_memory(tensor)
        key: _Key = memory.cdata, int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes
        if key in self._paged:
            before, version, known = self._paged[key]
            there = known()
            if there is not None and not before.expired() and version == tensor._version:
                self._pages.keep_again(there)
                return there
        tensor = tensor.detach()  # shares the version counter
        try:
            paged, device_event = self._pages.keep(_bytes(tensor))
        except BudgetError as error:
            raise BudgetError(f"{error}. Space ran out in layer {len(self._begun)} of {self._fsdp_modules}") from None
        self._paged[key] = memory, tensor._version, weakref.ref(paged)
        if not device_event.passed():
            self._copying.append((tensor, tensor._version, device_event, paged))
        return paged

    def _end_copies(self) -> None:
        """Release the tensors whose copies have completed, and record which of them were modified during the copy."""
        while self._copying and self._copying[0][2].passed():
            tensor, version, _, paged = self._copying.pop(0)
            paged.modified = tensor._version != version


def _eager(hook: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(hook)  # type: ignore[no-untyped-call, no-any-return]


def _is_activation(tensor: torch.Tensor) -> bool:
    """Whether a tensor was computed and requires grad. Parameters, their views, masks and positions do not qualify."""
    return tensor.requires_grad and not (tensor if tensor._base is None else tensor._base).is_leaf


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill a contiguous piece of memory exactly once, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
