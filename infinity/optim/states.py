"""Mapping that serves as `optimizer.state`, and reads states from NVMe when they are accessed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from infinity import interrupts, torch_private
from infinity.content.format import MASTER
from infinity.content.layout import Layout
from infinity.content.views import torch_dtype
from infinity.errors import InfinityError, UnsupportedError
from infinity.fsdp.paged_tensor import PagedTensor
from infinity.fsdp.shard_io import ShardIO
from infinity.optim.base_optimizer import NO_ENTRIES, BaseOptimizer, rejecting
from infinity.optim.kernel import StateSpec
from infinity.optim.optimizer_clone import copied, in_place_of
from infinity.optim.step import StepRunner
from infinity.optim.update_thread import telling

NO_COPIES = (
    "an offloaded optimizer cannot be copied or pickled because its state is stored on NVMe; call "
    "optimizer.save_checkpoint(), and set run.resume to continue from the checkpoint"
)


@dataclass(frozen=True)
class StateHandle:
    """Location of one state of one shard. See `infinity.fsdp.paged_tensor.TensorHandle`."""

    reader: StateReader
    shard: int
    kind: str
    """Name of the state in the optimizer."""
    name: str
    """Name to use in error messages."""
    device: torch.device
    """Device to which the state is loaded."""

    def load(self) -> torch.Tensor:
        """Return a flat copy of the elements on the compute device."""
        return self.reader.load(self.shard, self.kind).to(self.device)

    def save(self, content: torch.Tensor) -> None:
        """Replace the elements."""
        self.reader.save(self.shard, self.kind, content)

    def fail(self, error: Exception) -> None:
        """End the run on all ranks with `error`."""
        self.reader.fail(error)


class StatesOfOne(dict[str, Any]):
    """Optimizer state of one parameter, by name. Its tensors can be modified in place."""

    def __setitem__(self, key: str, value: Any) -> None:
        """Accept a value that was changed in place, as in `state["step"] += 1`.

        Raises:
            UnsupportedError: if `value` is a different object from the existing one.
        """
        if self.get(key) is not value:
            raise UnsupportedError(NO_ENTRIES)

    __delitem__ = clear = pop = popitem = update = __ior__ = rejecting(NO_ENTRIES)  # type: ignore[assignment]

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return an existing value.

        Raises:
            UnsupportedError: if there is no state named `key`.
        """
        if key not in self:
            raise UnsupportedError(NO_ENTRIES)
        return self[key]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as a plain dictionary. Changes to the copy do not reach the pages."""
        return dict, (dict(self),)


class StateReader:
    """Read and write the states of parameters in pages, as of the last step.

    A parameter that was never updated has the state that the optimizer creates before the first update. Its pages
    receive this state only if one of its tensors is written.

    Args:
        base_optimizer: base optimizer, which determines the states.
        parameters: shard index of every parameter, in the order of `model.parameters()`.
        names: shard index of every parameter name.
    """

    def __init__(
        self,
        layout: Layout,
        shards: ShardIO,
        runner: StepRunner,
        base_optimizer: BaseOptimizer,
        parameters: Mapping[nn.Parameter, int],
        names: Mapping[str, int],
    ) -> None:
        self._layout, self._shards, self._runner, self._base_optimizer = layout, shards, runner, base_optimizer
        # By id, because `==` would compare the elements of parameters
        self._numbers = {id(param): shard for param, shard in parameters.items()}
        self._params = {shard: param for param, shard in parameters.items()}  # tied parameters are listed once
        self.parameters = list(parameters)
        """All parameters, in the order of `model.parameters()`."""
        self._names = names
        self._in_memory = base_optimizer.in_memory
        self._specs: dict[int, StateSpec] = {}  # by shard; contains only trainable shards
        for group in base_optimizer.optimizer.param_groups:
            for param in group["params"]:
                shard = self._numbers.get(id(param), -1)
                if shard >= 0 and layout.shards[shard].spec.trainable:
                    self._specs[shard] = base_optimizer.kernel.discover(param)
        # Initial states, by shard, of a single weight. The scalars become current when a state of the shard is written.
        self._initial: dict[int, dict[str, Any]] = {}

    def updated_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that have states, in the order of `model.parameters()`."""
        ignored = self._in_memory.ignored.values()
        return [param for param in (*self.parameters, *ignored) if self.has_state(param)]

    def has_state(self, param: object) -> bool:
        """Return whether a parameter has states: it has been updated, or the optimizer's constructor creates states.

        Raises:
            InfinityError: if the parameter was already updated in backward but `step()` has not been called, or if the
                optimizer is closed.
        """
        self._runner.check_open()
        if param in self._in_memory:
            return bool(self._in_memory.state_of(cast("nn.Parameter", param)))
        shard = self._numbers.get(id(param), -1)
        if not self._keeps_state(shard):
            return False
        if shard in self._in_memory.sharded:
            return bool(self._in_memory.state_of_shard(shard))
        self._runner.look(shard)
        return shard in self._runner.updates.scalars or self._base_optimizer.kernel.builds

    def _keeps_state(self, shard: int) -> bool:
        spec = self._specs.get(shard)
        return spec is not None and bool(spec.kinds or spec.scalars)

    def state_of(self, param: nn.Parameter, *, initial: bool = False) -> dict[str, Any]:
        """Return the states of a parameter as they would be in memory, or an empty dict if it has none.

        The tensors have the shape and sharding of the parameter. They are stored on NVMe, and writes to them persist.

        Args:
            initial: whether to return the state that the first update will create if the parameter was never updated.

        Raises:
            InfinityError: under the same conditions as `has_state`.
            UnsupportedError: if a state is larger than the limit for unplanned reads.
        """
        if param in self._in_memory:
            return StatesOfOne(self._in_memory.state_of(param, initial=initial))
        shard = self._numbers.get(id(param), -1)
        if not (self._keeps_state(shard) if initial else self.has_state(param)):
            return StatesOfOne()
        if shard in self._in_memory.sharded:
            found = self._in_memory.state_of_shard(shard)
            return StatesOfOne(found or self._state_in_memory(shard, partial(self._initial_value, shard)))
        if not initial and shard not in self._runner.updates.scalars:  # created by the optimizer's constructor
            self._begin(shard)
        kinds = self._specs[shard].kinds
        states = {kind: torch_private.sharded_like(param, self._stored(shard, kind, param.device)) for kind, _ in kinds}
        return StatesOfOne({**states, **self._scalars(shard)})

    def _state_in_memory(
        self, shard: int, value_of: Callable[[str], torch.Tensor], scalars: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return a state of a parameter that stays in memory.

        Args:
            value_of: function that returns the flat local elements of a tensor of the state.
            scalars: scalars of the state. Default: those that the first update will create.
        """
        param, initial = self._params[shard], self._sample(shard)
        scalars = self._scalars(shard) if scalars is None else scalars
        kinds = {kind: torch_private.sharded_like(param, value_of(kind)) for kind, _ in self._specs[shard].kinds}
        return {**kinds, **{key: in_place_of(initial.get(key), value) for key, value in scalars.items()}}

    def restore_in_memory(self, scalars: Mapping[int, Mapping[str, Any]]) -> None:
        """Read the states of parameters that stay in memory from their pages.

        Args:
            scalars: scalars of each parameter that was updated, by shard. Other parameters have no state.
        """
        for shard in self._in_memory.sharded:
            if shard in scalars and self._keeps_state(shard):
                values = self._state_in_memory(shard, partial(self._shards.read, shard), scalars[shard])
                self._in_memory.replace_state_of_shard(shard, values)

    def scalars_in_memory(self) -> dict[int, dict[str, Any]]:
        """Return the scalar states of the updated parameters that stay in memory, by shard."""
        states = {shard: self._in_memory.state_of_shard(shard) for shard in self._in_memory.sharded}
        return {
            shard: {key: state[key] for key in self._specs[shard].scalars if state.get(key) is not None}
            for shard, state in states.items()
            if state
        }

    def _stored(self, shard: int, kind: str, device: torch.device) -> PagedTensor:
        spec, fmt = self._layout.shards[shard].spec, self._layout.format_of(shard)
        handle = StateHandle(self, shard, kind, f"{kind} of {spec.name}", device)
        return PagedTensor.stored(handle, (spec.numel,), torch_dtype(fmt.dtypes[kind]), device)

    def _scalars(self, shard: int) -> dict[str, Any]:
        current = self._runner.updates.scalars.get(shard)
        if current is not None:
            return current
        initial = self._sample(shard)
        return {key: initial[key] for key in self._specs[shard].scalars if key in initial}

    def _sample(self, shard: int) -> dict[str, Any]:
        """Return the state that the optimizer creates for a single weight of 1."""
        if shard not in self._initial:
            param = self._params[shard]
            sample = torch.ones((1,) * param.ndim, dtype=param.dtype, device=param.device)
            self._initial[shard] = self._created(shard, sample)
        return self._initial[shard]

    def _created(self, shard: int, master: torch.Tensor) -> dict[str, Any]:
        """Return the state that the optimizer creates for a shard with the weights `master`."""
        base = self._base_optimizer
        return base.kernel.initial_state(master, base.settings_of([shard])[shard], base.kernel.own())

    def load(self, shard: int, kind: str) -> torch.Tensor:
        """Return a flat copy of one state of a shard."""
        self._runner.look(shard)
        if shard in self._runner.updates.scalars:
            return self._shards.load(shard, kind)
        return self._initial_value(shard, kind)

    def _initial_value(self, shard: int, kind: str) -> torch.Tensor:
        spec, dtype = self._layout.shards[shard].spec, torch_dtype(self._layout.format_of(shard).dtypes[kind])
        if not self._sample(shard)[kind].any():
            return torch.zeros(spec.numel, dtype=dtype)
        master = torch_private.local_part(self._params[shard]).detach()
        if shard not in self._in_memory.sharded:
            master = self._shards.load(shard).view(master.shape)
        initial: torch.Tensor = self._created(shard, master)[kind]
        return initial.to(dtype).reshape(-1)

    def fail(self, error: Exception) -> None:
        """End the run on all ranks with `error`."""
        self._shards.fail(error)

    def save(self, shard: int, kind: str, content: torch.Tensor) -> None:
        """Replace one state of a shard. If the shard was never updated, its other states become the initial ones."""
        self._runner.look(shard)
        with interrupts.held():
            self._shards.save(shard, content, kind)
            if shard not in self._runner.updates.scalars:
                self._begin(shard, but=kind)

    def _begin(self, shard: int, but: str = "") -> None:
        """Write the initial state of a shard that was never updated, except for one of its tensors."""
        for kind, _ in self._specs[shard].kinds:
            if kind != but:
                self._shards.save(shard, self.load(shard, kind), kind)
        self._runner.updates.scalars[shard] = self._scalars(shard)
        del self._initial[shard]

    def load_state_dict(self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Replace the states of all parameters. See `PagedOptimizer.load_state_dict`.

        Args:
            groups: saved param groups. Their `params` are keys of `state`.

        Raises:
            ValueError: if the states do not match this optimizer. Nothing is changed.
        """
        here = [group["params"] for group in self._base_optimizer.optimizer.param_groups]
        if [len(group["params"]) for group in groups] != [len(params) for params in here]:
            raise ValueError(
                f"the state dict has param groups of {[len(group['params']) for group in groups]} parameters, but this "
                f"optimizer has {[len(params) for params in here]}. Create the optimizer with the saved param groups."
            )
        found = [
            (param, {k: v for k, v in state.get(key, {}).items() if v is not None})
            for params, group in zip(here, groups, strict=True)
            for param, key in zip(params, group["params"], strict=True)
        ]
        in_memory = self._in_memory
        saved = {self._numbers[id(param)]: values for param, values in found if param not in in_memory}
        for shard, values in saved.items():
            self._check_loadable(shard, values)
        for param, values in found:
            if param in in_memory:
                in_memory.check_state(param, values)
        with telling(self._shards.fail):  # afterwards, some parameters would have new states and others the old ones
            for param, values in found:
                if param in in_memory:
                    in_memory.replace_state(param, values)
            for shard, values in saved.items():
                self._replace(shard, values)

    def _check_loadable(self, shard: int, values: Mapping[str, Any]) -> None:
        spec, name = self._specs.get(shard), self._layout.shards[shard].spec.name
        expected = {*(kind for kind, _ in spec.kinds), *spec.scalars} if spec is not None else set()
        if values and values.keys() != expected:
            raise ValueError(
                f"the state dict has {', '.join(sorted(map(str, values)))} for {name}, but {self._base_optimizer.name} "
                f"keeps {', '.join(sorted(expected)) or 'no state'} for it. Load the state of the same optimizer."
            )
        param = self._params[shard]
        for kind, _ in spec.kinds if spec is not None and values else ():
            value = values[kind]
            if not isinstance(value, torch.Tensor) or value.shape != param.shape or not _sharded_alike(value, param):
                raise ValueError(
                    f"{kind} of {name} is {_described(value)}, but must be sharded like the parameter, "
                    f"{_described(param)}. Load it with torch.distributed.checkpoint.state_dict.set_state_dict."
                )

    def _replace(self, shard: int, values: Mapping[str, Any]) -> None:
        if shard not in self._specs:
            return
        self._runner.look(shard)
        scalars, spec = self._runner.updates.scalars, self._specs[shard]
        if shard in self._in_memory.sharded:
            dtypes = dict(spec.kinds)

            def copy(kind: str) -> torch.Tensor:
                return torch_private.local_part(values[kind]).detach().to(torch_dtype(dtypes[kind]), copy=True)

            own = {key: values[key] for key in spec.scalars if values}
            self._in_memory.replace_state_of_shard(shard, self._state_in_memory(shard, copy, own) if values else {})
            return
        if not values:
            scalars.pop(shard, None)
            return
        states = self.state_of(self._params[shard], initial=True)
        stored = all(_have_same_elements(values[kind], states[kind]) for kind, _ in spec.kinds)
        if spec.kinds and stored and shard not in scalars:
            return  # never updated, before and after
        with interrupts.held(), torch.no_grad():
            for kind, _ in spec.kinds:
                states[kind].copy_(values[kind])  # does nothing if torch.distributed.checkpoint has loaded it in place
            scalars[shard] = {key: copied(values[key]) for key in spec.scalars}

    def read(self, name: str) -> dict[str, Any]:
        """Return this rank's master weights and states of one parameter. See `PagedOptimizer.read_state`.

        Raises:
            InfinityError: if no trained parameter has this name.
        """
        if (param := self._in_memory.ignored.get(name)) is not None:
            states = self._in_memory.state_of(param)
            return {MASTER: copied(param), **{key: copied(value) for key, value in states.items()}}
        shard = self._names.get(name, -1)
        if shard < 0 or not self._layout.shards[shard].spec.trainable:
            raise InfinityError(f"the model has no trained parameter named {name!r}")
        if shard in self._in_memory.sharded:
            states = {MASTER: self._params[shard], **self.state_of(self._params[shard], initial=True)}
            sections = self._layout.format_of(shard).dtypes
            values = {key: copied(torch_private.local_part(states[key]).reshape(-1)) for key in sections}
            return {**values, **self.scalars_in_memory().get(shard, {})}
        values = {kind: self._shards.load(shard, kind) for kind, _ in self._layout.format_of(shard).kinds}
        return {MASTER: self._shards.load(shard), **values, **self._runner.updates.scalars.get(shard, {})}


def _have_same_elements(value: torch.Tensor, state: torch.Tensor) -> bool:
    """Return whether both tensors refer to the same stored elements."""
    one, other = torch_private.local_part(value), torch_private.local_part(state)
    return isinstance(one, PagedTensor) and isinstance(other, PagedTensor) and one.handle == other.handle


def _sharded_alike(value: torch.Tensor, param: torch.Tensor) -> bool:
    if not isinstance(param, DTensor) or not isinstance(value, DTensor):
        return isinstance(param, DTensor) == isinstance(value, DTensor)
    return value.placements == param.placements and value.device_mesh == param.device_mesh


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    placements = f" with placements {value.placements}" if isinstance(value, DTensor) else ""
    return f"a {type(value).__name__} of shape {tuple(value.shape)}{placements}"


class NotCopied:
    """Object that cannot be copied or pickled. `PagedStates` thereby also protects the base optimizer."""

    __deepcopy__ = __reduce_ex__ = rejecting(NO_COPIES)  # type: ignore[assignment]


class PagedStates(NotCopied, MutableMapping[nn.Parameter, dict[str, Any]]):
    """States of the parameters that have been updated. Behaves like the `state` dictionary of an in-memory optimizer.

    The tensors have the sharding of their parameter. They are stored on NVMe, and writes to them persist. All methods
    raise the same exceptions as `StateReader.state_of`. Setting or removing entries raises `UnsupportedError`.
    """

    def __init__(self, reader: StateReader) -> None:
        # A weak reference, so that the base optimizer, which holds this mapping, does not keep a run in memory
        self._known = weakref.ref(reader)

    @property
    def _reader(self) -> StateReader:
        reader = self._known()
        if reader is None:
            raise InfinityError("this optimizer was closed; read its state before you close it")
        return reader

    def __getitem__(self, param: nn.Parameter) -> dict[str, Any]:
        """Return the states of a parameter."""
        return self._reader.state_of(param)

    __setitem__ = __delitem__ = clear = rejecting(NO_ENTRIES)  # type: ignore[assignment]

    def setdefault(self, param: nn.Parameter, default: Any = None) -> Any:
        """Return the states of a parameter.

        Raises:
            UnsupportedError: if the parameter has no states.
        """
        if param not in self:
            raise UnsupportedError(NO_ENTRIES)
        return self[param]

    def __bool__(self) -> bool:
        """Return ``True``, so that `torch.distributed.checkpoint` does not take a step to create the states."""
        return True

    def __contains__(self, param: object) -> bool:
        """Return whether a parameter has states."""
        return self._reader.has_state(param)

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that have states, in the order of `model.parameters()`."""
        return iter(self._reader.updated_parameters())

    def __len__(self) -> int:
        """Return the number of parameters that have states."""
        return len(self._reader.updated_parameters())
