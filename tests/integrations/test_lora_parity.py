"""Tests of partially frozen models, with and without peft adapters: results are bitwise equal to training in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.adapted import ADAPTED
from support.ranks import RankPool
from support.tables import all_but, variants
from support.train import Paging, Recipe, compare

STEPS = 4
SETTINGS = {name: {} for name in ADAPTED} | {
    "norms": {"clip": 0.5},
    "dora": {"clip": 0.5},
    "biases": {"micro": 2},
    "lora-all": {"evaluate": True},
    "head": {"policy": "fp32"},
    "ia3": {"policy": "fp32"},
    "lora-dropout": {"checkpointing": True},
}
WIDE = (
    "lora-rank-stabilized", "lora-transposed", "lora-embeddings", "lora-tokens", "lora-reentrant", "loha", "oft",
    "prefix", "prompt-encoder", "head", "upper-layers", "tied-frozen", "norms", "lower-layers", "single-matrix",
    "tied-trained", "qlora-int8", "qlora-nf4", "lora-two-adapters", "ia3",
)  # fmt: skip


@pytest.mark.parametrize("name", all_but(ADAPTED, *WIDE))
def test_adapters_are_bitwise_equal_to_memory(name: str, tmp_path: Path) -> None:
    """Losses, norms, parameters and moments are compared; frozen parameters keep their values."""
    assert compare(Recipe(model=name, steps=STEPS, **SETTINGS[name]), Paging(host_cache="least"), str(tmp_path)) == []


@pytest.mark.parametrize(
    ("recipe", "paging"),
    variants(
        {name: Recipe(model=name, steps=STEPS) for name in ("lora", "lora-bf16-base", "lora-saved-head", "biases")},
        {
            "forward": Paging(host_cache="least", update_schedule="in_forward"),
            "after-middle": Paging(update_schedule="after_backward"),
            "all": Paging(host_cache="all"),
            "paths-split": Paging(host_cache="least", paths=2, format="split"),
        },
    ),
)
def test_adapters_with_other_paging_are_bitwise_equal_to_memory(recipe: Recipe, paging: Paging, tmp_path: Path) -> None:
    """The update schedule, the host cache size and the state format vary."""
    assert compare(recipe, paging, str(tmp_path)) == []


ON_TWO_RANKS = (
    "lora", "lora-all", "lora-bf16-base", "lora-saved-head", "lora-tied", "dora", "ia3", "prompt", "qlora-int8",
    "qlora-nf4", "biases", "upper-layers", "tied-frozen",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    all_but(ON_TWO_RANKS, *(name for name in ON_TWO_RANKS if name not in ("lora", "biases"))),
)
def test_adapters_on_two_ranks_are_bitwise_equal_to_memory(name: str, tmp_path: Path, pair: RankPool) -> None:
    """Rows of small adapters are divided unevenly, and some ranks have none of them."""
    recipe = Recipe(model=name, steps=STEPS, clip=0.5 if name == "dora" else None)
    assert pair.run(compare, recipe, Paging(host_cache="least"), str(tmp_path)) == [[], []]
