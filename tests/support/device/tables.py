"""What devices are tried with, simulated ones and real ones: recipes, and pagings of each kind."""

from __future__ import annotations

from dataclasses import replace

from support.train import Paging, Recipe

SOME = 120 << 10
"""Bytes of the device that are enough to stage weights of a `Toy`, and to keep none."""
FEW = 620 << 10
"""Bytes that have room for slots, and for one or two FSDP modules of a `Toy` with their state."""
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
    "least-auto": Paging(host_cache="least"),
    "middle-forward": Paging(update_schedule="in_forward"),
    "least-after": Paging(host_cache="least", update_schedule="after_backward"),
    "all-auto": Paging(host_cache="all"),
    "least-auto-staged": Paging(host_cache="least", device=SOME),
    "least-forward-kept": Paging(host_cache="least", update_schedule="in_forward", device=ALL),
    "all-after-staged": Paging(host_cache="all", update_schedule="after_backward", device=SOME),
    "least-forward-no-worker": Paging(host_cache="least", update_schedule="in_forward", cores=0),
}
LARGE = Recipe(model="wide", steps=6, sequences=64)
"""54M parameters: a kernel of its takes long enough for others to run beside it, which those of a `Toy` do not."""
LARGE_PAGINGS = {
    "least-staged": Paging(host_cache="least", page=1 << 20, device=96 << 20),
    "middle-staged": Paging(page=1 << 20, device=96 << 20),
    "least-some-at-home": Paging(host_cache="least", page=1 << 20, device=400 << 20),
    "all-at-home": Paging(host_cache="least", page=1 << 20, device=4 << 30),
    "forward-staged": Paging(host_cache="least", page=1 << 20, device=96 << 20, update_schedule="in_forward"),
    "after-at-home": Paging(host_cache="least", page=1 << 20, device=4 << 30, update_schedule="after_backward"),
}
GPU_RESIDENT_PAGES = {
    "some-auto": Paging(host_cache="least", device=FEW, gpu_resident_pages="some"),
    "all-auto": Paging(host_cache="least", device=ALL, gpu_resident_pages="all"),
    "some-forward": Paging(host_cache="least", update_schedule="in_forward", device=FEW, gpu_resident_pages="some"),
    "all-after": Paging(host_cache="least", update_schedule="after_backward", device=ALL, gpu_resident_pages="all"),
    "some-after-middle": Paging(update_schedule="after_backward", device=FEW, gpu_resident_pages="some"),
    "all-forward-no-worker": Paging(
        host_cache="least", update_schedule="in_forward", device=ALL, cores=0, gpu_resident_pages="all"
    ),
}
"""With FSDP modules that live on the device, where it updates."""
MANY = Recipe(model="toy", steps=4, sequences=44)
"""Its layers are called with two or three pages."""
ACTIVATION_RECIPES = {
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
    "nvme-least": Paging(host_cache="least", activations="nvme"),
    "host": Paging(activations="host"),
    "nvme-forward-delays": Paging(update_schedule="in_forward", activations="nvme", delays=True),
    "nvme-two-paths": Paging(update_schedule="after_backward", activations="nvme", paths=2),
}
"""Where activations wait, in the least room, late and on several drives."""
