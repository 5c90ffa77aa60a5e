"""Tests of `infinity train --lora`: losses, traffic and export compared with peft in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from infinity.errors import ConfigError
from infinity_tools.lora_options import Lora
from infinity_tools.recipe import begun
from infinity_tools.samples.batches import Drawn
from infinity_tools.samples.prepared import Sequences
from support.command import run_here
from support.fine_tuning import chats, make_model, write_jsonl

TRAIN = ["train", "--model", "m", "--data", "d.jsonl", "--seq", "64", "--batch-tokens", "256", "--threads", "1"]
TRAIN += ["--dtype", "fp32", "--lr", "1e-2", "--lora", "r=4,alpha=16,targets=q_proj+v_proj"]
MEMORY = ["--host-memory", "512KiB"]
TRAIN[1:1] = MEMORY


def adapted(folder: Path) -> Any:
    """Return the in-memory model with an exported adapter."""
    base = transformers.AutoModelForCausalLM.from_pretrained("m", dtype=torch.float32, attn_implementation="sdpa")
    return peft.PeftModel.from_pretrained(base, folder, is_trainable=True)


def test_lora_matches_peft_bitwise_through_resume_and_export(tmp_path: Path) -> None:
    """The base weights are never written, and peft can load the export."""
    make_model(tmp_path / "m", layers=6)
    write_jsonl(tmp_path / "d.jsonl", chats(40))
    run_here(*TRAIN, "--lr", "0", "--steps", "1", "--out", "first")  # stores the initial adapters
    assert run_here("export", "first/nvme", "--out", "begin").status == 0
    begin = run_here(*TRAIN, "--steps", "3", "--lr-steps", "6", "--json", "--out", "o").summary
    rest = run_here("train", "--resume", "--steps", "6", *MEMORY, "--out", "o", "--json").summary
    assert rest["first_step"] == 4
    assert rest["nvme_read_bytes_per_step"] > 4 * rest["parameters"], "the base weights are read"
    assert rest["nvme_written_bytes_per_step"] < rest["parameters"], (
        "the base weights are not written: updates would take 12 bytes per parameter"
    )
    assert run_here("export", "o/nvme", "--out", "last").status == 0
    assert {file.name for file in (tmp_path / "last").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((tmp_path / "last/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], sorted(config["target_modules"])) == (4, 16, ["q_proj", "v_proj"])
    assert config["base_model_name_or_path"] == str(tmp_path / "m")

    model = adapted(tmp_path / "begin")
    (file,) = (tmp_path / "o/data").glob("*.arrow")
    batches = Drawn(Sequences(file), sequences=4, seed=0, rank=0, world_size=1)
    recipe = begun({"lr": 1e-2}, 6)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.factor)
    losses = []
    for step in range(6):
        loss = model(**batches.at(step), use_cache=False).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert begin["losses"] + rest["losses"] == losses
    found = peft.get_peft_model_state_dict(adapted(tmp_path / "last"))
    for name, value in peft.get_peft_model_state_dict(model).items():
        assert torch.equal(found[name], value), name
    assert any(value.abs().max() > 1e-2 for name, value in found.items() if "lora_B" in name), (
        "the adapter has been trained"
    )


def test_loss_tokens_with_adapters_matches_full_loss(tmp_path: Path) -> None:
    """The output head belongs to the base model."""
    make_model(tmp_path / "m", layers=2)
    write_jsonl(tmp_path / "d.jsonl", chats(10))
    full, sliced = (
        run_here(*TRAIN, *more, "--steps", "2", "--json", "--out", out).summary["losses"]
        for out, more in (("a", ()), ("b", ("--loss-tokens", "100")))
    )
    assert sliced == pytest.approx(full, rel=1e-4)
    assert sliced != full


def test_resume_requires_same_adapters(tmp_path: Path) -> None:
    """Different or missing adapters are rejected before any file is opened."""
    make_model(tmp_path / "m", layers=6)
    write_jsonl(tmp_path / "d.jsonl", chats(10))
    run_here(*TRAIN, "--steps", "1", "--out", "o")
    run_here(*TRAIN[:-2], "--steps", "1", "--out", "p")
    again = ["train", "--resume", "--steps", "2", *MEMORY, "--lora", "r=8"]
    for out, reason in (
        (
            "o",
            "--lora r=8,alpha=16,dropout=0 cannot resume a run that trains "
            "--lora r=4,alpha=16,dropout=0,targets=q_proj+v_proj",
        ),
        ("p", "--lora r=8,alpha=16,dropout=0 cannot resume a run that trains all parameters, without --lora"),
    ):
        ended = run_here(*again, "--out", out)
        assert ended.status == 2
        assert reason in " ".join(ended.errors.split())
    same = run_here(*again[:-1], "alpha=16,r=4,targets=q_proj+v_proj", "--out", "o", "--json")
    assert same.summary["first_step"] == 2, "the order of the options does not matter"


@pytest.mark.parametrize(
    "text", ["", "0", "r=0", "r=four", "r=4,r=5", "r=4,alpha=nan", "r=4,dropout=1", "r=4,target=q"]
)
def test_invalid_lora_option_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--lora '{text}'"):
        Lora.of(text)


def test_lora_option_defaults() -> None:
    """Alpha defaults to twice the rank, and the text form of the options can be parsed again."""
    assert Lora.of("r=8") == Lora(8, 16, 0, ())
    asked = Lora.of("r=8, alpha=12.5, dropout=0.1, targets=q_proj+v_proj")
    assert Lora.of(str(asked)) == asked == Lora(8, 12.5, 0.1, ("q_proj", "v_proj"))
