"""Determine which calls initialize each tensor of a model, and run these calls for some of the tensors.

Each initialization call first runs on tensors without storage, to find out which tensors it writes. To initialize some
tensors, only the calls that write them run again. These tensors then have storage, and all others still do not. They
are filled with a known value beforehand, so that elements that no call has written can be detected.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from infinity import torch_private
from infinity.errors import UnsupportedError
from infinity.sources.init_steps import InitFunction, Step, build_again, init_steps, left_out, not_repeated, tie_targets

_FILLS = frozenset(
    ("normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "bernoulli_", "log_normal_")
)
"""Operations that overwrite a tensor completely, regardless of its previous values."""


def module_seed(seed: int, name: str) -> int:
    """Return the seed of one call, as a 63-bit integer."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1


@dataclass(frozen=True)
class _Holder:
    """Slot of a tensor in a model: a module, its dict of parameters or buffers, and the key in that dict."""

    module: nn.Module
    tensors: dict[str, Any]
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        found: torch.Tensor = self.tensors[self.key]
        return found


class InitPlan:
    """Initialization calls of a model, and the tensors that each call writes."""

    def __init__(self, model: nn.Module, seed: int, function: InitFunction | None) -> None:
        self._model, self._seed = model, seed
        # `run` does not change the attributes below, except for the holders, which follow the model.
        with _apart():
            _seed_generators(module_seed(seed, "model"))
            twins = build_again(model)
        self._steps = init_steps(model, twins, function)  # calls, in the order in which the model makes them
        self.not_repeated = not_repeated(model, twins) if function is None else []
        """Names of classes whose constructors set tensors that none of the calls sets."""
        self.left_out = {id(module._parameters[key]) for module, key in left_out(model, twins)}
        """Ids of parameters on a real device for which it is unknown whether they have been initialized."""
        self._thrown_away = {(id(module), key) for module, key in tie_targets(model)}  # slots that are tied to others
        self._needs: dict[int, list[int]] = {}  # positions of the calls for a tensor, in order, by tensor id
        self._holders: dict[int, list[_Holder]] = {}  # slots that provide a tensor's value, by tensor id
        self._find_holders()
        self._keys_by_module: dict[int, list[int]] = {}  # ids of a module's tensors, by module id
        for key, holders in self._holders.items():
            for holder in holders:
                self._keys_by_module.setdefault(id(holder.module), []).append(key)
        self._record()

    def _find_holders(self) -> None:
        """Find the current slots of every tensor, except slots whose own value is discarded by tying."""
        self._holders = {}
        for module in self._model.modules():
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        self._holders.setdefault(id(tensor), []).append(_Holder(module, tensors, key))
        for found, holders in self._holders.items():
            self._holders[found] = [h for h in holders if (id(h.module), h.key) not in self._thrown_away] or holders

    def sets(self, tensor: torch.Tensor) -> bool:
        """Return whether any call writes a tensor."""
        return id(tensor) in self._needs

    def rivals(self, tensor: torch.Tensor) -> list[str]:
        """Return the classes whose constructors may set a tied parameter differently, if nothing else sets it."""
        holders = self._holders[id(tensor)]
        classes = sorted({torch_private.original_class(holder.module).__name__ for holder in holders})
        constructed = all(self._steps[index].kind == "construct" for index in self._needs.get(id(tensor), []))
        return classes if constructed and len(classes) > 1 else []

    def _record(self) -> None:
        """Run every call once on tensors without storage, and record which tensors it writes."""
        # Tensors that calls have assigned to slots. Keeping them alive prevents their storage keys from being reused.
        replaced: list[torch.Tensor] = []
        with _apart(), torch_private.classes_of_before(self._model), self._substituted({}) as substitutes:
            watch = _Watch({torch_private.storage_key(tensor): key for key, tensor in substitutes.items()})
            for index, step in enumerate(self._steps):
                watch.begin()
                inside = [key for m in step.module.modules() for key in self._keys_by_module.get(id(m), ())]
                try:
                    self._seed_for(step)
                    with torch_private.init_without_storage(draw=False), watch:
                        step.call()
                except Exception:  # the call needs real values; if it fails in `run` too, `run` reports it
                    watch.written.update(dict.fromkeys(inside, False))
                for key in inside:
                    tensor = self._current(key)
                    # the call has assigned a new tensor
                    if watch.slots.get(torch_private.storage_key(tensor)) != key:
                        replaced.append(tensor)
                        watch.slots[torch_private.storage_key(tensor)] = key
                        watch.written[key] = True
                for key, entirely in watch.written.items():
                    self._needs[key] = ([] if entirely else self._needs.get(key, [])) + [index]

    def run(self, wanted: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor | None]:
        """Compute the full initial values of some tensors on the CPU, by tensor id. A value is None if it was not set.

        Raises:
            UnsupportedError: if a call fails.
        """
        first = self._values(wanted, _marked)
        twice = {key: tensor for key, tensor in wanted.items() if not _shows_unset(tensor)}
        second = self._values(twice, torch.zeros_like) if twice else {}
        found: dict[int, torch.Tensor | None] = dict(first)
        for key, value in first.items():
            same = torch.equal(value, second[key]) if key in second else not bool(torch.isnan(value).any())
            if not same:
                found[key] = None
        return found

    def _values(self, wanted: Mapping[int, torch.Tensor], fill: Callable[..., torch.Tensor]) -> dict[int, torch.Tensor]:
        real = {key: fill(tensor, device="cpu") for key, tensor in wanted.items()}
        with _apart(), torch_private.classes_of_before(self._model), self._substituted(real):
            for index in sorted({index for key in wanted for index in self._needs.get(key, ())}):
                self._call(self._steps[index])
            return {key: self._current(key).detach() for key in wanted}

    def _call(self, step: Step) -> None:
        self._seed_for(step)
        with torch_private.init_without_storage(draw=True), _Draws():  # type: ignore[no-untyped-call]
            try:
                step.call()
            except Exception as error:  # code of the model
                kind = "" if isinstance(error, UnsupportedError) else f"{type(error).__name__}: "
                cls = torch_private.original_class(step.module).__name__
                raise UnsupportedError(
                    f"{step.name or 'the model'} ({cls}) cannot be initialized on the meta device: {kind}{error}; "
                    "pass init=function to infinity.offload, or build the model on a real device"
                ) from error

    def _seed_for(self, step: Step) -> None:
        _seed_generators(module_seed(self._seed, f"{step.kind}:{step.name}"))

    def _current(self, key: int) -> torch.Tensor:
        return self._holders[key][0].tensor

    @contextmanager
    def _substituted(self, real: Mapping[int, torch.Tensor]) -> Iterator[dict[int, torch.Tensor]]:
        """Temporarily replace the model's tensors: with `real` tensors, copies of real buffers, or empty tensors.

        Empty tensors have no storage. A slot whose own value is discarded by tying gets a separate empty tensor.

        Yields:
            The new tensors, by id of the tensor that they replace.
        """
        self._find_holders()  # buffers may have been set in the meantime
        places: list[dict[str, Any]] = [of for m in self._model.modules() for of in (m._parameters, m._buffers)]
        before = [(tensors, dict(tensors)) for tensors in places]
        substitutes: dict[int, torch.Tensor] = {}

        def stand_in(tensor: torch.Tensor, value: torch.Tensor | None = None) -> torch.Tensor:
            if value is None:
                value = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value

        def content(key: int, tensor: torch.Tensor) -> torch.Tensor | None:
            kept = not isinstance(tensor, nn.Parameter) and not tensor.is_meta
            return tensor.detach().clone() if kept else real.get(key)

        try:
            for key, holders in self._holders.items():
                substitutes[key] = stand_in(holders[0].tensor, content(key, holders[0].tensor))
            for tensors, saved in before:
                tensors.update((key, stand_in(tensor)) for key, tensor in saved.items() if tensor is not None)
            for key, holders in self._holders.items():
                for holder in holders:
                    holder.tensors[holder.key] = substitutes[key]
            yield substitutes
        finally:
            for tensors, saved in before:
                tensors.clear()
                tensors.update(saved)


def _shows_unset(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's dtype has NaN, which can mark elements that were not set."""
    return (tensor.is_floating_point() and tensor.dtype.itemsize > 1) or tensor.is_complex()


def _marked(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return a tensor of the same shape and dtype that is filled with NaN, one, or the largest integer."""
    if _shows_unset(tensor):
        return torch.full(tensor.shape, float("nan"), dtype=tensor.dtype, device=device)
    if tensor.dtype is torch.bool or tensor.is_floating_point():
        return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.full(tensor.shape, torch.iinfo(tensor.dtype).max, dtype=tensor.dtype, device=device)


@contextmanager
def _apart() -> Iterator[None]:
    """Disable gradients in the context, and restore the CPU random generators of PyTorch, Python and NumPy on exit."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        with torch.no_grad():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.default_generator.manual_seed(seed)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records which tensors are written, and whether each was overwritten completely before it was read."""

    def __init__(self, slots: dict[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slots = slots  # key of a tensor, by storage key
        # whether the current call overwrote a tensor completely before reading it, by key
        self.written: dict[int, bool] = {}
        self._read: set[int] = set()  # keys that were read in this call

    def begin(self) -> None:
        self.written, self._read = {}, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor, alias in _tensor_arguments(func, args, kwargs):
            key = self.slots.get(torch_private.storage_key(tensor))
            if key is None:
                continue
            if alias is None:
                self._read.add(key)
            elif alias.is_write:
                whole = tensor.numel() * tensor.dtype.itemsize == tensor.untyped_storage().nbytes()
                fills = func.overloadpacket.__name__ in _FILLS
                self.written.setdefault(key, whole and fills and key not in self._read)
        return func(*args, **kwargs)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Also draws random numbers for tensors without storage, so that a call draws the same numbers regardless of which
    of its tensors are real.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = list(_tensor_arguments(func, args, kwargs))
        written_real = any(alias is not None and alias.is_write and not _is_meta(t) for t, alias in arguments)
        if written_real and any(_is_meta(t) for t, _ in arguments):
            raise UnsupportedError(f"{func} needs the value of a tensor on the meta device")
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and any(
            isinstance(t, torch.Tensor) and _is_meta(t) for t in tree_leaves(result)
        ):
            func(*tree_map(_real, args), **tree_map(_real, kwargs))
        return result


def _is_meta(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"  # `is_meta` returns False during initialization


def _real(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and _is_meta(value):
        return torch.zeros(value.shape, dtype=value.dtype)
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value


def _tensor_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, Any]]:
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for leaf in value if isinstance(value, list | tuple) else (value,):
            if isinstance(leaf, torch.Tensor):
                yield leaf, argument.alias_info
