"""Tests that samples are packed only for models that separate packed samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from infinity.errors import UnsupportedError
from infinity.models.small import small_copy
from infinity_tools.recipe import begun
from infinity_tools.samples import neighbors
from infinity_tools.samples.batches import Drawn
from infinity_tools.samples.neighbors import why_apart
from infinity_tools.samples.pack import IGNORED
from infinity_tools.samples.prepared import Sequences
from support.command import run_here
from support.fine_tuning import chats, make_tokenizer, texts, write_jsonl
from support.tables import all_but

TRAIN = ["train", "--seq", "64", "--batch-tokens", "256", "--host-memory", "1MiB", "--threads", "1", "--dtype", "fp32"]
TRAIN += ["--model", "m", "--lr", "3e-3", "--steps", "3", "--json"]

PACKED = {
    "llama": {},
    "gpt2": {},
    "gpt_neo": {},
    "gptj": {},
    "falcon": {},
    "mistral": {},
    "mixtral": {},
    "qwen3": {},
    "qwen3_moe": {},
    "gemma3_text": {},
    "phi3": {},
    "deepseek_v3": {},
    "lfm2": {"layer_types": ["full_attention"] * 32},
}
"""Model types that separate packed samples by position, with configuration values."""
APART: dict[str, dict[str, Any]] = {
    "opt": {},
    "bloom": {},
    "mpt": {},
    "xglm": {},
    "gpt_oss": {},
    "mamba": {},
    "mamba2": {},
    "rwkv": {},
    "qwen3_next": {},
    "lfm2": {"layer_types": ["full_attention", "conv"] * 16},
    "jamba": {},
    "bert": {"is_decoder": True},
}
"""Model types that do not separate packed samples, with configuration values."""


def full_size(kind: str, values: dict[str, Any]) -> Any:
    """Return a model configuration with transformers' default sizes."""
    return transformers.AutoConfig.for_model(kind, **values)


@pytest.mark.parametrize("kind", all_but(PACKED, *{*PACKED} - {"llama"}))
def test_models_that_separate_packed_samples(kind: str) -> None:
    """The check changes neither the configuration nor the random state."""
    config = full_size(kind, PACKED[kind])
    before, state = config.to_dict(), torch.get_rng_state()
    assert why_apart(config) == ""
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", all_but(APART, *{*APART} - {"mamba"}))
def test_models_that_do_not_separate_packed_samples(kind: str) -> None:
    """Their attention masks ignore positions, or their layers carry state across tokens."""
    assert why_apart(full_size(kind, APART[kind])).startswith(f"{kind} does not separate packed samples:")


def test_small_copy_contains_every_layer_type() -> None:
    """A layer type may occur only in the last of 32 layers."""
    config = full_size("lfm2", {"layer_types": ["full_attention"] * 31 + ["conv"]})
    assert len(small_copy(config, "AutoModelForCausalLM").model.layers) == 32  # type: ignore[arg-type, union-attr]
    assert why_apart(config).startswith("lfm2 does not separate packed samples:")
    config.layer_types = ["full_attention"] * 2 + ["conv"] + ["full_attention"] * 29
    assert len(small_copy(config, "AutoModelForCausalLM").model.layers) == 3  # type: ignore[arg-type, union-attr]
    assert why_apart(config).startswith("lfm2 does not separate packed samples:")


def save_model(folder: Path, kind: str, **values: Any) -> Any:
    """Save a small model with a tokenizer and return the model."""
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(kind, vocab_size=320, **values)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return model


OPT = {"hidden_size": 64, "ffn_dim": 96, "word_embed_proj_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT |= {"dropout": 0.0, "max_position_embeddings": 128}
BLOOM = {"hidden_size": 64, "n_layer": 2, "n_head": 4}
MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("opt", OPT),
        pytest.param("bloom", BLOOM, marks=pytest.mark.wide),
        pytest.param("mamba", MAMBA, marks=pytest.mark.wide),
    ],
)
def test_unseparated_samples_are_padded_not_packed(kind: str, values: dict[str, Any], tmp_path: Path) -> None:
    """Losses match a plain PyTorch loop, and the output reports the padding."""
    model = save_model(tmp_path / "m", kind, **values).train()
    write_jsonl(tmp_path / "d.jsonl", chats(30))
    found = run_here(*TRAIN, "--data", "d.jsonl", "--eval-data", "d.jsonl", "--out", "o")
    (file,) = (tmp_path / "o/data").glob("*.arrow")
    source = Sequences(file)
    rows = source.rows(range(len(source)))
    assert len(source) == source.facts.rows == 30
    assert set(rows) == {"input_ids", "labels"}
    for tokens, labels in zip(rows["input_ids"], rows["labels"], strict=True):
        counted = (labels != IGNORED).nonzero()
        assert (tokens[: counted.max()] != 0).all()
        assert (tokens[counted.max() + 1 :] == 0).all()
    assert found.summary["not_packed"].startswith(f"{kind} does not separate packed samples:")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, begun({"lr": 3e-3}, 3).factor)
    batches = Drawn(source, sequences=4, seed=0, rank=0, world_size=1)
    for step, expected in enumerate(found.summary["losses"]):
        loss = model(**batches.at(step), use_cache=False).loss
        assert loss.item() == expected
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    said = " ".join(run_here(*TRAIN[:-1], "--data", "d.jsonl", "--out", "p").errors.split())
    assert f"samples are padded, not packed: {kind} " in said


def test_samples_are_not_packed_if_check_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are always concatenated, and therefore need no check."""

    def fail(*_: object) -> Any:
        raise UnsupportedError("no small copy of a llama could be made: its layers are in no list")

    monkeypatch.setattr(neighbors, "small_copy", fail)
    save_model(
        tmp_path / "m", "llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    write_jsonl(tmp_path / "d.jsonl", chats(20))
    write_jsonl(tmp_path / "t.jsonl", texts(60))
    found = run_here(*TRAIN, "--data", "d.jsonl", "--out", "o").summary
    assert found["not_packed"] == (
        "cannot check whether packed samples see each other: no small copy of a llama could be made: its layers are in "
        "no list"
    )
    (file,) = (tmp_path / "o/data").glob("*.arrow")
    assert len(Sequences(file)) == 20
    assert run_here(*TRAIN, "--data", "t.jsonl", "--out", "p").summary["not_packed"] == ""


def test_constant_predictions_do_not_prove_separation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a model would seem to separate samples."""
    model = small_copy(full_size("llama", {}), "AutoModelForCausalLM")
    torch.nn.init.zeros_(model.lm_head.weight)  # type: ignore[arg-type, union-attr]
    monkeypatch.setattr(neighbors, "small_copy", lambda *_: model)
    assert "predicts the same for any tokens" in why_apart(full_size("llama", {}))
