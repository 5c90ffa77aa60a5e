"""First values of a model on the meta device: its own initialisation, unit by unit.

Peak memory is one whole unit, whatever the size of the model. Every call that initialises something runs under a seed
of its own, derived from the run's seed and the module's name; so the values depend on neither world size, nor paths,
nor the division into units.

All calls are run once on tensors without storage, which tells what each of them writes. For a unit, those are run again
that its tensors need, with the unit's tensors real and all others on the meta device. What was not written shows in what
it was filled with before.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from infinity.errors import UnsupportedError
from infinity.fsdp import private
from infinity.fsdp.first_values import FirstValues, Member, ValueOf, local_slice
from infinity.fsdp.init_steps import InitFunction, Step, init_steps, tie_targets
from infinity.layout import MASTER, Layout

REMEDY = (
    "give the model `_init_weights` or its modules `reset_parameters`, or pass init=function to infinity.offload, "
    "which is called with every module and sets what they do not"
)
_FILLS = frozenset(
    "normal_ uniform_ zero_ fill_ copy_ random_ exponential_ bernoulli_ log_normal_ cauchy_ geometric_".split()
)


def module_seed(seed: int, name: str) -> int:
    """Return the seed of one call, in 63 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1


class ModuleInitialiser(FirstValues):
    """Runs a model's own initialisation for one unit at a time."""

    def __init__(self, model: nn.Module, seed: int, function: InitFunction | None) -> None:
        self._model, self._seed, self._function = model, seed, function
        self._plan_made: _Plan | None = None  # made when it is first needed: not for a run that resumes

    @property
    def _plan(self) -> _Plan:
        if self._plan_made is None:
            self._plan_made = _Plan(self._model, self._seed, self._function)
        return self._plan_made

    def check(
        self, model: nn.Module, members: Sequence[Member], layout: Layout, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check that something sets every parameter that is on the meta device.

        Raises:
            UnsupportedError: nothing does; the parameters are named.
        """
        members = [member for member in members if member.param.sharded_param.is_meta]
        for member in members:
            if private.is_tensor_parallel(member.param):
                raise UnsupportedError(
                    f"{member.names[0]} is tensor-parallel and on the meta device; build the model on a real device"
                )
            if classes := self._plan.rivals(member.param.sharded_param):
                raise UnsupportedError(
                    f"{' and '.join(member.names)} are one parameter, to which {' and '.join(classes)} give different "
                    "first values: which of them counts is not known; pass init=function to infinity.offload"
                )
        _refuse([m.names[0] for m in members if not self._plan.sets(m.param.sharded_param)])

    def values(self, unit: str, members: Sequence[Member]) -> ValueOf:
        """Return what the model's own code sets the parameters of a unit to; those on a real device stay as they are.

        Args:
            members: all parameters of a unit, or some.

        Raises:
            UnsupportedError: nothing sets a parameter, or not all of it.
        """
        wanted = {id(m.param.sharded_param): m.param.sharded_param for m in members if m.param.sharded_param.is_meta}
        whole = self._plan.run(wanted)
        name_of = {id(member.param.sharded_param): member.names[0] for member in members}
        _refuse([name_of[key] for key, value in whole.items() if value is None])
        found: list[torch.Tensor] = []
        for member in members:
            value = whole.pop(id(member.param.sharded_param), None)
            if value is None:
                found.append(private.local_tensor(member.param).detach().reshape(-1).cpu())
            else:
                found.append(local_slice(member.param, value).clone())
        return lambda position, section: found[position] if section == MASTER else None

    def set_buffers(self, device: torch.device, known: Mapping[str, torch.Tensor]) -> None:
        """Give every buffer that is still on the meta device its real value.

        Args:
            known: values that come from elsewhere, by the buffer's name in the model; they need no initialisation.

        Raises:
            UnsupportedError: nothing computes a buffer; it is named.
        """
        for name, value in known.items():
            owner, _, key = name.rpartition(".")
            buffers = self._model.get_submodule(owner)._buffers
            dtype = buffers[key].dtype  # type: ignore[union-attr]
            _replace_buffers(self._model, {id(buffers[key]): value.to(device, dtype)})
        wanted = {id(buffer): buffer for buffer in self._model.buffers() if buffer.is_meta}
        if not wanted:
            return
        found = self._plan.run(wanted)
        names = {id(buffer): name for name, buffer in self._model.named_buffers()}
        if unset := [names[key] for key, value in found.items() if value is None]:
            raise UnsupportedError(
                f"buffers {', '.join(unset)} are on the meta device and nothing computes them: {REMEDY}; or build the "
                "model with torch.device('meta') around its parameters only"
            )
        _replace_buffers(self._model, {key: value.to(device) for key, value in found.items() if value is not None})

    def make_buffers(self, device: torch.device) -> None:
        """Give every buffer that is on the meta device memory, for values that a commit has."""
        meta = [buffer for buffer in self._model.buffers() if buffer.is_meta]
        _replace_buffers(self._model, {id(buffer): torch.empty_like(buffer, device=device) for buffer in meta})


def _refuse(unset: Iterable[str]) -> None:
    if names := ", ".join(unset):
        raise UnsupportedError(f"nothing initialises {names}: {REMEDY}")


def _replace_buffers(model: nn.Module, new: Mapping[int, torch.Tensor]) -> None:
    """Put tensors in the place of buffers, by their identity: a buffer that modules share stays shared."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in new:
                module._buffers[key] = new[id(buffer)]


@dataclass(frozen=True)
class _Holder:
    """A place of a tensor in a model: a module's parameters or buffers, and the name there."""

    module: nn.Module
    tensors: dict[str, Any]
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        """What lies there now."""
        found: torch.Tensor = self.tensors[self.key]
        return found


class _Plan:
    """Which calls each tensor of a model needs for its first value."""

    def __init__(self, model: nn.Module, seed: int, function: InitFunction | None) -> None:
        self._model, self._seed = model, seed
        with _seeded(module_seed(seed, "model")):
            self._steps = init_steps(model, function)
        self._thrown_away = {(id(module), key) for module, key in tie_targets(model)}
        self._needs: dict[int, list[int]] = {}  # by the tensor's identity: positions of its calls, in order
        self._holders: dict[int, list[_Holder]] = {}  # by the tensor's identity: where its value comes from
        self._find_holders()
        self._keys_by_module: dict[int, list[int]] = {}
        for key, holders in self._holders.items():
            for holder in holders:
                self._keys_by_module.setdefault(id(holder.module), []).append(key)
        self._record()

    def _find_holders(self) -> None:
        """Find the places of every tensor, as they are now, without those whose own value a tie throws away."""
        self._holders = {}
        for module in self._model.modules():
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        self._holders.setdefault(id(tensor), []).append(_Holder(module, tensors, key))
        for tensor, holders in self._holders.items():
            self._holders[tensor] = [h for h in holders if (id(h.module), h.key) not in self._thrown_away] or holders

    def sets(self, tensor: torch.Tensor) -> bool:
        """Whether any call writes a tensor."""
        return id(tensor) in self._needs

    def rivals(self, tensor: torch.Tensor) -> list[str]:
        """Return the classes that construct a tied parameter differently, when nothing else initialises it."""
        holders = self._holders[id(tensor)]
        classes = sorted({private.original_class(holder.module).__name__ for holder in holders})
        constructed = all(self._steps[index].kind == "construct" for index in self._needs.get(id(tensor), []))
        return classes if constructed and len(classes) > 1 else []

    def _record(self) -> None:
        """Run every call once on tensors without storage, and note what it writes."""
        replaced: list[torch.Tensor] = []  # kept, so that no other tensor gets its storage's identity
        with self._staged({}) as staged:
            watch = _Watch({private.storage_key(tensor): key for key, tensor in staged.items()})
            for index, step in enumerate(self._steps):
                watch.begin()
                inside = [key for m in step.module.modules() for key in self._keys_by_module.get(id(m), ())]
                try:
                    with _seeded(module_seed(self._seed, f"{step.kind}:{step.name}")), private.init_without_storage(draw=False), watch:
                        step.call()
                except Exception:  # it reads values, of which there are none: when it is needed, it says what it lacks
                    watch.written.update(dict.fromkeys(inside, False))
                for key in inside:
                    tensor = self._current(key)
                    if watch.slots.get(private.storage_key(tensor)) != key:  # another one was put in its place
                        replaced.append(staged[key])
                        watch.slots[private.storage_key(tensor)] = key
                        watch.written[key] = True
                for key, entirely in watch.written.items():
                    self._needs[key] = ([] if entirely else self._needs.get(key, [])) + [index]

    def run(self, wanted: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor | None]:
        """Return the whole first values of some tensors on the CPU, by the tensors' identity; None for what is unset.

        Raises:
            UnsupportedError: a call fails.
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

    def _values(
        self, wanted: Mapping[int, torch.Tensor], fill: Callable[..., torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        real = {key: fill(tensor, device="cpu") for key, tensor in wanted.items()}
        with self._staged(real):
            for index in sorted({index for key in wanted for index in self._needs.get(key, ())}):
                self._call(self._steps[index])
            return {key: self._current(key).detach() for key in wanted}

    def _call(self, step: Step) -> None:
        seed = module_seed(self._seed, f"{step.kind}:{step.name}")
        with _seeded(seed), private.init_without_storage(draw=True), _Draws():
            try:
                step.call()
            except UnsupportedError as error:
                raise UnsupportedError(f"the initialisation of {step.name or 'the model'} fails: {error}") from error
            except Exception as error:  # code of somebody else's
                raise UnsupportedError(
                    f"the initialisation of {step.name or 'the model'} ({private.original_class(step.module).__name__}) "
                    f"fails on the meta device: {type(error).__name__}: {error}; pass init=function to infinity.offload, "
                    "or build the model on a real device"
                ) from error

    def _current(self, key: int) -> torch.Tensor:
        return self._holders[key][0].tensor

    @contextmanager
    def _staged(self, real: Mapping[int, torch.Tensor]) -> Iterator[dict[int, torch.Tensor]]:
        """Put plain tensors in the place of all the model's: those of `real`, copies of real buffers, else empty ones.

        A place whose own value a tie throws away gets an empty one for itself.

        Yields:
            The tensors by the identity of those in whose place they are.
        """
        self._find_holders()  # buffers may have got their values since
        before = [(tensors, dict(tensors)) for m in self._model.modules() for tensors in (m._parameters, m._buffers)]
        staged: dict[int, torch.Tensor] = {}

        def stand_in(tensor: torch.Tensor, value: torch.Tensor | None = None) -> torch.Tensor:
            if value is None:
                value = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value

        def content(key: int, tensor: torch.Tensor) -> torch.Tensor | None:
            kept = not isinstance(tensor, nn.Parameter) and not tensor.is_meta
            return tensor.detach().clone() if kept else real.get(key)

        try:
            for key, holders in self._holders.items():
                staged[key] = stand_in(holders[0].tensor, content(key, holders[0].tensor))
            for tensors, saved in before:
                tensors.update((key, stand_in(tensor)) for key, tensor in saved.items() if tensor is not None)
            for key, holders in self._holders.items():
                for holder in holders:
                    holder.tensors[holder.key] = staged[key]
            yield staged
        finally:
            for tensors, saved in before:
                tensors.clear()
                tensors.update(saved)


def _shows_unset(tensor: torch.Tensor) -> bool:
    """Whether one value of the tensor's dtype, NaN, is never a first value."""
    return (tensor.is_floating_point() and tensor.dtype.itemsize > 1) or tensor.is_complex()


def _marked(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return a tensor of the same shape and dtype filled with what is not zero: NaN, true, or the largest integer."""
    if _shows_unset(tensor):
        return torch.full(tensor.shape, float("nan"), dtype=tensor.dtype, device=device)
    if tensor.dtype is torch.bool or tensor.is_floating_point():
        return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.full(tensor.shape, torch.iinfo(tensor.dtype).max, dtype=tensor.dtype, device=device)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Run without gradients and under a seed, for all generators of torch on the CPU, Python and NumPy."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % (1 << 32))
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class _Watch(TorchDispatchMode):
    """Notes which tensors are written, and whether all of a tensor was, before anything else was done with it."""

    def __init__(self, slots: dict[int, int]) -> None:
        super().__init__()
        self.slots = slots  # key by the identity of the storage
        self.written: dict[int, bool] = {}
        self._read: set[int] = set()

    def begin(self) -> None:
        """Begin a new call."""
        self.written, self._read = {}, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor, alias in _tensor_arguments(func, args, kwargs):
            key = self.slots.get(private.storage_key(tensor))
            if key is None:
                continue
            if alias is None:
                self._read.add(key)
            elif alias.is_write:
                whole = tensor.numel() * tensor.dtype.itemsize == tensor.untyped_storage().nbytes()
                fills = func.overloadpacket.__name__ in _FILLS
                self.written.setdefault(key, whole and fills and key not in self._read)
        return func(*args, **kwargs)


class _Draws(TorchDispatchMode):
    """Draws random numbers for tensors without storage too: a call draws the same, whichever of its tensors are real."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = list(_tensor_arguments(func, args, kwargs))
        written_real = any(alias is not None and alias.is_write and not _is_meta(t) for t, alias in arguments)
        if written_real and any(_is_meta(t) for t, _ in arguments):
            raise UnsupportedError(f"{func} needs the value of another tensor, which is on the meta device now")
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and any(
            isinstance(t, torch.Tensor) and _is_meta(t) for t in tree_leaves(result)
        ):
            func(*tree_map(_real, args), **tree_map(_real, kwargs))
        return result


def _is_meta(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"  # `is_meta` is answered with no while something is initialised


def _real(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and _is_meta(value):
        return torch.zeros(value.shape, dtype=value.dtype)
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value


def _tensor_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, Any]]:
    """Yield the tensors given to an operation, and what its schema says about aliasing of each."""
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for leaf in value if isinstance(value, list | tuple) else (value,):
            if isinstance(leaf, torch.Tensor):
                yield leaf, argument.alias_info
