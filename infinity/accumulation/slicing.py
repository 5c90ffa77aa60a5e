"""Selection of the dimensions along which a layer's batch is sliced, by trial calls with one and two rows.

A *row* is the part of a tensor that belongs to one example of the batch. The batch dimension of the first tensor
argument is given by the user or, for PyTorch's own layers, by `batch_first`; otherwise it is 0. Each of the other
tensor arguments may be split along any dimension of the same size, or not at all, because a dimension such as the
length of a position mask can equal the batch size by coincidence. Therefore, all possibilities are tried. A possibility
is valid if the layer accepts one row and two rows split in this way, and returns twice as many elements for two rows. A
layer is not supported if several valid possibilities return different values, or if its rows depend on each other.

[Note: independence of rows] Three tests are applied. Each detects dependencies that the others miss:

- Gradients: the gradient of one row's output with respect to another row must be exactly zero. This detects attention
  along the wrong dimension, statistics over the batch and packed sequences, however small their effect is.
- Values: one row is changed in several ways that alter maxima, signs and orderings. The output of the other row must
  not change. This detects dependencies without gradients: through token ids, detached scales, ranks, and routing with a
  capacity. Rounding differences are accepted, because an expert multiplies the tokens of all rows routed to it at once,
  and the rounding of this product depends on the number of tokens.
- Number of rows: the output of a row on its own must equal its output as one of two rows, up to rounding. This detects
  uses of `x.shape[0]` and of row indices. If the layer draws random numbers, which depend on the shape, this test runs
  in evaluation mode.
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
    "specify the dimensions with infinity.micro_batches(model, n, batch_dim={'argument': dimension, "
    "'unsliced argument': None})"
)


class Call(NamedTuple):
    """Flattened arguments of a call.

    `leaves` are the tensors and other values inside the arguments. `names` holds, for each leaf, the name of the
    argument that contains it. `run(function, leaves)` calls a function with other leaves in the same structure.
    """

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    run: Callable[[Callable[..., Any], Sequence[Any]], Any]

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], whole: Collection[str] = ()
    ) -> Call:
        """Flatten the arguments of `function`.

        Args:
            whole: names of arguments that all slices receive unchanged; they may have any type.

        Raises:
            UnsupportedError: if any other argument cannot be sliced.
        """
        known = list(inspect.signature(function).parameters)
        given = [*known[: len(args)], *(f"argument {index}" for index in range(len(known), len(args))), *kwargs]
        named = [
            (name, leaf)
            for name, value in zip(given, (*args, *kwargs.values()), strict=True)
            for leaf in flatten(value)[0]
        ]
        for name, leaf in named:
            if name not in whole:
                _check_leaf(name, leaf)
        # Activation checkpointing keeps this closure, so it must not capture the arguments, which may be paged.
        _, rebuild = flatten((args, kwargs))

        def run(function: Callable[..., Any], leaves: Sequence[Any]) -> Any:
            positional, keywords = rebuild(leaves)
            return function(*positional, **keywords)

        return cls(tuple(name for name, _ in named), tuple(leaf for _, leaf in named), run)


@dataclasses.dataclass(frozen=True)
class Slicing:
    """Dimensions along which arguments are split and outputs are concatenated. ``None`` if all slices share a value."""

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
        """Concatenate the outputs of all slices."""
        return [
            parts[0] if dim is None else torch.cat(parts, dim)
            for parts, dim in zip(zip(*slices, strict=True), self.outputs, strict=True)
        ]


def flatten(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of a structure, and a function that rebuilds the structure from other leaves.

    The structure may contain dataclasses.
    """
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
    if isinstance(value, type) or is_cache(value):
        return [value], _only
    leaves, rebuild = flatten(
        {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    )
    return leaves, lambda made: dataclasses.replace(value, **rebuild(made))


def _only(made: Sequence[Any]) -> Any:
    return made[0]


def is_cache(value: Any) -> bool:
    """Return whether a value is a transformers key-value cache."""
    return hasattr(value, "get_seq_length")


def _check_leaf(name: str, leaf: Any) -> None:
    if is_cache(leaf):
        raise UnsupportedError("micro_batches does not support key-value caches; pass use_cache=False")
    held = vars(leaf).values() if hasattr(leaf, "__dict__") and not isinstance(leaf, type | torch.Tensor) else ()
    nested = isinstance(leaf, torch.Tensor) and leaf.is_nested
    if nested or isinstance(leaf, PackedSequence) or any(isinstance(value, torch.Tensor) for value in held):
        raise UnsupportedError(
            f"micro_batches cannot slice {name} of type {type(leaf).__name__}; pass tensors, or structures of "
            "tensors, with one row per sequence"
        )


class SlicingFinder:
    """Determine how to slice the calls of one layer, and cache the result for each kind of call.

    The kind of a call consists of the dtype and number of dimensions of each tensor, and of the values of all other
    arguments, because a layer may behave differently for other numbers or strings. Up to 64 kinds are cached. The
    trials are repeated in every call if there are more kinds (for example, because an argument is a step counter), if
    an argument is an object that may change, or if the call can be sliced in several equivalent ways. In these cases, a
    warning is logged once.

    Args:
        batch_dim: batch dimension of the first tensor, or batch dimensions by argument name, as given by the user.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], batch_dim: BatchDim) -> None:
        self._module, self._batch_dim = module, batch_dim
        # Default batch dimension of the first tensor.
        self._default = _own_batch_dim(module, forward)
        self._found: dict[Any, Slicing] = {}  # by kind of call; at most `_MOST_KINDS` entries
        self._warned = False  # whether the warning about repeated trials has been logged

    def find(self, function: Callable[..., Any], call: Call, count: int) -> Slicing:
        """Return the dimensions along which to slice a call.

        Raises:
            ConfigError: if the batch size is not divisible by `count`, or `batch_dim` does not match the arguments.
            UnsupportedError: if the call cannot be sliced, or can be sliced in several ways with different results.
        """
        candidates = self._candidates(call, count)
        training = tuple(module.training for module in self._module.modules())
        kinds = tuple(map(_kind, call.leaves))
        key = None if None in kinds else (call.names, kinds, candidates, training)
        if key in self._found:
            return self._found[key]
        if torch.is_inference_mode_enabled():
            raise UnsupportedError(
                "micro_batches must check in the first forward that rows are independent, which is impossible under "
                "torch.inference_mode(); use torch.no_grad()"
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
                    f"micro_batches cannot determine how to slice {', '.join(sorted(unclear))} of {self._name}: the "
                    f"shapes allow several ways; {_ASK}"
                )
        if not trial.independent(chosen):
            raise UnsupportedError(
                f"micro_batches cannot slice {self._name} along dimension {self._dim_of_first(call)}: rows depend on "
                "each other. Inputs of shape (S, B, D) need batch_dim=1. Packed sequences, BatchNorm in training, "
                "other statistics over the batch, and scales, ranks or capacities shared by rows are not supported"
            )
        if not trial.same_alone(chosen):
            raise UnsupportedError(
                f"micro_batches cannot slice {self._name} along dimension {self._dim_of_first(call)}: the output of a "
                "row depends on the number of rows or on its position (x.shape[0], len(x), row indices); compute such "
                "numbers outside the layer"
            )
        # Ways of slicing that are equivalent in this call may differ in the next
        self._keep(key if len(possible) == 1 else None, chosen)
        return chosen

    def _keep(self, key: Any, slicing: Slicing) -> None:
        if key is not None and len(self._found) < _MOST_KINDS:
            self._found[key] = slicing
        elif not self._warned:
            self._warned = True
            _log.warning(
                "%s is called with changing argument values (such as a counter), with mutable objects, or with shapes "
                "that can be sliced in several ways (set batch_dim); micro_batches repeats its trials in each such "
                "call, which costs time",
                self._name,
            )

    @property
    def _name(self) -> str:
        return type(self._module).__name__.removeprefix("FSDP")

    def _dim_of_first(self, call: Call) -> int | None:
        return next(dim for dim in self._known_dims(call) if dim is not None)

    def _known_dims(self, call: Call) -> list[int | None]:
        """Return the batch dimension of each leaf, or ``None`` if only the trials can determine it."""
        said: list[int | None] = [None] * len(call.leaves)
        by_name = self._batch_dim if isinstance(self._batch_dim, Mapping) else {}
        if unknown := sorted(set(by_name) - set(call.names)):
            raise ConfigError(
                f"batch_dim contains {', '.join(unknown)}, but {self._name} was called with the arguments {call.names}"
            )
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
                        f"batch_dim={dim} is out of range for {name} of {self._name}, which has shape "
                        f"{tuple(leaf.shape)}"
                    )
        return said

    def _candidates(self, call: Call, count: int) -> tuple[tuple[int | None, ...], ...]:
        said = self._known_dims(call)
        sizes = [leaf.shape[dim] for leaf, dim in zip(call.leaves, said, strict=True) if dim is not None]
        batch = sizes[0] if sizes else 0
        if not batch or batch % count or any(size != batch for size in sizes):
            raise ConfigError(
                f"{self._name} received a batch of size {batch}, which is not divisible by {count} micro-batches"
                if len(set(sizes)) < 2
                else f"{self._name} received arguments with different batch sizes along batch_dim: {sizes}"
            )
        by_name = self._batch_dim if isinstance(self._batch_dim, Mapping) else {}
        found: list[tuple[int | None, ...]] = []
        for name, leaf, dim in zip(call.names, call.leaves, said, strict=True):
            if dim is not None or name in by_name or not isinstance(leaf, torch.Tensor):
                found.append((dim,))
            else:
                found.append((*(d for d in range(leaf.ndim) if leaf.shape[d] == batch), None))
        if math.prod(map(len, found)) > _MOST_POSSIBILITIES:
            raise UnsupportedError(f"{self._name} can be sliced in too many ways to try all of them; {_ASK}")
        return tuple(found)


def _own_batch_dim(module: nn.Module, forward: Callable[..., Any]) -> int:
    """Return the default batch dimension of a layer: given by `batch_first` for PyTorch's own layers, otherwise 0."""
    if not getattr(forward, "__module__", "").startswith("torch.nn.modules."):
        return 0
    flags = {inner.batch_first for inner in module.modules() if isinstance(getattr(inner, "batch_first", None), bool)}
    return 1 if flags == {False} else 0


class _Trial:
    """Trial calls of a layer with the first one or two rows of its batch. They preserve random states and buffers."""

    def __init__(self, function: Callable[..., Any], call: Call, module: nn.Module) -> None:
        self._function, self._call, self._module = function, call, module

    def possible(self, candidates: tuple[tuple[int | None, ...], ...]) -> tuple[list[tuple[Slicing, list[Any]]], str]:
        """Try all ways to slice the call.

        Returns:
            The valid slicings, each with its outputs for two rows (for one row if the batch has only two), and the
            reason why the first invalid one failed.
        """
        found, reason = [], ""
        for inputs in itertools.product(*candidates):
            try:
                with torch.no_grad(), self._unnoticed():
                    one, two = (flatten(self._called(self._rows(inputs, number)))[0] for number in (1, 2))
            except Exception as error:  # a layer may raise any exception if shapes do not match
                reason = reason or f"{type(error).__name__} with one or two rows: {error}"
                continue
            outputs, why = _joints(one, two)
            if outputs is None:
                reason = reason or why
            else:
                # In a batch of two, two rows of a split argument equal the shared argument, so one row is compared.
                found.append((Slicing(inputs, outputs), two if self._batch(inputs) > 2 else one))
        return found, reason

    def independent(self, slicing: Slicing) -> bool:
        """Return whether each output row depends only on its own input row, as tested by gradients and by values."""
        rows = self._rows(slicing.inputs, 2)
        return self._gradients_stay_in_rows(slicing, rows) and self._keeps_other_rows(slicing, rows)

    def same_alone(self, slicing: Slicing) -> bool:
        """Return whether the output of a row on its own equals its output as one of two rows, up to rounding."""
        rows = self._rows(slicing.inputs, 2)
        two, drawn = self._returned(rows)
        if not drawn:
            return self._alike_alone(slicing, rows, two)
        with self._in_evaluation():
            try:
                two, drawn = self._returned(rows)
                return drawn or self._alike_alone(slicing, rows, two)
            except Exception:  # the user did not request evaluation mode, and the layer may not support it
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
        """Return whether the output of each row stays the same when the other row changes."""
        before, _ = self._returned(rows)
        coarse = self._is_coarse(before)
        for row, change in itertools.product((0, 1), _CHANGES):
            changed = [
                leaf if dim is None else _with_row(leaf, dim, row, change)
                for leaf, dim in zip(rows, slicing.inputs, strict=True)
            ]
            try:
                after, _ = self._returned(changed)
            except Exception:  # the layer rejects these values, although it accepts the rows of the batch
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
        """Return the outputs, and whether the layer drew random numbers to compute them."""
        with torch.no_grad(), self._unnoticed():
            before = self._random_states()
            returned = flatten(self._called(leaves))[0]
            drawn = not all(torch.equal(a, b) for a, b in zip(before, self._random_states(), strict=True))
        return returned, drawn

    def _random_states(self) -> list[torch.Tensor]:
        of_devices = (torch.get_device_module(device).get_rng_state(device) for device in self._devices())
        return [torch.get_rng_state(), *of_devices]

    def _devices(self) -> list[torch.device]:
        devices = {leaf.device for leaf in self._call.leaves if isinstance(leaf, torch.Tensor)}
        return [device for device in devices if device.type not in ("cpu", "meta")]

    def _is_coarse(self, returned: Sequence[Any]) -> bool:
        """Return whether the layer computes in less than fp32 precision, judging by dtypes and autocast."""
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
        """Put all modules in evaluation mode (without dropout, for example), and restore each module's mode on exit."""
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
        """Restore random states and buffers on exit, and remove buffers that a trial has created."""
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
    """Return the properties of an argument that may affect slicing, or ``None`` if the argument may change in place."""
    if isinstance(leaf, torch.Tensor):
        return leaf.ndim, leaf.dtype
    own_hash: Any = type(leaf).__hash__
    if own_hash is object.__hash__ and getattr(leaf, "__dict__", None) and not callable(leaf):
        return None  # the same object may have different attributes in the next call
    try:
        hash(leaf)
    except TypeError:
        return None
    return type(leaf), leaf  # includes the type, because 1 == 1.0 == True


def _of_row(value: torch.Tensor, dim: int, row: int) -> torch.Tensor:
    """Return one row of a tensor that consists of two rows."""
    return value.chunk(2, dim)[row]


def _with_row(leaf: torch.Tensor, dim: int, row: int, change: Change) -> torch.Tensor:
    rows = [_of_row(leaf, dim, 0), _of_row(leaf, dim, 1)]
    rows[row] = change(rows[row], rows[1 - row], dim)
    return torch.cat(rows, dim)


Change = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Function that returns a changed row, given the row, the other row and the batch dimension."""


def _all_alike(_: torch.Tensor, other: torch.Tensor, dim: int) -> torch.Tensor:
    """Repeat the other row's first position, so that all positions are routed alike, for example to one expert."""
    positions = next((d for d in range(other.ndim) if d != dim), dim)
    return other.narrow(positions, 0, 1).expand_as(other)


def _scaled(factor: float) -> Change:
    """Return a change that scales a row, unless it may contain indices (integers, or only one number per row)."""

    def change(row: torch.Tensor, _: torch.Tensor, __: int) -> torch.Tensor:
        return row * factor if row.is_floating_point() and row.numel() > 1 else row

    return change


_CHANGES: tuple[Change, ...] = (
    lambda row, other, dim: other,
    lambda row, other, dim: row.flip([d for d in range(row.ndim) if d != dim]),
    _all_alike,
    *map(_scaled, (64.0, -64.0, 1 / 64)),
)


def _weights(value: torch.Tensor) -> torch.Tensor:
    """Return irregular weights for a sum of outputs, so that its gradients do not cancel out."""
    return (torch.arange(1, value.numel() + 1, device=value.device) * 0.7).sin().to(value.dtype).view(value.shape)


def _joints(one: list[Any], two: list[Any]) -> tuple[tuple[int | None, ...] | None, str]:
    """Return the batch dimension of each output, given the outputs for one row and for two rows.

    If an output cannot be sliced, return ``None`` and the reason.
    """
    if len(one) != len(two):
        return None, "the number of its outputs depends on the number of rows"
    found: list[int | None] = []
    for a, b in zip(one, two, strict=True):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if not isinstance(a, bool | int | float | str | None) or type(a) is not type(b) or a != b:
                return None, f"it returns a {type(a).__name__} that cannot be combined from slices"
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
    """Return whether outputs are bitwise equal. NaNs count as equal."""
    return all(
        a.shape == b.shape and torch.equal(a.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5))
        for a, b in zip(one, other, strict=True)
        if isinstance(a, torch.Tensor)
    )


# These limits only detect that a layer computes something different. They do not bound the difference between sliced
# and unsliced results: slices round as a loop over micro-batches does, and results are bitwise equal with and without
# paging. Each pair holds the limit for fp32 and the limit for lower precision.
_ROUNDING = (1e-3, 1e-2)  # largest relative difference that counts as rounding
_ROUNDED_OTHERWISE = (1e-2, 0.5)  # largest fraction of elements that may differ by more, as near ties in routers flip


def _keeps(before: torch.Tensor, after: torch.Tensor, coarse: bool) -> bool:
    """Return whether a row is unchanged, up to the rounding differences of another order of summation."""
    if not before.numel() or _same([before], [after]):
        return True
    a, b = _numbers(before), _numbers(after)
    if not before.is_floating_point() and not before.is_complex():
        return False
    scale = torch.maximum(_finite(a).abs().amax(), _finite(b).abs().amax())
    return not bool(_beyond(a, b, _ROUNDING[coarse] * scale).any())


def _alike(alone: torch.Tensor, together: torch.Tensor, coarse: bool) -> bool:
    """Return whether most elements of a row are equal up to rounding. The rounding of kernels depends on the shape."""
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
    """Return a mask of the elements that differ by more than `limit`. Equal infinities and NaNs do not differ."""
    same = (a == b) | (a.isnan() & b.isnan())
    return ~same & ~((a - b).abs() <= limit)
