"""`infinity train` on data sets: the batches, the loss on them, and how a run goes on in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers

from infinity_tools.recipe import begun
from infinity_tools.samples.batches import Drawn
from infinity_tools.samples.prepared import Sequences
from support.command import run_here, run_process
from support.fine_tuning import chats, make_model, texts, write_jsonl

TRAIN = ["train", "--seq", "64", "--batch-tokens", "256", "--host-memory", "1MiB", "--threads", "1", "--dtype", "fp32"]
TRAIN += ["--model", "m", "--lr", "3e-3"]


def prepared(out: Path) -> Sequences:
    """Return the sequences of the only data set of a run."""
    (file,) = (out / "data").glob("*.arrow")
    return Sequences(file)


def in_memory(out: Path, steps: int, *, clip: float | None = None) -> list[float]:
    """Train with the sequences of a run by a loop as one writes it; return the losses."""
    model = transformers.AutoModelForCausalLM.from_pretrained("m", dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, begun({"lr": 3e-3}, steps).factor)
    batches = Drawn(prepared(out), sequences=4, seed=0, rank=0, world_size=1)
    losses = []
    for step in range(steps):
        loss = model(**batches.at(step), use_cache=False).loss
        losses.append(loss.item())
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_losses_are_those_of_a_loop_in_memory(kind: str, tmp_path: Path) -> None:
    """Bit for bit, with the packed sequences of the run; evaluating between steps changes nothing."""
    make_model(tmp_path / "m")
    write_jsonl(tmp_path / "d.jsonl", texts(60) if kind == "text" else chats(60))
    write_jsonl(tmp_path / "e.jsonl", chats(9, seed=3))
    held_out = ["--eval-data", "e.jsonl", "--eval-every", "3"]
    found = run_here(*TRAIN, "--data", "d.jsonl", *held_out, "--steps", "8", "--json", "--out", "o").summary
    again = run_here(*TRAIN, "--data", "d.jsonl", "--steps", "8", "--json", "--out", "p").summary
    assert found["losses"] == again["losses"] == in_memory(tmp_path / "p", 8)
    assert [step for step, _ in found["eval_losses"]] == [3, 6, 8]
