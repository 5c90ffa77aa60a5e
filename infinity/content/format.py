"""State formats: the tensors stored per element of a parameter, with their dtypes and encodings.

This module performs no I/O and does not import torch.

[Note: encodings] A section of the state (the master or a moment) may be stored in a form that differs from the one that
the optimizer sees. An encoding is a list of components. Each component consists of items of one dtype, with one item
per fixed number of elements. A *split* master, for example, consists of the bf16 weights, one int16 per element, and
one uint8 per 8 elements. `SHARD_ALIGNMENT` is a multiple of all these numbers of elements, so two shards never share an
item. `infinity.content.encoding` implements the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

SHARD_ALIGNMENT = 64
MASTER = "master"
ITEMSIZE = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
ENCODINGS: dict[str, tuple[tuple[str, int], ...]] = {
    "split": (("int16", 1), ("uint8", 8)),  # lower half, and one bit that is set if the weight was rounded up
    "bfloat16": (("bfloat16", 1),),
    # A code per element, and a scale per block: a power of two, negated if the block has no negative element.
    "8bit": (("uint8", 1), ("bfloat16", SHARD_ALIGNMENT)),
}
"""Components of each encoding of fp32 elements in UPDATE pages, as (dtype, elements per item)."""
HALVES = ("bfloat16", "int16")
"""Components of an fp32 gradient in GRAD pages: its upper half and its lower half.

A gradient that was computed in bf16 and never accumulated equals its upper half, so the pages of the lower half are not
used.
"""
FORMATS = {"fp32": ("", ""), "split": ("split", ""), "bf16-moments": ("split", "bfloat16"), "8bit": ("split", "8bit")}
"""Encodings of the master and of the moments, by the value of `state.format`."""


class Role(Enum):
    """Content of a page."""

    PARAM = "param"
    UPDATE = "update"
    GRAD = "grad"
    ACTIVATION = "activation"


class Component(NamedTuple):
    """Part of a section: one item of `dtype` per `each` elements, in pages of role `role`.

    In a page with `count` elements, the component begins at byte `offset` * `count`.
    """

    role: Role
    dtype: str
    each: int
    offset: float


@dataclass(frozen=True, kw_only=True)
class StateFormat:
    """Persistent state of each element. Dtypes are given by their torch names.

    Attributes:
        param: Dtype of the weights in PARAM pages, which is the compute dtype.
        master: Dtype of the master weights. Empty if parameters are trained in the compute dtype; the PARAM pages then
            hold the master.
        kinds: Element-wise optimizer states, in order, as (name, dtype). Frozen parameters have no optimizer states and
            no gradient.
        grads: Dtypes of the gradient components: the gradient's own dtype, or the dtypes in `HALVES`.
        encodings: Sections that are stored in encoded form, as (section, encoding). All other fields give the dtypes
            that the optimizer sees.
    """

    param: str
    master: str = ""
    kinds: tuple[tuple[str, str], ...] = ()
    grads: tuple[str, ...] = ()
    encodings: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls, own: str, computed: str, kinds: tuple[tuple[str, str], ...], *, trainable: bool, alone: bool
    ) -> StateFormat:
        """Return the format for the elements of a parameter.

        Args:
            own: Dtype of the parameter.
            computed: Dtype in which the parameter is gathered and used in computation.
            kinds: Element-wise optimizer states. Ignored if the parameter is frozen.
            trainable: Whether the parameter is trained.
            alone: Whether gradients are not reduced, because there is only one rank. That rank receives each gradient
                in the dtype in which it was computed.
        """
        halves = (computed, own) == (HALVES[0], "float32") and alone
        grads = HALVES if halves else (own,)
        master = "" if own == computed else own
        if not trainable:
            return cls(param=computed, master=master)
        return cls(param=computed, master=master, kinds=kinds, grads=grads)

    def key(self, own: str, *, trainable: bool, slices: str = "") -> str:
        """Return the key that decides which shards of an FSDP module share a segment. See `ShardSpec.segment_key`.

        Args:
            own: Dtype of the parameter.
            trainable: Whether the parameter is trained.
            slices: ``rows`` or ``whole`` if updates need whole rows or the full parameter at once, otherwise empty.
        """
        return f"{'trained' if trainable else 'frozen'} {own} {self} {slices}".rstrip()

    def stored_as(self, name: str) -> StateFormat:
        """Return this format with the encodings that a value of `state.format` selects for fp32 sections.

        A master is split only if the weights are in bf16, so that they are its upper half.
        """
        master, moments = FORMATS[name]
        chosen = [(kind, moments) for kind, dtype in self.kinds if dtype == "float32"]
        if (self.param, self.master) == ("bfloat16", "float32"):
            chosen.insert(0, (MASTER, master))
        return replace(self, encodings=tuple((section, encoding) for section, encoding in chosen if encoding))

    def check(self) -> None:
        """Check that section names are unique, and that encodings and halves are used only where they are supported.

        Raises:
            ValueError: If a check fails.
        """
        dtypes = {MASTER: self.master, **dict(self.kinds)}
        if len(dtypes) != 1 + len(self.kinds):
            raise ValueError("two optimizer states have the same name")
        for section, encoding in self.encodings:
            if dtypes.pop(section, "") != "float32":
                raise ValueError(f"{section!r} cannot be stored as {encoding}")
            if (section == MASTER) != (encoding == "split") or (encoding == "split" and self.param != "bfloat16"):
                raise ValueError(f"{section!r} cannot be stored as {encoding}")
        if len(self.grads) > 1 and (self.grads, self.dtypes[MASTER]) != (HALVES, "float32"):
            raise ValueError(f"a gradient cannot be stored as {self.grads}")

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """Dtypes of the master and the optimizer states, as the optimizer sees them."""
        return {MASTER: self.master or self.param, **dict(self.kinds)}

    @cached_property
    def encoded(self) -> dict[str, str]:
        """Encodings by section, for the sections that are encoded."""
        return dict(self.encodings)

    @cached_property
    def weights(self) -> Component:
        """The single component of PARAM pages."""
        return Component(Role.PARAM, self.param, 1, 0.0)

    @cached_property
    def components(self) -> dict[str, tuple[Component, ...]]:
        """Components of the master and of the optimizer states, by section.

        If the master is split, or if the weights are the master, the weights come first.
        """
        components: dict[str, tuple[Component, ...]] = {}
        offset = 0.0
        for name, dtype in (*([(MASTER, self.master)] if self.master else []), *self.kinds):
            component = []
            for stored, each in ENCODINGS.get(self.encoded.get(name, ""), ((dtype, 1),)):
                component.append(Component(Role.UPDATE, stored, each, offset))
                offset += ITEMSIZE[stored] / each
            components[name] = tuple(component)
        if not self.master or MASTER in self.encoded:
            components[MASTER] = (self.weights, *components.get(MASTER, ()))
        return components

    @property
    def replaces_weights(self) -> bool:
        """``True`` if an update writes the weights without reading them, because they are not part of the master."""
        return self.weights not in self.components[MASTER]

    @cached_property
    def update_bytes(self) -> float:
        """Bytes per element in UPDATE pages."""
        components = {
            component for section in self.components.values() for component in section if component.role is Role.UPDATE
        }
        return sum(ITEMSIZE[component.dtype] / component.each for component in components)

    @property
    def state_bytes(self) -> float:
        """Persistent bytes per element, excluding gradients."""
        return ITEMSIZE[self.param] + self.update_bytes
