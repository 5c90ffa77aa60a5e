"""`infinity train` packs samples into one sequence only for models in which they do not see each other there."""

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
"""Types of models that tell samples apart by their positions, and values of their configurations."""
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
"""Those that do not."""


def full_size(kind: str, values: dict[str, Any]) -> Any:
    """Return the configuration of a model as large as transformers has it by default."""
    return transformers.AutoConfig.for_model(kind, **values)


@pytest.mark.parametrize("kind", all_but(PACKED, *{*PACKED} - {"llama"}))
def test_what_a_small_copy_says_of_models_that_tell_samples_apart(kind: str) -> None:
    """Of a configuration as large as they come, which stays as it is; random numbers go on as they would have."""
    config = full_size(kind, PACKED[kind])
    before, state = config.to_dict(), torch.get_rng_state()
    assert why_apart(config) == ""
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", all_but(APART, *{*APART} - {"mamba"}))
def test_what_a_small_copy_says_of_models_that_do_not(kind: str) -> None:
    """Attention that makes its mask without positions, and layers that carry a state on or look at tokens before."""
    assert why_apart(full_size(kind, APART[kind])).startswith(f"{kind} does not separate packed samples:")


def test_a_small_copy_has_every_kind_of_layer() -> None:
    """Also one that comes late: the last of 32 layers."""
    config = full_size("lfm2", {"layer_types": ["full_attention"] * 31 + ["conv"]})
    assert len(small_copy(config, "AutoModelForCausalLM").model.layers) == 32  # type: ignore[arg-type, union-attr]
    assert why_apart(config).startswith("lfm2 does not separate packed samples:")
    config.layer_types = ["full_attention"] * 2 + ["conv"] + ["full_attention"] * 29
    assert len(small_copy(config, "AutoModelForCausalLM").model.layers) == 3  # type: ignore[arg-type, union-attr]
    assert why_apart(config).startswith("lfm2 does not separate packed samples:")


def make(folder: Path, kind: str, **values: Any) -> Any:
    """Save a small model with a tokenizer; return it."""
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
def test_samples_that_would_see_each_other_are_not_packed(kind: str, values: dict[str, Any], tmp_path: Path) -> None:
    """Each has a sequence, losses are those of a loop in memory over them, and it is said in a line and in JSON."""
    model = make(tmp_path / "m", kind, **values).train()
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


def test_what_cannot_be_tried_is_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the reason is said; texts are one long row whatever the model is, and nothing is tried for them."""

    def refused(*_: object) -> Any:
        raise UnsupportedError("no small copy of a llama could be made: its layers are in no list")

    monkeypatch.setattr(neighbors, "small_copy", refused)
    make(tmp_path / "m", "llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
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


def test_a_copy_that_predicts_the_same_whatever_it_is_given_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a one would seem to tell samples apart."""
    model = small_copy(full_size("llama", {}), "AutoModelForCausalLM")
    torch.nn.init.zeros_(model.lm_head.weight)  # type: ignore[arg-type, union-attr]
    monkeypatch.setattr(neighbors, "small_copy", lambda *_: model)
    assert "predicts the same for any tokens" in why_apart(full_size("llama", {}))
