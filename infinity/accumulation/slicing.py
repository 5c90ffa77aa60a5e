"""How a batch is cut into slices for one layer: found by trying it on two rows, never guessed.

Which dimension of the first tensor has the batch is said by the user, or by a layer of torch itself (`batch_first`),
else it is the first. Every other tensor may be cut along any dimension of that size, or not at all: a mask over
positions can have as many rows as the batch has by accident. So all possibilities are tried. One is possible if the
layer runs with it on one row and on two, and returns twice as much for two. If several are possible and differ in what
they return, or if the rows of the only one depend on each other, the layer is refused.

[Note: whether rows depend on each other] Three tests, each of which sees what the others do not:

- Gradients: that of what is returned for one row with respect to another row is zero to the bit if nothing went from
  one to the other. Attention along the wrong dimension, statistics over the batch and packed sequences are found so,
  however little they change.
- Values: one row is changed in several ways, so that maxima, signs and orders are others, and what is returned for the
  other row keeps its bits. Tokens, detached scales, ranks and routing with a capacity are found so. If bits change by
  no more than rounding does, the layer is taken: experts multiply the tokens of all rows that chose them, and round
  according to how many there are.
- Number: a row alone gives what it gives as one of two, up to rounding. `x.shape[0]` and indices of rows are found so.
  Where random numbers are drawn, which are others for other shapes, this is asked in evaluation.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from infinity.errors import ConfigError, UnsupportedError

_log = logging.getLogger("infinity")

BatchDim = int | Mapping[str, int | None] | None
_MOST_POSSIBILITIES = 243
_MOST_KINDS = 64
_ASK = (
    "say which with infinity.micro_batches(model, n, batch_dim={'argument': dimension, 'argument that is whole': None})"
)


class Call(NamedTuple):
    """The arguments of a call, flat: `names` and `leaves` one by one, `run(function, leaves)` calls with others."""

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    run: Callable[[Callable[..., Any], Sequence[Any]], Any]

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], whole: Collection[str] = ()
    ) -> Call:
        """Flatten the arguments of `function`.

        Args:
            whole: names of those that all slices are given as they are, whatever they are.

        Raises:
            UnsupportedError: one of the others cannot be sliced.
        """
        known = list(inspect.signature(function).parameters)
        given = [*known[: len(args)], *(f"argument {index}" for index in range(len(known), len(args))), *kwargs]
        names: list[str] = []
        leaves: list[Any] = []
        rebuilds: list[tuple[int, Callable[[Sequence[Any]], Any]]] = []
        for name, value in zip(given, (*args, *kwargs.values()), strict=True):
            found, rebuild = flatten(value)
            for leaf in found:
                if name not in whole:
                    _check_leaf(name, leaf)
            names += [name] * len(found)
            leaves += found
            rebuilds.append((len(found), rebuild))

        # What is kept for backward calls this, so it has none of the arguments: they may be paged meanwhile.
        positional, keywords = len(args), tuple(kwargs)

        def run(function: Callable[..., Any], leaves: Sequence[Any]) -> Any:
            left = iter(leaves)
            values = [rebuild(list(itertools.islice(left, number))) for number, rebuild in rebuilds]
            return function(*values[:positional], **dict(zip(keywords, values[positional:], strict=True)))

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
    """Finds how the calls of one layer are sliced; what has been found once is kept for calls of the same kind.

    A kind is numbers of dimensions and dtypes of tensors, and the values of all other arguments, since a layer may do
    something else for another number or string. Of 64 kinds it is kept; calls of further ones (a counter of steps is
    another number each time), calls with objects that may change, and those that can be sliced in several ways which
    give the same, are tried anew each time. A warning says so once.

    `batch_dim` is the user's: for the first tensor, or by the names of arguments.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], batch_dim: BatchDim) -> None:
        self._module, self._batch_dim = module, batch_dim
        # The dimension of the batch that the module itself says, of its first tensor.
        self._default = _own_batch_dim(module, forward)
        self._found: dict[Any, Slicing] = {}  # by kind of call, `_MOST_KINDS` at most
        self._warned = False  # that there are more kinds

    def find(self, function: Callable[..., Any], call: Call, count: int) -> Slicing:
        """Return how a call is sliced.

        Raises:
            ConfigError: the batch cannot be shared equally, or `batch_dim` does not fit.
            UnsupportedError: it cannot be sliced, or in several ways.
        """
        candidates = self._candidates(call, count)
        training = tuple(module.training for module in self._module.modules())
        kinds = tuple(map(_kind, call.leaves))
        key = None if None in kinds else (call.names, kinds, candidates, training)
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
                "in training and other statistics over the batch cannot be sliced, nor scales, ranks and capacities "
                "that rows share)"
            )
        if not trial.same_alone(chosen):
            raise UnsupportedError(
                f"micro_batches cannot slice {self._name} along dimension {self._dim_of_first(call)}: what it returns "
                "for a row depends on how many rows there are, or on which of them it is (x.shape[0], len(x), indices "
                "of rows); take such numbers from outside of the layer"
            )
        self._keep(key if len(possible) == 1 else None, chosen)  # what was of no influence may be of some the next time
        return chosen

    def _keep(self, key: Any, slicing: Slicing) -> None:
        if key is not None and len(self._found) < _MOST_KINDS:
            self._found[key] = slicing
        elif not self._warned:
            self._warned = True
            _log.warning(
                "%s is called with ever other values of arguments, such as a counter, with an object that may "
                "change, or so that it can be sliced in several ways (name dimensions with batch_dim); micro_batches "
                "tries each such call anew, which costs time",
                self._name,
            )

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
                elif all(dim is None for dim in (*said, *by_name.values())):
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
        """Return the ways in which the layer can be called with slices, each with what it returns for two rows or one.

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
                # Of a batch of two, two rows are all: an argument that is cut and one that is not would not differ.
                found.append((Slicing(inputs, outputs), two if self._batch(inputs) > 2 else one))
        return found, reason

    def independent(self, slicing: Slicing) -> bool:
        """Whether no row of what is returned depends on another row of an argument, by gradients and by values."""
        rows = self._rows(slicing.inputs, 2)
        return self._gradients_stay_in_rows(slicing, rows) and self._keeps_other_rows(slicing, rows)

    def same_alone(self, slicing: Slicing) -> bool:
        """Whether a row alone gives what it gives as one of two, but for rounding."""
        rows = self._rows(slicing.inputs, 2)
        two, drawn = self._returned(rows)
        if not drawn:
            return self._alike_alone(slicing, rows, two)
        with self._in_evaluation():
            try:
                two, drawn = self._returned(rows)
                return drawn or self._alike_alone(slicing, rows, two)
            except Exception:  # evaluation is not what was asked for: a layer may be unable to do it
                return True

    def _alike_alone(self, slicing: Slicing, rows: list[Any], two: list[Any]) -> bool:
        coarse = self._is_coarse(two)
        for row in (0, 1):
            alone, _ = self._returned(
                [
                    leaf if dim is None else _of_row(leaf, dim, row)
                    for leaf, dim in zip(rows, slicing.inputs, strict=True)
                ]
            )
            for a, b, dim in zip(alone, two, slicing.outputs, strict=True):
                if dim is not None and not _alike(a, _of_row(b, dim, row), coarse):
                    return False
        return True

    def _gradients_stay_in_rows(self, slicing: Slicing, rows: list[Any]) -> bool:
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
                return True
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
        """Whether what is returned for a row stays as it is when the other row is changed."""
        before, _ = self._returned(rows)
        coarse = self._is_coarse(before)
        for row, change in itertools.product((0, 1), _CHANGES):
            changed = [
                leaf if dim is None else _with_row(leaf, dim, row, change)
                for leaf, dim in zip(rows, slicing.inputs, strict=True)
            ]
            try:
                after, _ = self._returned(changed)
            except Exception:  # values that the layer does not take say nothing; the batch's own rows it took
                continue
            if len(after) != len(before):
                return False
            for a, b, dim in zip(before, after, slicing.outputs, strict=True):
                if dim is None:
                    continue
                if a.shape != b.shape or not _keeps(_of_row(a, dim, 1 - row), _of_row(b, dim, 1 - row), coarse):
                    return False
        return True

    def _returned(self, leaves: Sequence[Any]) -> tuple[list[Any], bool]:
        """Return the outputs, and whether random numbers were drawn for them."""
        with torch.no_grad(), self._unnoticed():
            before = self._random_states()
            returned = flatten(self._called(leaves))[0]
            drawn = not all(torch.equal(a, b) for a, b in zip(before, self._random_states(), strict=True))
        return returned, drawn

    def _random_states(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *map(_random_state, self._devices())]

    def _devices(self) -> list[torch.device]:
        devices = {leaf.device for leaf in self._call.leaves if isinstance(leaf, torch.Tensor)}
        return [device for device in devices if device.type not in ("cpu", "meta")]

    def _is_coarse(self, returned: Sequence[Any]) -> bool:
        """Whether the layer computes in less than fp32, by its arguments, parameters, outputs, or autocast."""
        tensors = [
            value
            for value in (*self._call.leaves, *self._module.parameters(), *returned)
            if isinstance(value, torch.Tensor)
        ]
        exact = torch.finfo(torch.float32).eps
        return any(
            torch.is_autocast_enabled(device) for device in {tensor.device.type for tensor in tensors} - {"meta"}
        ) or any(torch.finfo(tensor.dtype).eps > exact for tensor in tensors if tensor.is_floating_point())

    @contextmanager
    def _in_evaluation(self) -> Iterator[None]:
        """Run without dropout; the modes of modules are put back one by one."""
        modes = [(module, module.training) for module in self._module.modules()]
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, training in modes:
                module.training = training

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
        """Put back random states and buffers; those that a trial makes are gone."""
        modules = list(self._module.modules())
        buffers = [dict(module._buffers) for module in modules]
        values = [(buffer, buffer.clone()) for of in buffers for buffer in of.values() if buffer is not None]
        with torch.random.fork_rng(devices=self._devices()):
            try:
                yield
            finally:
                with torch.no_grad():
                    for module, before in zip(modules, buffers, strict=True):
                        module._buffers.clear()
                        module._buffers.update(before)
                    for buffer, value in values:
                        buffer.copy_(value)


def _kind(leaf: Any) -> tuple[Any, ...] | None:
    """Return what of an argument may change how a layer is sliced; None if that cannot be told for later calls."""
    if isinstance(leaf, torch.Tensor):
        return leaf.ndim, leaf.dtype
    own_hash: Any = type(leaf).__hash__
    if own_hash is object.__hash__ and getattr(leaf, "__dict__", None) and not callable(leaf):
        return None  # the same object, with other attributes perhaps
    try:
        hash(leaf)
    except TypeError:
        return None
    return type(leaf), leaf  # with the type, as 1 == 1.0 == True


def _of_row(value: torch.Tensor, dim: int, row: int) -> torch.Tensor:
    """Return what belongs to one of two rows."""
    return value.chunk(2, dim)[row]


def _with_row(leaf: torch.Tensor, dim: int, row: int, change: Change) -> torch.Tensor:
    """Return an argument of two rows in which one is changed."""
    rows = [_of_row(leaf, dim, 0), _of_row(leaf, dim, 1)]
    rows[row] = change(rows[row], rows[1 - row], dim)
    return torch.cat(rows, dim)


Change = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""What becomes of a row, given the other row and the dimension of the batch."""


def _as_the_other(_: torch.Tensor, other: torch.Tensor, __: int) -> torch.Tensor:
    return other


def _permuted(row: torch.Tensor, _: torch.Tensor, dim: int) -> torch.Tensor:
    return row.flip([d for d in range(row.ndim) if d != dim])


def _all_alike(_: torch.Tensor, other: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the other row's first position for all positions: all go the way that it goes, say to one expert."""
    positions = next((d for d in range(other.ndim) if d != dim), dim)
    return other.narrow(positions, 0, 1).expand_as(other)


def _scaled(factor: float) -> Change:
    """Return a change of size and sign, for all but whole numbers, and numbers alone in a row: they may be indices."""

    def change(row: torch.Tensor, _: torch.Tensor, __: int) -> torch.Tensor:
        return row * factor if row.is_floating_point() and row.numel() > 1 else row

    return change


_CHANGES: tuple[Change, ...] = (
    _as_the_other,
    _permuted,
    _all_alike,
    _scaled(64.0),
    _scaled(-64.0),
    _scaled(1 / 64),
)


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


# What follows finds that a layer does something else. It is no promise of how near slices are to the whole batch: they
# round as a loop over them does, and paged and in memory are equal to the bit. Each limit is for fp32, then for less.
_ROUNDING = (1e-3, 1e-2)  # a difference that may be one of rounding, as a part of what is compared
_ROUNDED_OTHERWISE = (1e-2, 0.5)  # the share that may differ by more: near ties of routers and steps go the other way


def _keeps(before: torch.Tensor, after: torch.Tensor, coarse: bool) -> bool:
    """Whether a row has kept its bits, or differs by no more than sums of another grouping do anywhere."""
    if not before.numel() or _same([before], [after]):
        return True
    a, b = _numbers(before), _numbers(after)
    if not before.is_floating_point() and not before.is_complex():
        return False
    scale = torch.maximum(_finite(a).abs().amax(), _finite(b).abs().amax())
    return not bool(_beyond(a, b, _ROUNDING[coarse] * scale).any())


def _alike(alone: torch.Tensor, together: torch.Tensor, coarse: bool) -> bool:
    """Whether a row is the same but for rounding, in most places: shapes decide which kernels run."""
    if not alone.numel() or (alone.shape == together.shape and _same([alone], [together])):
        return True
    if alone.shape != together.shape:
        return False
    a, b = _numbers(alone), _numbers(together)
    scale = torch.maximum(torch.maximum(_finite(a).abs(), _finite(b).abs()), _finite(b).abs().median())
    return _beyond(a, b, _ROUNDING[coarse] * scale).float().mean().item() <= _ROUNDED_OTHERWISE[coarse]


def _numbers(value: torch.Tensor) -> torch.Tensor:
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return value if value.dtype == torch.float64 else value.float()


def _finite(value: torch.Tensor) -> torch.Tensor:
    return value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _beyond(a: torch.Tensor, b: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Where two differ by more than a limit; of infinities and NaN the same are no difference."""
    same = (a == b) | (a.isnan() & b.isnan())
    return ~same & ~((a - b).abs() <= limit)


def _random_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's generator."""
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state
