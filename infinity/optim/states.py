"""Mapping that serves as `optimizer.state`, and reads states from NVMe when they are accessed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from infinity import torch_private
from infinity.content.format import MASTER
from infinity.content.layout import Layout
from infinity.content.views import torch_dtype
from infinity.errors import InfinityError, UnsupportedError
from infinity.fsdp.paged_tensor import PagedTensor
from infinity.fsdp.shard_io import ShardIO
from infinity.optim.base_optimizer import NO_ENTRIES
from infinity.optim.step import StepRunner

NO_COPIES = (
    "an offloaded optimizer cannot be copied or pickled because its state is stored on NVMe; call "
    "optimizer.save_checkpoint(), and set run.resume to continue from the checkpoint"
)


@dataclass(frozen=True)
class StateHandle:
    """Location of one state of one shard. See `infinity.fsdp.paged_tensor.TensorHandle`."""

    shards: ShardIO
    """Object that reads and writes the state."""
    shard: int
    """Index of the shard in the layout."""
    kind: str
    """Name of the state in the optimizer."""
    name: str
    """Name to use in error messages."""
    device: torch.device
    """Device to which the state is loaded."""

    def load(self) -> torch.Tensor:
        """Return a flat copy of the elements on the compute device."""
        return self.shards.load_section(self.shard, self.kind).to(self.device)

    def save(self, content: torch.Tensor) -> None:
        """Replace the elements."""
        self.shards.save_section(self.shard, self.kind, content)


class StatesOfOne(dict[str, Any]):
    """Optimizer state of one parameter, by name. Its tensors can be modified in place."""

    def __setitem__(self, key: str, value: Any) -> None:
        """Accept a value that was changed in place, as in `state["step"] += 1`.

        Raises:
            UnsupportedError: if `value` is a different object from the existing one.
        """
        if self.get(key) is not value:
            raise UnsupportedError(NO_ENTRIES)

    def __delitem__(self, key: str) -> None:
        """Raise `UnsupportedError`, because entries cannot be removed."""
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(NO_ENTRIES)

    clear = pop = popitem = update = __ior__ = _refuse  # type: ignore[assignment]

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return an existing value.

        Raises:
            UnsupportedError: if there is no state named `key`.
        """
        if key not in self:
            self._refuse()
        return self[key]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as a plain dictionary. Changes to the copy do not reach the pages."""
        return dict, (dict(self),)


class StateReader:
    """Read the states of parameters from pages, as of the last step.

    Args:
        layout: pages of this rank.
        shards: reads and writes shards.
        runner: runs the training steps.
        parameters: shard index of every parameter, in the order of `model.parameters()`.
        names: shard index of every parameter name.
        made_with_state: whether the constructor of the base optimizer already creates states.
    """

    def __init__(
        self,
        layout: Layout,
        shards: ShardIO,
        runner: StepRunner,
        parameters: Mapping[nn.Parameter, int],
        *,
        names: Mapping[str, int],
        made_with_state: bool,
    ) -> None:
        self._layout, self._shards, self._runner = layout, shards, runner
        # By id, because `==` would compare the elements of parameters
        self._numbers = {id(param): shard for param, shard in parameters.items()}
        self.parameters = list(parameters)
        """All parameters, in the order of `model.parameters()`."""
        self._names, self._made_with_state = names, made_with_state

    def updated_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that have states, in the order of `model.parameters()`."""
        return [param for param in self.parameters if self.has_state(param)]

    def has_state(self, param: object) -> bool:
        """Return whether a parameter has states, i.e. has been updated by an optimizer that keeps states.

        Raises:
            InfinityError: under the same conditions as `state_of`.
        """
        self._runner.check_open()
        shard = self._numbers.get(id(param), -1)
        if shard < 0 or not self._layout.shards[shard].spec.trainable:
            return False
        self._runner.look(shard)
        scalars = self._runner.updates.scalars.get(shard)
        if scalars is None and self._made_with_state:
            raise InfinityError(
                f"{self._layout.shards[shard].spec.name} has no state yet because it has never been updated; read it "
                "after a step in which it has a gradient"
            )
        return scalars is not None and bool(scalars or self._layout.format_of(shard).kinds)

    def state_of(self, param: nn.Parameter) -> dict[str, Any]:
        """Return the states of a parameter as they would be in memory, or an empty dict if it was never updated.

        The tensors have the shape and sharding of the parameter. They are stored on NVMe, and writes to them persist.

        Args:
            param: parameter of the model.

        Raises:
            InfinityError: if the parameter was already updated in backward but `step()` has not been called, if it was
                never updated although the optimizer's constructor creates states, or if the optimizer is closed.
            UnsupportedError: if a state is larger than the limit for unplanned reads.
        """
        if not self.has_state(param):
            return StatesOfOne()
        shard = self._numbers[id(param)]
        kinds = self._layout.format_of(shard).kinds
        states = {kind: torch_private.sharded_like(param, self._stored(shard, kind, param.device)) for kind, _ in kinds}
        return StatesOfOne({**states, **self._runner.updates.scalars[shard]})

    def _stored(self, shard: int, kind: str, device: torch.device) -> PagedTensor:
        spec, fmt = self._layout.shards[shard].spec, self._layout.format_of(shard)
        handle = StateHandle(self._shards, shard, kind, f"{kind} of {spec.name}", device)
        return PagedTensor.stored(handle, (spec.numel,), torch_dtype(fmt.dtypes[kind]), device)

    def read(self, name: str) -> dict[str, Any]:
        """Return this rank's master weights and states of one parameter. See `PagedOptimizer.read_state`.

        Raises:
            InfinityError: if no trained parameter has this name.
        """
        shard = self._names.get(name, -1)
        if shard < 0 or not self._layout.shards[shard].spec.trainable:
            raise InfinityError(f"the model has no trained parameter named {name!r}")
        values = {kind: self._shards.load_section(shard, kind) for kind, _ in self._layout.format_of(shard).kinds}
        return {MASTER: self._shards.load(shard), **values, **self._runner.updates.scalars.get(shard, {})}


class PagedStates(MutableMapping[nn.Parameter, dict[str, Any]]):
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

    def __setitem__(self, param: nn.Parameter, states: dict[str, Any]) -> None:
        """Raise `UnsupportedError`, because entries cannot be set."""
        raise UnsupportedError(NO_ENTRIES)

    def __delitem__(self, param: nn.Parameter) -> None:
        """Raise `UnsupportedError`, because entries cannot be removed."""
        raise UnsupportedError(NO_ENTRIES)

    def clear(self) -> None:
        """Raise `UnsupportedError`, because entries cannot be removed."""
        raise UnsupportedError(NO_ENTRIES)

    def setdefault(self, param: nn.Parameter, default: Any = None) -> Any:
        """Return the states of a parameter.

        Raises:
            UnsupportedError: if the parameter has no states.
        """
        if param not in self:
            raise UnsupportedError(NO_ENTRIES)
        return self[param]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Raise `UnsupportedError`, which also prevents copying of the base optimizer."""
        raise UnsupportedError(NO_COPIES)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise `UnsupportedError`, which also prevents pickling of the base optimizer."""
        raise UnsupportedError(NO_COPIES)

    def __contains__(self, param: object) -> bool:
        """Return whether a parameter has states."""
        return self._reader.has_state(param)

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that have states, in the order of `model.parameters()`."""
        return iter(self._reader.updated_parameters())

    def __len__(self) -> int:
        """Return the number of parameters that have states."""
        return len(self._reader.updated_parameters())
