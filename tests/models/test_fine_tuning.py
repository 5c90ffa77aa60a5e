"""Tests of fine-tuning model families loaded by `from_pretrained`: bitwise equal to models that transformers loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.models.sharding import shard
from support import fine_tune
from support.fine_tune import BF16, adamw, inputs_of, loss_of, seed
from support.ranks import RankPool
from support.rows import UNSUPPORTED
from support.tables import WIDE, all_but
from support.train import MIB, full_copy
from support.wide_models import LLAVA, ROWS, ModelRow, build

transformers = pytest.importorskip("transformers")
KINDS = {
    "decoder": "Llama",
    "encoder": "Bert",
    "encoder and decoder": "T5",
    "vision": "ViT",
    "image and text": "Llava",
    "experts": "Qwen3Moe",
    "state space": "Mamba",
}
"""Families that `make test` fine-tunes, by kind. `make test-wide` adds `MORE` and all of `support.wide_models`."""
MORE = ("Qwen3", "Gemma3", "GPT2", "Bart", "Whisper", "Mixtral", "Albert", "Swin", "Wav2Vec2")
QUICK = ("DeepseekV3",)
"""Families of `make test` with bf16 folders. DeepSeek-V3 has routers in fp32."""
NOT_IN_BF16 = ("FNet", "XLNet")
"""torch has no Fourier transform in bf16, and XLNet creates some parameters in fp32 for any dtype."""
FAMILIES = [
    pytest.param(row, id=row.name, marks=() if row.name in QUICK else WIDE)
    for row in (*ROWS, LLAVA)
    if row.outcome != UNSUPPORTED and row.name not in NOT_IN_BF16
]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


def loaded(row: ModelRow, folder: Path) -> nn.Module:
    """Return the model in a folder as loaded by transformers; all keys must match."""
    model = fine_tune.load(row, folder, dtype="auto")
    for name, param in build(row).named_parameters():  # loading makes frozen position embeddings trainable
        model.get_parameter(name).requires_grad_(param.requires_grad)
    return model.train()


@contextmanager
def offloaded(
    row: ModelRow, source: Path, folder: Path, **run: Any
) -> Iterator[tuple[nn.Module, infinity.PagedOptimizer]]:
    """Offload the model in a folder."""
    model = infinity.from_pretrained(
        source, auto_class=row.model, dtype="auto", attn_implementation="eager", mesh=infinity.mesh("cpu")
    )
    settings = {"storage": {"paths": [str(folder)]}, "memory": {"host_bytes": 32 * MIB}, "run": run}
    with infinity.offload(model, adamw(model), settings) as optimizer:
        yield model, optimizer


def step(row: ModelRow, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Train one step and return its loss."""
    seed(number)
    loss = loss_of(row, model.train(), number)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def generated(row: ModelRow, model: Any) -> list[int]:
    """Return the tokens that a model generates, or nothing if it cannot generate."""
    if not model.can_generate():
        return []
    inputs = {key: value for key, value in inputs_of(row, 9).items() if key != "labels"}
    with torch.no_grad():
        return model.eval().generate(**inputs, max_new_tokens=3, do_sample=False).tolist()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters of a model in memory or on NVMe."""
    return {name: full_copy(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize("row", FAMILIES)
def test_bf16_folder_is_bitwise_equal(row: ModelRow, tmp_path: Path) -> None:
    """Generated tokens, losses and saved weights equal those of plain FSDP2 in memory, and dtypes are preserved."""
    seed(1)
    build(row).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    expected = loaded(row, tmp_path / "source")
    shard(expected, mesh=infinity.mesh("cpu"), mp_policy=BF16)
    tokens = generated(row, expected)
    optimizer = adamw(expected)
    losses = [step(row, expected, optimizer, number) for number in range(3)]

    with offloaded(row, tmp_path / "source", tmp_path / "run") as (model, paged):
        assert generated(row, model) == tokens
        assert [step(row, model, paged, number) for number in range(2)] == losses[:2]
        paged.save_checkpoint()
    with offloaded(row, tmp_path / "source", tmp_path / "run", resume="latest") as (model, paged):
        assert step(row, model, paged, 2) == losses[2]
        paged.save_pretrained(tmp_path / "out")

    found, wanted = values(loaded(row, tmp_path / "out")), values(expected)
    assert {name: value.dtype for name, value in found.items()} == {name: v.dtype for name, v in wanted.items()}
    assert [name for name, value in wanted.items() if not torch.equal(value, found[name])] == []
    with offloaded(row, tmp_path / "out", tmp_path / "again") as (model, _):
        assert generated(row, model) == generated(row, expected)


def save(name: str, folder: Path) -> None:
    """Save a model of a family with `save_pretrained`."""
    torch.manual_seed(1)
    build(fine_tune.row_of(name)).save_pretrained(folder / "saved")


@pytest.mark.parametrize("name", all_but((*KINDS.values(), *MORE), *MORE))
def test_fine_tuning_matches_memory(name: str, tmp_path: Path) -> None:
    """Compares logits, losses, weights and moments in bf16; the export loads with the trained weights."""
    save(name, tmp_path)
    assert fine_tune.compare(name, tmp_path) == []


@pytest.mark.parametrize("name", all_but(("Llama", "T5", "Llava"), "T5", "Llava"))
def test_fine_tuning_on_two_ranks_matches_memory(name: str, tmp_path: Path, pair: RankPool) -> None:
    """Each rank reads only its own slices."""
    save(name, tmp_path)
    assert pair.run(fine_tune.compare, name, tmp_path) == [[], []]
