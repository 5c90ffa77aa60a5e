"""The states of an optimizer as `optimizer.state` has them, read when they are asked for."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import nn


class StateReader(Protocol):
    """Who knows the states."""

    def updated_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that have states."""

    def has_state(self, param: object) -> bool:
        """Return whether a parameter has states."""

    def state_of(self, param: nn.Parameter) -> dict[str, Any]:
        """Return the states of a parameter; none where it was never updated."""


class PagedStates(Mapping[nn.Parameter, dict[str, Any]]):
    """The states of the parameters that have been updated; of others, none: as the dictionary in memory has it.

    Tensors are sharded like the parameter; what they hold is a copy. All methods raise what `PagedOptimizer.state_of`
    raises.
    """

    def __init__(self, reader: StateReader) -> None:
        self._reader: StateReader = weakref.proxy(reader)

    def __getitem__(self, param: nn.Parameter) -> dict[str, Any]:
        """Return the states of a parameter."""
        return self._reader.state_of(param)

    def __contains__(self, param: object) -> bool:
        """Whether a parameter has states."""
        return self._reader.has_state(param)

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that have states, in the order of the model."""
        return iter(self._reader.updated_parameters())

    def __len__(self) -> int:
        """Return how many parameters have states."""
        return len(self._reader.updated_parameters())
