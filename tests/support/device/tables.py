"""What devices are tried with, simulated ones and real ones: recipes, and pagings of each kind."""

from __future__ import annotations

from dataclasses import replace

from support.train import Paging, Recipe

SOME = 120 << 10
"""Bytes of the device that are enough to stage weights of a `Toy`, and to keep none."""
FEW = 620 << 10
"""Bytes that have room for slots, and for one or two units of a `Toy` with their state."""
ALL = 64 << 20
"""Bytes that have room for everything."""
RECIPES = {
    "plain": Recipe(model="toy", steps=4),
    "clip": Recipe(model="toy", steps=4, clip=0.5),
    "clip-by-torch": Recipe(model="toy", steps=4, clip=0.5, clips="torch"),
    "accumulate": Recipe(model="toy", steps=3, micro=2),
    "accumulate-clip-fp32": Recipe(model="toy", steps=3, micro=2, clip=0.5, policy="fp32"),
    "evaluate": Recipe(model="toy", steps=4, evaluate=True),
    "edit": Recipe(model="toy", steps=4, evaluate=True, edit=True),
    "edit-clip": Recipe(model="toy", steps=4, evaluate=True, edit=True, clip=0.5),
    "checkpointing": Recipe(model="toy", steps=4, checkpointing=True),
    "spare-clip": Recipe(model="spare", steps=4, clip=0.5),
    "loose-clip": Recipe(model="loose", steps=4, clip=0.5),
    "repeated": Recipe(model="repeated", steps=4),
    "no-reshard": Recipe(model="toy", steps=4, reshard=False),
    "frozen-clip": Recipe(model="frozen", steps=4, clip=0.5),
    "tied": Recipe(model="tied", steps=4),
    "pure-bf16": Recipe(steps=4, policy="pure_bf16"),
    "groups": Recipe(model="toy", steps=4, groups=True),
}
PAGINGS = {
    "least-auto": Paging(arena="least"),
    "middle-forward": Paging(placement="in_forward"),
    "least-after": Paging(arena="least", placement="after_backward"),
    "all-auto": Paging(arena="all"),
    "least-auto-staged": Paging(arena="least", device=SOME),
    "least-forward-kept": Paging(arena="least", placement="in_forward", device=ALL),
    "all-after-staged": Paging(arena="all", placement="after_backward", device=SOME),
    "least-forward-no-worker": Paging(arena="least", placement="in_forward", cores=0),
}
LARGE = Recipe(model="wide", steps=6, sequences=64)
"""54M parameters: a kernel of its takes long enough for others to run beside it, which those of a `Toy` do not."""
LARGE_PAGINGS = {
    "least-staged": Paging(arena="least", page=1 << 20, device=96 << 20),
    "middle-staged": Paging(page=1 << 20, device=96 << 20),
    "least-some-at-home": Paging(arena="least", page=1 << 20, device=400 << 20),
    "all-at-home": Paging(arena="least", page=1 << 20, device=4 << 30),
    "forward-staged": Paging(arena="least", page=1 << 20, device=96 << 20, placement="in_forward"),
    "after-at-home": Paging(arena="least", page=1 << 20, device=4 << 30, placement="after_backward"),
}
HOMES = {
    "some-auto": Paging(arena="least", device=FEW, homes="some"),
    "all-auto": Paging(arena="least", device=ALL, homes="all"),
    "some-forward": Paging(arena="least", placement="in_forward", device=FEW, homes="some"),
    "all-after": Paging(arena="least", placement="after_backward", device=ALL, homes="all"),
    "some-after-middle": Paging(placement="after_backward", device=FEW, homes="some"),
    "all-forward-no-worker": Paging(arena="least", placement="in_forward", device=ALL, cores=0, homes="all"),
}
"""With units that live on the device, where it updates."""
MANY = Recipe(model="toy", steps=4, sequences=44)
"""Its layers are called with two or three pages."""
RECIPES_THAT_KEEP = {
    "plain": MANY,
    "checkpointing": replace(MANY, checkpointing=True),
    "checkpointing-clip": replace(MANY, checkpointing=True, clip=0.5),
    "checkpointing-accumulate": replace(MANY, checkpointing=True, micro=2),
    "checkpointing-evaluate-edit": replace(MANY, checkpointing=True, evaluate=True, edit=True),
    "fp32": replace(MANY, checkpointing=True, policy="fp32"),
    "repeated": replace(MANY, model="repeated"),
    "slices": replace(MANY, slices=4),
    "slices-clip": replace(MANY, slices=2, clip=0.5),
}
"""Of which activations are pages."""
ACTIVATIONS = {
    "nvme-least": Paging(arena="least", activations="nvme"),
    "host": Paging(activations="host"),
    "nvme-forward-delays": Paging(placement="in_forward", activations="nvme", delays=True),
    "nvme-two-paths": Paging(placement="after_backward", activations="nvme", paths=2),
}
"""Where activations wait, in the least room, late and on several drives."""
