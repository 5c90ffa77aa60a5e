"""Read initial values from a folder of safetensors files, as written by `save_pretrained`, one FSDP module at a time.

Tensors that transformers renames, fuses or splits when loading are converted by transformers' own rules (see
`transformers_names`). If a tensor is at most renamed, only this rank's slice is read. Fused and split tensors need
memory for one conversion (for example, the experts of one layer), in addition to the slices of one FSDP module.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import nn

from infinity import torch_private
from infinity.content.format import MASTER
from infinity.content.layout import Layout
from infinity.content.spans import full_spans, overlaps, sizes_of
from infinity.errors import ConfigError
from infinity.formats import transformers_names as names
from infinity.formats.adapters import base_names
from infinity.formats.quantized import Quantized, QuantizedLinear
from infinity.formats.transformers_names import Conversion
from infinity.formats.weight_files import WeightFiles, WeightReader, check_not_quantized, read_json
from infinity.fsdp.sharded_model import Member, local_slice, local_spans
from infinity.sources.first_values import FirstValues, ValueOf, convertible
from infinity.sources.new_tokens import new_rows, vocabulary

_log = logging.getLogger(__name__)

_COMPARED_AT_ONCE = 1 << 22  # elements per comparison of tied tensors
_SHOWN = 40  # maximum number of lines in a report


class PretrainedFolder(FirstValues):
    """Source for a folder of safetensors files, as written by `save_pretrained`."""

    def __init__(
        self, path: str | os.PathLike[str], initializer: FirstValues, *, strict: bool = True, seed: int = 0
    ) -> None:
        """Read the headers of the files.

        Args:
            path: see `WeightFiles`.
            initializer: source for parameters that are missing from the folder.
            strict: whether missing and unexpected tensors are errors.
            seed: seed of the rows of new tokens. See `new_tokens`.

        Raises:
            ConfigError: if there are no such files, or one is malformed.
        """
        self._files, self._initializer, self._strict, self._seed = WeightFiles(path), initializer, strict, seed
        # Conversions by target name in the base model, and the function that returns that name; `check` sets them.
        self._made_by: dict[str, Conversion] = {}
        self._zero: set[str] = set()  # names of parameters whose new elements are zero
        self._base_name: Callable[[str], str | None] = torch_private.unwrapped_name

    @property
    def files(self) -> WeightFiles:
        """Weight files of the folder."""
        return self._files

    def check(
        self, model: nn.Module, members: Sequence[Member], layout: Layout, optimizer: torch.optim.Optimizer
    ) -> None:
        """Find the tensors in the folder for each parameter and persistent buffer.

        Raises:
            ConfigError: if tensors are missing, unexpected, or of a different shape or kind of dtype. The message
                lists all of them.
            UnsupportedError: if a missing parameter cannot be initialized.
        """
        self._check_not_quantized()
        self._base_name = base_names(model)
        own = [member for member in members if all(self._base_name(name) is None for name in member.names)]
        entries = {self._names(member): _like(member) for member in members}
        in_memory = torch_private.tensors_in_memory(model)
        for name in torch_private.persistent_buffers(model):
            if (base_name := self._base_name(name)) is not None:
                entries[(base_name,)] = in_memory[name].to("meta")
        wanted = {name: tensor for of_one, tensor in entries.items() for name in of_one}
        whole = self._quantized(model)
        matched = names.match(self._files.tensors, {**wanted, **whole.likes}, model)
        conversions = [*matched.conversions, *whole.conversions(matched.conversions)]
        self._made_by = {target: conversion for conversion in conversions for target in conversion.targets}
        misfit = _Misfit(failed=dict(matched.failed))
        missing = [of_one for of_one in entries if not self._made_by.keys() & set(of_one)]
        known = {name for name in wanted if name in matched.failed}
        may_miss, may_have = names.ignored(model, (name for of_one in missing for name in of_one),
                                           matched.unexpected.values())  # fmt: skip
        may_miss |= {name for member in own for name in self._names(member)}
        misfit.missing = [one[0] for one in missing if not may_miss & set(one) and not known & set(one)]
        misfit.unexpected = [name for name, target in matched.unexpected.items() if target not in may_have]
        of_vocabulary = vocabulary(model)
        may_grow = {
            name: of_vocabulary[key]
            for member in members
            if (key := id(member.param.sharded_param)) in of_vocabulary
            for name in self._names(member)
        }
        self._zero = {name for name, zero in may_grow.items() if zero}
        grown: list[str] = []
        for target, like in {**wanted, **whole.likes}.items():
            if target in self._made_by:
                found = self._made_by[target].targets[target]
                if target in may_grow and self._made_by[target].plain and _has_fewer_rows(found, like):
                    grown.append(target)
                else:
                    misfit.compare(target, found, like)
        misfit.check(self._files, model, strict=self._strict)
        self._compare_tied(entries)
        self._initializer.check(model, [member for member in members if self._lacks(member)], layout, optimizer)
        if misfit.missing:
            _log.warning("missing in %s and initialized by the model: %s", self._files.path, _grouped(misfit.missing))
        if grown:
            _log.warning(
                "the model has more tokens than %s; the new rows are initialized with the mean of the other rows, as "
                "resize_token_embeddings does: %s", self._files.path, _grouped(grown),
            )  # fmt: skip
        if misfit.unexpected:
            _log.warning("unexpected in %s and ignored: %s", self._files.path, _grouped(misfit.unexpected))

    def _quantized(self, model: nn.Module) -> Quantized:
        """Return the layers whose weights are quantized while they are read, by weight name in the base model."""
        layers = {}
        for name, module in model.named_modules():
            if isinstance(module, QuantizedLinear) and (base_name := self._base_name(f"{name}.weight")) is not None:
                layers[base_name] = module
        return Quantized(layers)

    def _check_not_quantized(self) -> None:
        config = self._files.folder / "config.json"
        if config.is_file():
            check_not_quantized(read_json(config), self._files.path)

    def _compare_tied(self, entries: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        for of_one in entries:
            there = [name for name in of_one if name in self._made_by]
            for other in there[1:]:
                if not self._equal(there[0], other):
                    raise ConfigError(
                        f"{there[0]} and {other} are tied in the model, but differ in {self._files.path}; build the "
                        "model with tie_word_embeddings=False"
                    )

    def _equal(self, one: str, other: str) -> bool:
        a, b = self._made_by[one], self._made_by[other]
        with closing(self._files.reader()) as reader:
            if not (a.plain and b.plain):
                made = self._converted(a, reader)
                return torch.equal(made[one], (made if a is b else self._converted(b, reader))[other])
            (first,), (second,) = a.sources, b.sources
            shape = a.targets[one].shape
            if not shape:
                return torch.equal(reader(first), reader(second))
            rows = max(1, _COMPARED_AT_ONCE // max(1, shape[1:].numel()))
            parts = ([slice(start, start + rows)] for start in range(0, shape[0], rows))
            return all(torch.equal(reader(first, part), reader(second, part)) for part in parts)

    def values(self, fsdp_module: str, members: Sequence[Member]) -> ValueOf:
        """Return a function that reads and converts the values of an FSDP module, or initializes missing parameters.

        Raises:
            ConfigError: if a file cannot be read when a value is requested.
        """
        absent = [position for position, member in enumerate(members) if self._lacks(member)]
        initial = self._initializer.values(fsdp_module, [members[position] for position in absent]) if absent else None
        made: dict[str, torch.Tensor] = {}  # converted values that have not been requested yet

        def value_of(position: int, section: str) -> torch.Tensor | None:
            if section != MASTER:
                return None
            if initial is not None and position in absent:
                return initial(absent.index(position), section)
            member = members[position]
            name = next(name for name in self._names(member) if name in self._made_by)
            if name not in made:
                with closing(self._files.reader()) as reader:
                    if self._made_by[name].plain:
                        return self._sliced(name, member, reader)
                    made.update(self._local(self._converted(self._made_by[name], reader), members))
            return made.pop(name)

        return value_of

    def _lacks(self, member: Member) -> bool:
        return not any(name in self._made_by for name in self._names(member))

    def _names(self, member: Member) -> tuple[str, ...]:
        """Return the names of a parameter in the base model, or its own names if it belongs to an adapter."""
        found = [name for own in member.names if (name := self._base_name(own)) is not None]
        return tuple(dict.fromkeys(found)) or tuple(map(torch_private.unwrapped_name, member.names))

    def _sliced(self, name: str, member: Member, reader: WeightReader) -> torch.Tensor:
        (source,) = self._made_by[name].sources
        shape, full = self._files.tensors[source].shape, torch_private.full_shape(member.param)
        spans, dtype = local_spans(member.param), member.param.sharded_param.dtype
        complete, parts = full == shape, [*overlaps(full_spans(shape), spans)]
        if complete and len(parts) == 1:  # the slice is not copied
            return reader(source, parts[0][0]).reshape(-1).to(dtype)
        held = torch.empty(sizes_of(spans), dtype=dtype)
        for bounds, target in parts:
            held[target] = reader(source, bounds)
        if complete:
            return held.reshape(-1)
        added = (((shape[0], full[0]),), *full_spans(full)[1:])  # new tokens of a larger vocabulary
        for bounds, target in overlaps(added, spans):
            count = full[0] - shape[0]
            if name in self._zero:
                held[target] = 0
            else:
                rows = new_rows(lambda part: reader(source, [part]), shape, count, seed=self._seed, name=name)
                held[target] = rows[bounds].to(held.dtype)
        return held.reshape(-1)

    def _converted(self, conversion: Conversion, reader: WeightReader) -> dict[str, torch.Tensor]:
        return conversion.run({source: reader(source) for source in conversion.sources})

    def _local(self, found: Mapping[str, torch.Tensor], members: Sequence[Member]) -> dict[str, torch.Tensor]:
        """Return this rank's elements of the tensors that belong to `members`, flat, in the dtype of the parameter."""
        local: dict[str, torch.Tensor] = {}
        for member in members:
            for name in self._names(member):
                if name in found:
                    dtype = member.param.sharded_param.dtype
                    local[name] = local_slice(member.param, found[name]).to(dtype, copy=True)
        return local

    def buffers(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return the persistent buffers that the folder contains, in the model's dtypes."""
        found: dict[str, torch.Tensor] = {}
        in_memory = torch_private.tensors_in_memory(model)
        with closing(self._files.reader()) as reader:
            for name in torch_private.persistent_buffers(model):
                target = self._base_name(name)
                if target is not None and target in self._made_by:
                    value = self._converted(self._made_by[target], reader)[target]
                    found[name] = value.to(in_memory[name].dtype, copy=True)
        return found


def _has_fewer_rows(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if not convertible(found.dtype, wanted.dtype) or found.dim() not in (1, 2):
        return False
    return found.shape[1:] == wanted.shape[1:] and 1 < len(found) < len(wanted)


@dataclass
class _Misfit:
    """Differences between a folder and a model."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    # names of tensors with a different shape or dtype, and a description of the difference
    differing: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def compare(self, name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        if found.shape != wanted.shape:
            self.differing[name] = f"shape {tuple(found.shape)} in the folder, {tuple(wanted.shape)} in the model"
        elif not convertible(found.dtype, wanted.dtype):
            self.differing[name] = f"{found.dtype} in the folder, {wanted.dtype} in the model"

    def check(self, files: WeightFiles, model: nn.Module, *, strict: bool) -> None:
        """Raise a `ConfigError` that lists all differences that are not allowed, if there are any."""
        lines = [("different", name, why) for name, why in self.differing.items()]
        lines += [("not convertible", name, why) for name, why in self.failed.items()]
        if strict:
            lines += [("missing", name, "") for name in _groups(self.missing)]
            lines += [("unexpected", name, "") for name in _groups(self.unexpected)]
        if not lines:
            return
        width = max(len(kind) for kind, _, _ in lines)
        shown = [f"  {kind:{width}}  {name}{f': {why}' if why else ''}" for kind, name, why in lines[:_SHOWN]]
        if len(lines) > _SHOWN:
            shown.append(f"  and {len(lines) - _SHOWN} more")
        raise ConfigError(
            f"the weights in {files.path} do not match {names.class_name(model)}:\n" + "\n".join(shown) + "\n"
            + self._advice
        )  # fmt: skip

    @property
    def _advice(self) -> str:
        if self.differing or self.failed:
            return "build the model from the folder's own config.json"
        return (
            "build the model that was saved, or pass strict=False to initialize missing tensors and ignore "
            "unexpected ones"
        )


def _like(member: Member) -> torch.Tensor:
    return torch.empty(torch_private.full_shape(member.param), dtype=member.param.sharded_param.dtype, device="meta")


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def _groups(found: Iterable[str]) -> list[str]:
    """Combine names that differ only in a single number, as in ``layers.{0, 1, 2}.weight``."""
    by_pattern: dict[str, list[str]] = {}
    for name in found:
        by_pattern.setdefault(_NUMBER.sub("*", name), []).append(name)
    groups: list[str] = []
    for alike in by_pattern.values():
        numbers = [list(map(int, _NUMBER.findall(name))) for name in alike]
        varying = [place for place in range(len(numbers[0])) if len({row[place] for row in numbers}) > 1]
        if len(varying) != 1:
            groups += alike
            continue
        span = list(_NUMBER.finditer(alike[0]))[varying[0]].span()
        values = ", ".join(str(row[varying[0]]) for row in sorted(numbers))
        groups.append(f"{alike[0][: span[0]]}{{{values}}}{alike[0][span[1] :]}")
    return groups


def _grouped(found: Iterable[str]) -> str:
    return ", ".join(_groups(found))
