"""The states of an optimizer as `optimizer.state` has them, read when they are asked for."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from infinity.errors import InfinityError, UnsupportedError
from infinity.fsdp.shard_io import ShardIO


class StateReader(Protocol):
    """Who knows the states."""

    def updated_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that have states."""

    def has_state(self, param: object) -> bool:
        """Return whether a parameter has states."""

    def state_of(self, param: nn.Parameter) -> dict[str, Any]:
        """Return the states of a parameter; none where it was never updated."""


NO_ENTRIES = (
    "the state of an offloaded optimizer has no entries that can be set or removed: write to its tensors, for example "
    'optimizer.state[p]["exp_avg"].zero_(), or offload a model anew for a fresh start'
)

NO_COPIES = (
    "an offloaded optimizer cannot be copied or pickled, since its state is on NVMe: optimizer.commit() saves it, and "
    "run.resume continues from there"
)


@dataclass(frozen=True)
class StateHome:
    """Where one state of one shard is; see `infinity.fsdp.paged_tensor.Home`."""

    content: ShardIO
    shard: int
    kind: str
    name: str
    device: torch.device

    def load(self) -> torch.Tensor:
        """Return a copy of the elements, flat, on the compute device."""
        return self.content.load_section(self.shard, self.kind).to(self.device)

    def save(self, content: torch.Tensor) -> None:
        """Replace the elements."""
        self.content.save_section(self.shard, self.kind, content)


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


class PagedStates(MutableMapping[nn.Parameter, dict[str, Any]]):
    """The states of the parameters that have been updated; of others, none: as the dictionary in memory has it.

    Tensors are sharded like the parameter, and on NVMe: what is written to them is kept. All methods raise what
    `PagedOptimizer.state_of` raises. Entries cannot be set or removed (`UnsupportedError`).
    """

    def __init__(self, reader: StateReader) -> None:
        self._known = weakref.ref(reader)

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
