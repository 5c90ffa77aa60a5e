"""Recipes and pagings for tests on simulated and real devices."""

from __future__ import annotations

from dataclasses import replace

from support.train import Paging, Recipe

SOME = 120 << 10
"""Device memory, in bytes, that suffices to prefetch weights of a `Toy`, but not to keep any."""
FEW = 620 << 10
"""Device memory, in bytes, for prefetch slots and one or two FSDP modules of a `Toy` with their state."""
ALL = 64 << 20
"""Device memory, in bytes, for all weights and states of a `Toy`."""
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
    "compiled": Recipe(model="toy", steps=4, compiled=True),
}
PAGINGS = {
    "least-auto": Paging(host_cache="least"),
    "middle-forward": Paging(update_schedule="in_forward"),
    "least-after": Paging(host_cache="least", update_schedule="after_backward"),
    "all-auto": Paging(host_cache="all"),
    "least-auto-prefetched": Paging(host_cache="least", device=SOME),
    "least-forward-kept": Paging(host_cache="least", update_schedule="in_forward", device=ALL),
    "all-after-prefetched": Paging(host_cache="all", update_schedule="after_backward", device=SOME),
    "least-forward-no-worker": Paging(host_cache="least", update_schedule="in_forward", cores=0),
}
LARGE = Recipe(model="wide", steps=6, sequences=64)
"""54M parameters. Its kernels run long enough to overlap with others, unlike those of a `Toy`."""
LARGE_PAGINGS = {
    "least-prefetched": Paging(host_cache="least", page=1 << 20, device=96 << 20),
    "middle-prefetched": Paging(page=1 << 20, device=96 << 20),
    "least-some-gpu-resident": Paging(host_cache="least", page=1 << 20, device=400 << 20),
    "all-gpu-resident": Paging(host_cache="least", page=1 << 20, device=4 << 30),
    "forward-prefetched": Paging(host_cache="least", page=1 << 20, device=96 << 20, update_schedule="in_forward"),
    "after-gpu-resident": Paging(host_cache="least", page=1 << 20, device=4 << 30, update_schedule="after_backward"),
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
"""Pagings with GPU-resident FSDP modules and updates on the device."""
COLLECTIVE_RECIPES = {name: RECIPES[name] for name in ("plain", "clip", "accumulate-clip-fp32", "no-reshard")}
COLLECTIVE_PAGINGS = {
    name: (PAGINGS | GPU_RESIDENT_PAGES)[name]
    for name in ("least-auto-prefetched", "least-forward-kept", "middle-forward", "some-auto")
}
"""Recipes and pagings for tests of collectives in a process group with one rank."""
MANY = Recipe(model="toy", steps=4, sequences=44)
"""The activations of each layer occupy two or three pages."""
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
"""Recipes for tests of paged activations."""
ACTIVATIONS = {
    "nvme-least": Paging(host_cache="least", activations="nvme"),
    "host": Paging(activations="host"),
    "nvme-forward-delays": Paging(update_schedule="in_forward", activations="nvme", delays=True),
    "nvme-two-paths": Paging(update_schedule="after_backward", activations="nvme", paths=2),
}
"""Pagings with activations in host memory or on NVMe, with the smallest host cache, delays and several drives."""
