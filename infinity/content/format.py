"""State formats: what is kept of one element of a parameter, in which dtypes and encodings. No I/O, no torch.

[Note: encodings] A section of the state (the master, a moment) may be stored otherwise than the optimizer sees it. An
encoding is a list of components: items of one dtype, one for so many elements. A master that is *split*, for example,
is the bf16 weight, 16 bits for every element, and 8 for every 8 elements. As `SHARD_ALIGNMENT` is a multiple of all of
these numbers, no item is of two shards. `infinity.content.encoding` has the arithmetic.
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
    "split": (("int16", 1), ("uint8", 8)),  # lower half; a bit where the weight was rounded up
    "bfloat16": (("bfloat16", 1),),
    # Code, and scale of a block: a power of two, with a minus where no element is negative.
    "8bit": (("uint8", 1), ("bfloat16", SHARD_ALIGNMENT)),
}
"""Components of a section of fp32 elements in an update page, as (dtype, elements per item)."""
HALVES = ("bfloat16", "int16")
"""Components of an fp32 gradient in GRAD pages: its upper half and its lower half.

A gradient that was computed in bf16 and never added to another is its upper half: the pages of the lower one are not
used.
"""
FORMATS = {"fp32": ("", ""), "split": ("split", ""), "bf16-moments": ("split", "bfloat16"), "8bit": ("split", "8bit")}
"""Encodings of master and moments by `state.format`."""


class Role(Enum):
    """What a page is for."""

    PARAM = "param"
    UPDATE = "update"
    GRAD = "grad"
    ACTIVATION = "activation"


class Component(NamedTuple):
    """A part of a section: an item of `dtype` for every `each` elements, in the pages of `role`.

    In a page of `count` elements it begins at byte `offset` · `count`.
    """

    role: Role
    dtype: str
    each: int
    offset: float


@dataclass(frozen=True, kw_only=True)
class StateFormat:
    """Persistent state of one element; dtypes by their torch names.

    `master` is empty where the parameters are trained in the dtype they are computed in: then the PARAM pages are
    the master. `kinds` are the optimizer's own element-wise states, in order, as (name, dtype); parameters that are
    not trained have none, and no gradient. These are the dtypes that the optimizer sees; `encodings` has, as (section,
    encoding), the sections that are stored otherwise. `grads` are the dtypes of the components of a gradient: its own,
    or those of its `HALVES`.
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
        """Return the format of a parameter's elements.

        Args:
            own: dtype of the parameter.
            computed: dtype that it is gathered and computed with.
            kinds: element-wise states of the optimizer; those of a parameter that is not trained do not count.
            trainable: whether it is trained.
            alone: whether nobody reduces its gradients: a rank alone gets each in the dtype in which it was computed.
        """
        halves = (computed, own) == (HALVES[0], "float32") and alone
        grads = HALVES if halves else (own,)
        master = "" if own == computed else own
        if not trainable:
            return cls(param=computed, master=master)
        return cls(param=computed, master=master, kinds=kinds, grads=grads)

    def key(self, own: str, *, trainable: bool, slices: str = "") -> str:
        """Return what tells the shards of an FSDP module that form a segment: see `ShardSpec.segment_key`.

        Args:
            slices: ``rows`` or ``whole`` where updates need more than any elements.
        """
        return f"{'trained' if trainable else 'frozen'} {own} {self} {slices}".rstrip()

    def stored_as(self, name: str) -> StateFormat:
        """Return this format under a setting of `state.format`, which concerns fp32 sections only.

        A master is split where the weights are its upper half: in bf16.
        """
        master, moments = FORMATS[name]
        chosen = [(kind, moments) for kind, dtype in self.kinds if dtype == "float32"]
        if (self.param, self.master) == ("bfloat16", "float32"):
            chosen.insert(0, (MASTER, master))
        return replace(self, encodings=tuple((section, encoding) for section, encoding in chosen if encoding))

    def check(self) -> None:
        """Check that a section is there once, and that encodings and halves are of sections that they can be of.

        Raises:
            ValueError: they are not.
        """
        dtypes = {MASTER: self.master, **dict(self.kinds)}
        if len(dtypes) != 1 + len(self.kinds):
            raise ValueError("a state is there twice")
        for section, encoding in self.encodings:
            if dtypes.pop(section, "") != "float32":
                raise ValueError(f"{section!r} cannot be stored as {encoding}")
            if (section == MASTER) != (encoding == "split") or (encoding == "split" and self.param != "bfloat16"):
                raise ValueError(f"{section!r} cannot be stored as {encoding}")
        if len(self.grads) > 1 and (self.grads, self.dtypes[MASTER]) != (HALVES, "float32"):
            raise ValueError(f"a gradient cannot be stored as {self.grads}")

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """The dtype of master and states, as they are trained."""
        return {MASTER: self.master or self.param, **dict(self.kinds)}

    @cached_property
    def encoded(self) -> dict[str, str]:
        """The encodings of the sections that have one."""
        return dict(self.encodings)

    @cached_property
    def weights(self) -> Component:
        """The only component of PARAM pages."""
        return Component(Role.PARAM, self.param, 1, 0.0)

    @cached_property
    def components(self) -> dict[str, tuple[Component, ...]]:
        """The components of master and states. The weights come first of a master that is split, or is the weights."""
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
        """Whether an update writes the weights without having read them: where they are no part of the master."""
        return self.weights not in self.components[MASTER]

    @cached_property
    def update_bytes(self) -> float:
        """Bytes of one element in an update page."""
        components = {
            component for section in self.components.values() for component in section if component.role is Role.UPDATE
        }
        return sum(ITEMSIZE[component.dtype] / component.each for component in components)

    @property
    def state_bytes(self) -> float:
        """Persistent bytes of one element, gradients left out."""
        return ITEMSIZE[self.param] + self.update_bytes
