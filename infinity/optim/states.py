"""The states of an optimizer as `optimizer.state` has them, read when they are asked for."""

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
    "an offloaded optimizer cannot be copied or pickled, since its state is on NVMe: optimizer.save_checkpoint() saves it, and "
    "run.resume continues from there"
)


@dataclass(frozen=True)
class StateHandle:
    """Where one state of one shard is; see `infinity.fsdp.paged_tensor.TensorHandle`."""

    shards: ShardIO
    """Reads and writes it."""
    shard: int
    """Number in the layout."""
    kind: str
    """Name of the state, as the optimizer has it."""
    name: str
    """What errors call it."""
    device: torch.device
    """Where it is loaded to."""

    def load(self) -> torch.Tensor:
        """Return a copy of the elements, flat, on the compute device."""
        return self.shards.load_section(self.shard, self.kind).to(self.device)

    def save(self, content: torch.Tensor) -> None:
        """Replace the elements."""
        self.shards.save_section(self.shard, self.kind, content)


class StatesOfOne(dict[str, Any]):
    """The states of one parameter, by name; their tensors can be written to."""

    def __setitem__(self, key: str, value: Any) -> None:
        """Accept what was changed in place (`state["step"] += 1`). Raises `UnsupportedError` for another tensor."""
        if self.get(key) is not value:
            raise UnsupportedError(NO_ENTRIES)

    def __delitem__(self, key: str) -> None:
        """Refused. Raises `UnsupportedError`."""
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(NO_ENTRIES)

    clear = pop = popitem = update = __ior__ = _refuse  # type: ignore[assignment]

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return what is there. Raises `UnsupportedError` where nothing is."""
        if key not in self:
            self._refuse()
        return self[key]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be copied and pickled as a plain dictionary, which nothing is written through."""
        return dict, (dict(self),)


class StateReader:
    """Reads states of parameters from pages, as they are after the last step."""

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
        """Read nothing yet.

        Args:
            parameters: with their shards, in the order of `model.parameters()`.
            names: of parameters, with their shards.
            made_with_state: whether the optimizer in memory has states before its first step.
        """
        self._layout, self._shards, self._runner = layout, shards, runner
        self._numbers = {id(param): shard for param, shard in parameters.items()}  # by id: equality is of elements
        self.parameters = list(parameters)
        """All parameters, in the order of the model."""
        self._names, self._made_with_state = names, made_with_state

    def updated_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that have states, in the order of `model.parameters()`."""
        return [param for param in self.parameters if self.has_state(param)]

    def has_state(self, param: object) -> bool:
        """Return whether a parameter has states: whether it was ever updated by an optimizer that has any.

        Raises:
            InfinityError: as `state_of`.
        """
        self._runner.check_open()
        shard = self._numbers.get(id(param), -1)
        if shard < 0 or not self._layout.shards[shard].spec.trainable:
            return False
        self._runner.look(shard)
        scalars = self._runner.updates.scalars.get(shard)
        if scalars is None and self._made_with_state:
            raise InfinityError(
                f"{self._layout.shards[shard].spec.name} was not updated yet: its first state is made by its first step"
            )
        return scalars is not None and bool(scalars or self._layout.format_of(shard).kinds)

    def state_of(self, param: nn.Parameter) -> dict[str, Any]:
        """Return the states of a parameter as they would be in memory; none where it was never updated.

        Tensors are sharded like the parameter, of its shape, and are on NVMe: what is written to them is kept.

        Raises:
            InfinityError: the parameter was updated in backward already, and `step()` has not been called; or the
                optimizer has states from the start, and the parameter was not updated yet; or it is closed.
            UnsupportedError: a state is larger than the limit for loading outside the plan.
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
        """Return this rank's master and states of one parameter; see `PagedOptimizer.read_state`.

        Raises:
            InfinityError: there is no trained parameter of that name.
        """
        shard = self._names.get(name, -1)
        if shard < 0 or not self._layout.shards[shard].spec.trainable:
            raise InfinityError(f"there is no trained parameter {name!r}")
        values = {kind: self._shards.load_section(shard, kind) for kind, _ in self._layout.format_of(shard).kinds}
        return {MASTER: self._shards.load(shard), **values, **self._runner.updates.scalars.get(shard, {})}


class PagedStates(MutableMapping[nn.Parameter, dict[str, Any]]):
    """The states of the parameters that have been updated; of others, none: as the dictionary in memory has it.

    Tensors are sharded like the parameter, and on NVMe: what is written to them is kept. All methods raise what
    `StateReader.state_of` raises. Entries cannot be set or removed (`UnsupportedError`).
    """

    def __init__(self, reader: StateReader) -> None:
        self._known = weakref.ref(reader)  # weak: the given optimizer, which has this, is not to keep a run in memory

    @property
    def _reader(self) -> StateReader:
        reader = self._known()
        if reader is None:
            raise InfinityError("this optimizer was closed")
        return reader

    def __getitem__(self, param: nn.Parameter) -> dict[str, Any]:
        """Return the states of a parameter."""
        return self._reader.state_of(param)

    def __setitem__(self, param: nn.Parameter, states: dict[str, Any]) -> None:
        """Refused. Raises `UnsupportedError`."""
        raise UnsupportedError(NO_ENTRIES)

    def __delitem__(self, param: nn.Parameter) -> None:
        """Refused. Raises `UnsupportedError`."""
        raise UnsupportedError(NO_ENTRIES)

    def clear(self) -> None:
        """Refused. Raises `UnsupportedError`."""
        raise UnsupportedError(NO_ENTRIES)

    def setdefault(self, param: nn.Parameter, default: Any = None) -> Any:
        """Return the states of a parameter. Raises `UnsupportedError` where it has none."""
        if param not in self:
            raise UnsupportedError(NO_ENTRIES)
        return self[param]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refused, and with it a copy of the optimizer that was given. Raises `UnsupportedError`."""
        raise UnsupportedError(NO_COPIES)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused, and with it pickling of the optimizer that was given. Raises `UnsupportedError`."""
        raise UnsupportedError(NO_COPIES)

    def __contains__(self, param: object) -> bool:
        """Whether a parameter has states."""
        return self._reader.has_state(param)

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that have states, in the order of the model."""
        return iter(self._reader.updated_parameters())

    def __len__(self) -> int:
        """Return how many parameters have states."""
        return len(self._reader.updated_parameters())
