"""Tests of fine-tuning models loaded by `from_pretrained`: bitwise equal to models that transformers loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support import fine_tune
from support.ranks import RankPool
from support.tables import all_but
from support.wide_models import build

KINDS = {
    "decoder": "Llama",
    "encoder": "Bert",
    "encoder and decoder": "T5",
    "vision": "ViT",
    "image and text": "Llava",
    "experts": "Qwen3Moe",
    "state space": "Mamba",
}
"""Families that `make test` fine-tunes, by kind. `make test-wide` adds `WIDE` and all of `support.wide_models`."""
WIDE = ("Qwen3", "Gemma3", "GPT2", "Bart", "Whisper", "Mixtral", "Albert", "Swin", "Wav2Vec2")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    pytest.importorskip("transformers").logging.set_verbosity_error()


def save(name: str, folder: Path) -> None:
    """Save a model of a family with `save_pretrained`."""
    torch.manual_seed(1)
    build(fine_tune.row_of(name)).save_pretrained(folder / "saved")


@pytest.mark.parametrize("name", all_but((*KINDS.values(), *WIDE), *WIDE))
def test_fine_tuning_matches_memory(name: str, tmp_path: Path) -> None:
    """Compares logits, losses, weights and moments in bf16; the export loads with the trained weights."""
    save(name, tmp_path)
    assert fine_tune.compare(name, tmp_path) == []


@pytest.mark.parametrize("name", all_but(("Llama", "T5", "Llava"), "T5", "Llava"))
def test_fine_tuning_on_two_ranks_matches_memory(name: str, tmp_path: Path, pair: RankPool) -> None:
    """Each rank reads only its own slices."""
    save(name, tmp_path)
    assert pair.run(fine_tune.compare, name, tmp_path) == [[], []]
