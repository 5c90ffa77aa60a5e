"""How a batch is cut into slices for one layer: found by trying it on two rows, never guessed.

Which dimension of the first tensor has the batch is said by the user, or by a layer of torch itself (`batch_first`),
else it is the first. Every other tensor may be cut along any dimension of that size, or not at all: a mask over
positions can have as many rows as the batch has by accident. So all possibilities are tried. One is possible if the
layer runs with it on one row and on two, and returns twice as much for two. If several are possible and differ in what
they return, or if the rows of the only one depend on each other, the layer is refused.

[Note: whether rows depend on each other] The gradient of what is returned for one row with respect to another row is
zero to the bit if nothing went from one to the other: attention along the wrong dimension, statistics over the batch
and packed sequences are found so, whatever the numbers are. Where there are no gradients (tokens), a row is changed,
and what is returned for the other must keep its bits.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from infinity.errors import ConfigError, UnsupportedError

BatchDim = int | Mapping[str, int | None] | None
_MOST_POSSIBILITIES = 243
_ASK = (
    "say which with infinity.micro_batches(model, n, batch_dim={'argument': dimension, 'argument that is whole': None})"
)


class Call(NamedTuple):
    """The arguments of a call, flat: `names` and `leaves` one by one, `run(function, leaves)` calls with others."""

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    run: Callable[[Callable[..., Any], Sequence[Any]], Any]

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Flatten the arguments of `function`.

        Raises:
            UnsupportedError: one of them cannot be sliced.
        """
        known = list(inspect.signature(function).parameters)
        given = [*known[: len(args)], *(f"argument {index}" for index in range(len(known), len(args))), *kwargs]
        names: list[str] = []
        leaves: list[Any] = []
        rebuilds: list[tuple[int, Callable[[Sequence[Any]], Any]]] = []
        for name, value in zip(given, (*args, *kwargs.values()), strict=True):
            found, rebuild = flatten(value)
            for leaf in found:
                _check_leaf(name, leaf)
            names += [name] * len(found)
            leaves += found
            rebuilds.append((len(found), rebuild))

        def run(function: Callable[..., Any], leaves: Sequence[Any]) -> Any:
            left = iter(leaves)
            values = [rebuild(list(itertools.islice(left, number))) for number, rebuild in rebuilds]
            return function(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))

        return cls(tuple(names), tuple(leaves), run)


@dataclasses.dataclass(frozen=True)
class Slicing:
    """The dimension along which each argument is cut, and each output joined; None: the same for all slices."""

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]

    def split(self, leaves: Sequence[Any], count: int) -> list[tuple[Any, ...]]:
        """Return the arguments of each slice."""
        parts = [
            (leaf,) * count if dim is None else leaf.chunk(count, dim)
            for leaf, dim in zip(leaves, self.inputs, strict=True)
        ]
        return list(zip(*parts, strict=True))

    def join(self, slices: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the outputs of the whole batch."""
        return [
            parts[0] if dim is None else torch.cat(parts, dim)
            for parts, dim in zip(zip(*slices, strict=True), self.outputs, strict=True)
        ]


def flatten(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of a structure, also of dataclasses, and what makes the same structure of others."""
    found, spec = tree_flatten(value, is_leaf=lambda part: is_cache(part) or isinstance(part, PackedSequence))
    leaves: list[Any] = []
    rebuilds: list[tuple[int, Callable[[Sequence[Any]], Any]]] = []
    for leaf in found:
        inner, rebuild = _fields_of(leaf) if dataclasses.is_dataclass(leaf) else ([leaf], _only)
        leaves += inner
        rebuilds.append((len(inner), rebuild))

    def rebuilt(made: Sequence[Any]) -> Any:
        left = iter(made)
        return tree_unflatten([rebuild(list(itertools.islice(left, number))) for number, rebuild in rebuilds], spec)

    return leaves, rebuilt


def _fields_of(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Flatten a dataclass."""
    if isinstance(value, type) or is_cache(value):
        return [value], _only
    leaves, rebuild = flatten(
        {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    )
    return leaves, lambda made: dataclasses.replace(value, **rebuild(made))


def _only(made: Sequence[Any]) -> Any:
    return made[0]


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of keys and values of transformers."""
    return hasattr(value, "get_seq_length")


def _check_leaf(name: str, leaf: Any) -> None:
    if is_cache(leaf):
        raise UnsupportedError("micro_batches does not work with a cache of keys and values; pass use_cache=False")
    held = vars(leaf).values() if hasattr(leaf, "__dict__") and not isinstance(leaf, type | torch.Tensor) else ()
    nested = isinstance(leaf, torch.Tensor) and leaf.is_nested
    if nested or isinstance(leaf, PackedSequence) or any(isinstance(value, torch.Tensor) for value in held):
        raise UnsupportedError(
            f"micro_batches cannot slice {name}, a {type(leaf).__name__}; pass tensors, or structures of them, with "
            "one row per sequence"
        )


class SlicingFinder:
    """Finds how the calls of one layer are sliced; what has been found once is kept.

    `batch_dim` is the user's: for the first tensor, or by the names of arguments.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], batch_dim: BatchDim) -> None:
        self._module, self._batch_dim = module, batch_dim
        self._default = _own_batch_dim(module, forward)
        self._found: dict[Any, Slicing] = {}

    def find(self, function: Callable[..., Any], call: Call, count: int) -> Slicing:
        """Return how a call is sliced.

        Raises:
            ConfigError: the batch cannot be shared equally, or `batch_dim` does not fit.
            UnsupportedError: it cannot be sliced, or in several ways.
        """
        candidates = self._candidates(call, count)
        training = tuple(module.training for module in self._module.modules())
        kinds = tuple(map(_kind, call.leaves))
        key = (call.names, kinds, candidates, training)
        if key in self._found:
            return self._found[key]
        if torch.is_inference_mode_enabled():
            raise UnsupportedError(
                "micro_batches tries in the first forward whether rows are independent, which inference_mode does not "
                "allow; use torch.no_grad()"
            )
        trial = _Trial(function, call, self._module)
        possible, reason = trial.possible(candidates)
        if not possible:
            raise UnsupportedError(
                f"micro_batches cannot slice {self._name}: {reason}; return one row per sequence, or {_ASK}"
            )
        chosen, returned = possible[0]
        for other, differing in possible[1:]:
            if not _same(returned, differing):
                unclear = {name for name, a, b in zip(call.names, chosen.inputs, other.inputs, strict=True) if a != b}
                raise UnsupportedError(
                    f"micro_batches cannot tell how to slice {', '.join(sorted(unclear))} of {self._name}: the shapes "
                    f"allow several ways; {_ASK}"
                )
        if not trial.independent(chosen):
            raise UnsupportedError(
                f"micro_batches cannot slice {self._name} along dimension {self._dim_of_first(call)}: rows depend on "
                "each other (sequences that come first, as in (S, B, D), need batch_dim=1; packed sequences, BatchNorm "
                "in training and other statistics over the batch cannot be sliced)"
            )
        if len(possible) == 1:  # else what was of no influence may be of some the next time
            self._found[key] = chosen
        return chosen

    @property
    def _name(self) -> str:
        return type(self._module).__name__.removeprefix("FSDP")

    def _dim_of_first(self, call: Call) -> int | None:
        return next(dim for dim in self._said(call) if dim is not None)

    def _said(self, call: Call) -> list[int | None]:
        """Return the dimension that is known for each argument before any is tried; None where none is."""
        said: list[int | None] = [None] * len(call.leaves)
        by_name = self._batch_dim if isinstance(self._batch_dim, Mapping) else {}
        if unknown := sorted(set(by_name) - set(call.names)):
            raise ConfigError(f"batch_dim names {', '.join(unknown)}, but {self._name} was called with {call.names}")
        default = self._batch_dim if isinstance(self._batch_dim, int) else self._default
        for index, (name, leaf) in enumerate(zip(call.names, call.leaves, strict=True)):
            if isinstance(leaf, torch.Tensor) and leaf.ndim:
                if name in by_name:
                    said[index] = by_name[name]
                elif not any(dim is not None for dim in said) and not any(by_name.values()):
                    said[index] = default
                dim = said[index]
                if dim is not None and not 0 <= dim < leaf.ndim:
                    raise ConfigError(
                        f"batch_dim={dim} does not fit {name} of {self._name}, of shape {tuple(leaf.shape)}"
                    )
        return said

    def _candidates(self, call: Call, count: int) -> tuple[tuple[int | None, ...], ...]:
        said = self._said(call)
        sizes = [leaf.shape[dim] for leaf, dim in zip(call.leaves, said, strict=True) if dim is not None]
        batch = sizes[0] if sizes else 0
        if not batch or batch % count or any(size != batch for size in sizes):
            raise ConfigError(
                f"{self._name} got a batch of {batch}, which {count} micro-batches cannot share equally"
                if len(set(sizes)) < 2
                else f"{self._name} got batches of {sizes} in the arguments that batch_dim names"
            )
        by_name = self._batch_dim if isinstance(self._batch_dim, Mapping) else {}
        found: list[tuple[int | None, ...]] = []
        for name, leaf, dim in zip(call.names, call.leaves, said, strict=True):
            if dim is not None or name in by_name or not isinstance(leaf, torch.Tensor):
                found.append((dim,))
            else:
                found.append((*(d for d in range(leaf.ndim) if leaf.shape[d] == batch), None))
        if math.prod(map(len, found)) > _MOST_POSSIBILITIES:
            raise UnsupportedError(f"{self._name} could be sliced in too many ways to try them; {_ASK}")
        return tuple(found)


def _own_batch_dim(module: nn.Module, forward: Callable[..., Any]) -> int:
    """Return where the batch is in the first argument of torch's own layers; 0 for all others."""
    if not getattr(forward, "__module__", "").startswith("torch.nn.modules."):
        return 0
    flags = {inner.batch_first for inner in module.modules() if isinstance(getattr(inner, "batch_first", None), bool)}
    return 1 if flags == {False} else 0


class _Trial:
    """Calls of a layer with the first rows of its batch, which leave random numbers and buffers as they are."""

    def __init__(self, function: Callable[..., Any], call: Call, module: nn.Module) -> None:
        self._function, self._call, self._module = function, call, module

    def possible(self, candidates: tuple[tuple[int | None, ...], ...]) -> tuple[list[tuple[Slicing, list[Any]]], str]:
        """Return the ways in which the layer can be called with slices, each with what it returns for two rows.

        Returns:
            The ways, and why the first of the others is none.
        """
        found, reason = [], ""
        for inputs in itertools.product(*candidates):
            try:
                with torch.no_grad(), self._unnoticed():
                    one, two = (flatten(self._called(self._rows(inputs, number)))[0] for number in (1, 2))
            except Exception as error:  # whatever a layer says to shapes that do not fit
                reason = reason or f"{type(error).__name__} with one or two rows: {error}"
                continue
            outputs, why = _joints(one, two)
            if outputs is None:
                reason = reason or why
            else:
                found.append((Slicing(inputs, outputs), two if self._batch(inputs) > 2 else one))
        return found, reason

    def independent(self, slicing: Slicing) -> bool:
        """Whether no row of what is returned depends on another row of an argument."""
        rows = self._rows(slicing.inputs, 2)
        given = [
            (leaf, dim)
            for leaf, dim in zip(rows, slicing.inputs, strict=True)
            if dim is not None and leaf.is_floating_point()
        ]
        with self._unnoticed(), torch.enable_grad():
            leaves = {id(leaf): leaf.detach().clone().requires_grad_() for leaf, _ in given}
            returned = flatten(self._called([leaves.get(id(leaf), leaf) for leaf in rows]))[0]
            graded = [
                (value, dim)
                for value, dim in zip(returned, slicing.outputs, strict=True)
                if dim is not None and value.requires_grad
            ]
            if not given or not graded:
                return self._keeps_other_rows(slicing, rows)
            for row in (0, 1):
                total = sum(
                    (_of_row(value, dim, row) * _weights(_of_row(value, dim, row))).sum() for value, dim in graded
                )
                sources = [leaves[id(leaf)] for leaf, _ in given]
                found = torch.autograd.grad(total, sources, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
                for gradient, (_, dim) in zip(found, given, strict=True):
                    if gradient is not None:
                        other = _of_row(gradient, dim, 1 - row)
                        if ((other != 0) & ~other.isnan()).any():
                            return False
        return True

    def _keeps_other_rows(self, slicing: Slicing, rows: list[Any]) -> bool:
        for row in (0, 1):
            changed = [
                leaf
                if dim is None
                else torch.cat([_of_row(leaf, dim, 1 - row)] * 2, dim)  # both are what the other one was
                for leaf, dim in zip(rows, slicing.inputs, strict=True)
            ]
            with torch.no_grad(), self._unnoticed():
                before = flatten(self._called(rows))[0]
            with torch.no_grad(), self._unnoticed():
                after = flatten(self._called(changed))[0]
            for a, b, dim in zip(before, after, slicing.outputs, strict=True):
                if dim is not None and not _same([_of_row(a, dim, 1 - row)], [_of_row(b, dim, 1 - row)]):
                    return False
        return True

    def _called(self, leaves: Sequence[Any]) -> Any:
        return self._call.run(self._function, leaves)

    def _batch(self, inputs: tuple[int | None, ...]) -> int:
        dims = zip(self._call.leaves, inputs, strict=True)
        return int(next(leaf.shape[dim] for leaf, dim in dims if dim is not None))

    def _rows(self, inputs: tuple[int | None, ...], number: int) -> list[Any]:
        return [
            leaf if dim is None else leaf.narrow(dim, 0, number)
            for leaf, dim in zip(self._call.leaves, inputs, strict=True)
        ]

    @contextmanager
    def _unnoticed(self) -> Iterator[None]:
        """Put back random states and buffers."""
        devices = {leaf.device for leaf in self._call.leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda}
        held = [
            (module, name, buffer, buffer.clone())
            for module in self._module.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        with torch.random.fork_rng(devices=list(devices)):
            try:
                yield
            finally:
                with torch.no_grad():
                    for module, name, buffer, value in held:
                        module._buffers[name] = buffer
                        buffer.copy_(value)


def _kind(leaf: Any) -> Any:
    """Return what of an argument may change how a layer is sliced."""
    if isinstance(leaf, torch.Tensor):
        return leaf.ndim, leaf.dtype
    return leaf if isinstance(leaf, bool | str | None) else type(leaf)


def _of_row(value: torch.Tensor, dim: int, row: int) -> torch.Tensor:
    """Return what belongs to one of two rows."""
    return value.chunk(2, dim)[row]


def _weights(value: torch.Tensor) -> torch.Tensor:
    """Return numbers without a pattern, so that no gradients cancel out."""
    return (torch.arange(1, value.numel() + 1, device=value.device) * 0.7).sin().to(value.dtype).view(value.shape)


def _joints(one: list[Any], two: list[Any]) -> tuple[tuple[int | None, ...] | None, str]:
    """Return along which dimension each output has the rows, given those of one and of two rows."""
    if len(one) != len(two):
        return None, "the number of its outputs depends on the number of rows"
    found: list[int | None] = []
    for a, b in zip(one, two, strict=True):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if not isinstance(a, bool | int | float | str | None) or type(a) is not type(b) or a != b:
                return None, f"it returns a {type(a).__name__} that cannot be put together from slices"
            found.append(None)
            continue
        grown = [dim for dim in range(min(a.ndim, b.ndim)) if a.shape[dim] != b.shape[dim]]
        if a.ndim != b.ndim or len(grown) != 1 or b.shape[grown[0]] != 2 * a.shape[grown[0]]:
            return None, (
                f"it returns {'a scalar' if not a.ndim else f'shape {tuple(a.shape)}'} for one row and "
                f"{'a scalar' if not b.ndim else f'shape {tuple(b.shape)}'} for two"
            )
        found.append(grown[0])
    return tuple(found), ""


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether outputs have the same bits (and NaN where the other has NaN)."""
    return all(
        a.shape == b.shape and torch.equal(a.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5))
        for a, b in zip(one, other, strict=True)
        if isinstance(a, torch.Tensor)
    )
