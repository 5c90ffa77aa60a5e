"""Tests of `infinity train` on datasets: losses, resuming and dataset formats."""

from __future__ import annotations

import gzip
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
from infinity_tools.samples.source import Rows, is_data_set
from support.command import run_here, run_process
from support.fine_tuning import chats, make_model, texts, write_jsonl

TRAIN = ["train", "--seq", "64", "--batch-tokens", "256", "--host-memory", "1MiB", "--threads", "1", "--dtype", "fp32"]
TRAIN += ["--model", "m", "--lr", "3e-3"]


def prepared(out: Path) -> Sequences:
    """Return the sequences of a run's only dataset."""
    (file,) = (out / "data").glob("*.arrow")
    return Sequences(file)


def train_in_memory(out: Path, steps: int, *, clip: float | None = None) -> list[float]:
    """Train on the sequences of a run in a plain PyTorch loop and return the losses."""
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
def test_losses_match_plain_pytorch_loop_bitwise(kind: str, tmp_path: Path) -> None:
    """Evaluation between steps changes nothing."""
    make_model(tmp_path / "m")
    write_jsonl(tmp_path / "d.jsonl", texts(60) if kind == "text" else chats(60))
    write_jsonl(tmp_path / "e.jsonl", chats(9, seed=3))
    held_out = ["--eval-data", "e.jsonl", "--eval-every", "3"]
    found = run_here(*TRAIN, "--data", "d.jsonl", *held_out, "--steps", "8", "--json", "--out", "o").summary
    again = run_here(*TRAIN, "--data", "d.jsonl", "--steps", "8", "--json", "--out", "p").summary
    assert found["losses"] == again["losses"] == train_in_memory(tmp_path / "p", 8)
    assert [step for step, _ in found["eval_losses"]] == [3, 6, 8]


def test_clipping_and_micro_batches_match_plain_loop(tmp_path: Path) -> None:
    """Clipping matches bitwise, and micro-batches match up to the order of summation."""
    make_model(tmp_path / "m")
    write_jsonl(tmp_path / "d.jsonl", chats(60))
    train = [*TRAIN, "--data", "d.jsonl", "--steps", "4"]
    clipped = run_here(*train, "--max-grad-norm", "0.5", "--json", "--out", "o").summary
    assert clipped["losses"] == train_in_memory(tmp_path / "o", 4, clip=0.5)
    rows = [json.loads(line) for line in (tmp_path / "o/steps.jsonl").read_text().splitlines()]
    assert all(row["grad_norm"] > 0 and row["stall_seconds"] >= 0 for row in rows)
    sliced = run_here(*train, "--micro-tokens", "64", "--json", "--out", "p").summary
    assert sliced["losses"] == pytest.approx(train_in_memory(tmp_path / "p", 4), rel=1e-4)


def test_resume_continues_at_next_sample(tmp_path: Path) -> None:
    """Losses match bitwise across the end of an epoch, with the options from the checkpoint."""
    make_model(tmp_path / "m")
    write_jsonl(tmp_path / "d.jsonl", chats(30))
    options = [*TRAIN, "--data", "d.jsonl", "--eval-data", "d.jsonl", "--eval-every", "2", "--epochs", "3", "--json"]
    straight = run_here(*options, "--out", "a").summary
    sequences = len(prepared(tmp_path / "a"))
    assert sequences % 4, "an epoch ends within a batch"
    assert straight["steps"] == -(-3 * sequences // 4)
    until = straight["steps"] - sequences // 4
    cut = run_here(*[word for word in options if word not in ("--epochs", "3")], "--steps", str(until),
                   "--lr-steps", str(straight["steps"]), "--out", "b").summary  # fmt: skip
    (tmp_path / "elsewhere").mkdir()
    for file in (tmp_path / "b/data").iterdir():
        file.unlink()  # the resumed run prepares the same data again
    resumed = run_here("train", "--resume", "--out", "b", "--epochs", "3", "--host-memory", "1MiB", "--json").summary
    assert resumed["first_step"] == until + 1
    assert cut["losses"] + resumed["losses"] == straight["losses"]
    assert resumed["eval_losses"][-1] == straight["eval_losses"][-1]
    ended = run_here("train", "--resume", "--out", "b", "--host-memory", "1MiB")
    assert "finished" in ended.errors, "the checkpoint records --epochs 3"


def test_epochs_count_sequences_after_batch_or_data_change(tmp_path: Path) -> None:
    """Epochs count sequences, not steps, so that larger batches need fewer steps."""
    make_model(tmp_path / "m")
    write_jsonl(tmp_path / "d.jsonl", chats(30))
    write_jsonl(tmp_path / "e.jsonl", chats(12, seed=4))
    train = [*TRAIN, "--data", "d.jsonl", "--out", "o", "--json"]
    run_here(*train, "--steps", "2")
    sequences = len(prepared(tmp_path / "o"))
    again = ["train", "--resume", "--out", "o", "--host-memory", "1MiB", "--threads", "1"]
    resumed = run_here(*again, "--epochs", "3", "--batch-tokens", "512", "--json").summary
    assert resumed["checkpointed_step"] == 2 + -(-(3 * sequences - 2 * 4) // 8)
    assert "--epochs above 3" in " ".join(run_here(*again, "--epochs", "3").errors.split())
    before = {*(tmp_path / "o/data").glob("*.arrow")}
    other = run_here(*again, "--data", "e.jsonl", "--override", "--json").summary
    (file,) = {*(tmp_path / "o/data").glob("*.arrow")} - before
    assert other["checkpointed_step"] == resumed["checkpointed_step"] + -(-3 * len(Sequences(file)) // 8)


def test_changed_data_require_override(tmp_path: Path) -> None:
    """Different data, sequence lengths or labels are rejected without `--override`."""
    make_model(tmp_path / "m")
    write_jsonl(tmp_path / "d.jsonl", chats(30))
    write_jsonl(tmp_path / "e.jsonl", chats(30, seed=9))
    assert run_here(*TRAIN, "--data", "d.jsonl", "--steps", "2", "--out", "o").status == 0
    again = ["train", "--resume", "--out", "o", "--steps", "3", "--host-memory", "1MiB"]
    for other, reason in (
        (["--data", "e.jsonl"], "tokenizer, columns or --loss-on"),
        (["--loss-on", "all"], "tokenizer, columns or --loss-on"),
        (["--seq", "32"], "packed for --seq 64, but --seq is 32"),
        (["--data", "m"], "dataset, but --data"),
    ):
        ended = run_here(*again, *other)
        assert ended.status == 2, other
        assert reason in " ".join(ended.errors.split())
    found = run_here(*again, "--data", "e.jsonl", "--override", "--json").summary
    assert found["first_step"] == 3


def compress(file: Path) -> None:
    """Replace a file with its `.gz` version."""
    file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    file.unlink()


FORMATS: dict[str, Any] = {
    "jsonl": lambda made, path: made.to_json(path / "d.jsonl"),
    "jsonl.gz": lambda made, path: made.to_json(path / "d.jsonl.gz", compression="gzip"),
    "json": lambda made, path: (path / "d.json").write_text(json.dumps(made.to_list())),
    "csv.gz": lambda made, path: (made.to_csv(path / "d.csv", index=False), compress(path / "d.csv")),
    "csv": lambda made, path: made.to_csv(path / "d.csv", index=False),
    "parquet": lambda made, path: made.to_parquet(path / "d.parquet"),
    "two of parquet": lambda made, path: [
        made.shard(2, number, contiguous=True).to_parquet(path / f"train-0000{number}-of-00002.parquet")
        for number in range(2)
    ],
    "saved": lambda made, path: made.save_to_disk(path),
    "saved, selected": lambda made, path: (
        datasets.concatenate_datasets([made, made]).select(range(len(made))).save_to_disk(path)
    ),
    "saved splits": lambda made, path: datasets.DatasetDict(train=made, test=made.select(range(3))).save_to_disk(path),
    "splits by name": lambda made, path: [
        made.to_parquet(path / "train.parquet"),
        made.select(range(3)).to_parquet(path / "validation.parquet"),
        (path / "README.md").write_text("about it"),
    ],
}


def test_all_formats_load_same_rows(tmp_path: Path) -> None:
    """Folders may contain a training split and an evaluation split."""
    made = datasets.Dataset.from_list(list(texts(20)))
    for name, write in FORMATS.items():
        folder = tmp_path / name
        folder.mkdir()
        write(made, folder)
        files = [file for file in folder.iterdir() if file.is_file()]
        for path in [folder, *(files if len(files) == 1 and not name.startswith("saved") else [])]:
            assert is_data_set(path), (name, path)
            rows = Rows.of([path], "", "--data", ("train",))
            assert [dict(row) for row in rows] == made.to_list(), name
        if "splits" in name:
            held_out = Rows.of([folder], "", "--eval-data", ("validation", "test"))
            assert [dict(row) for row in held_out] == made.to_list()[:3]
    (tmp_path / "saved/notes.py").write_text("pass")
    (tmp_path / "jsonl/code.py").write_text("pass")
    assert is_data_set(tmp_path / "saved")
    assert not is_data_set(tmp_path / "jsonl"), "a text folder that also contains a JSON file"


def test_two_ranks_match_losses_of_one_rank(tmp_path: Path) -> None:
    """Every token has the same weight, although the ranks have different numbers of tokens."""
    make_model(tmp_path / "m")
    write_jsonl(tmp_path / "d.jsonl", chats(40))
    train = [*TRAIN, "--data", "d.jsonl", "--eval-data", "d.jsonl", "--steps", "4"]
    alone = run_here(*train, "--json", "--out", "a").summary
    done = run_process(tmp_path, *train, "--nproc", "2", "--out", "b")
    assert done.status == 0, done.errors
    both = json.loads((tmp_path / "b/summary.json").read_text())
    assert both["world_size"] == 2
    assert both["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert both["eval_losses"][0][1] == pytest.approx(alone["eval_losses"][0][1], rel=1e-5)
    assert f"infinity train --nproc 2 {' '.join(train[1:3])}"[:24] in both["next"]["resume"]
    assert done.errors.count("step 4/4  loss") == 1, "only one rank prints"


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"a": 1, "b": 2.5}, [], "no text column; select one with --text-column; columns: a, b"),
        ({"a": "x", "b": "y"}, [], "several text columns; select one with --text-column; columns: a, b"),
        ({"text": "x"}, ["--text-column", "txt"], "'txt' is not a column of --data d.jsonl; columns: text"),
        ({"messages": [{"role": "user", "content": "x"}]}, [], "--data d.jsonl: none of the 1 rows"),
        ({"messages": "x"}, ["--split", "test"], "has the splits train, no 'test'; select one with --split"),
        ({"prompt": "x", "completion": None}, [], "row 0: 'completion' is not text: None"),
        ({"text": "x"}, ["--tokenizer", "nowhere"], "--tokenizer 'nowhere' is not a folder"),
        ({"text": "x"}, ["--model", "tiny"], "--tokenizer"),
        ({"text": "x"}, ["--model", "tiny", "--tokenizer", "m"], "vocab_size of --model tiny is only 256"),
        ({"text": "x"}, ["--loss-on", "answers"], "--loss-on 'answers' is not one of completions, all"),
        ({"text": "x"}, ["--epochs", "0"], "--epochs 0"),
        ({"text": "x"}, ["--epochs", "2", "--steps", "3"], "--epochs 2 and --steps 3"),
        ({"text": "x"}, ["--eval-every", "3"], "--eval-every 3 requires --eval-data or --eval-split"),
        ({"text": "x"}, ["--eval-split", "test"], "has the splits train, no 'test'; select one with --eval-split"),
        ({"text": "x"}, ["--data", "m"], "--data 'm' is plain text"),
        ({"text": "x"}, ["--log", "mlflow"], "--log 'mlflow' is not one of tensorboard, wandb"),
        ({"text": "x"}, ["--lora", "rank=4"], "--lora 'rank=4' is not valid; write 16, r=16"),
        ({"text": "x"}, ["--lora", "r=4,targets=qq"], "--lora r=4,alpha=8,dropout=0,targets=qq: "),
        (None, [], "--data d.jsonl has no rows"),
        ("{", [], "'d.jsonl' cannot be read"),
    ],
)  # fmt: skip
def test_invalid_data_options_are_rejected(row: Any, options: list[str], message: str, tmp_path: Path) -> None:
    """The message is one line, and nothing but prepared data is written."""
    make_model(tmp_path / "m")
    (tmp_path / "d.jsonl").write_text(row if isinstance(row, str) else "" if row is None else json.dumps(row) + "\n")
    ended = run_here(*TRAIN, "--data", "d.jsonl", *options, "--out", "o")
    assert ended.status == 2, ended.errors
    assert message in " ".join(ended.errors.split())
    assert {found.name for found in tmp_path.glob("o/*")} <= ({"data"} if "--lora" in options else set())


def test_chat_data_require_chat_template(tmp_path: Path) -> None:
    """Base models have no chat template."""
    make_model(tmp_path / "m", template=None)
    write_jsonl(tmp_path / "d.jsonl", chats(3))
    ended = run_here(*TRAIN, "--data", "d.jsonl", "--out", "o")
    assert ended.status == 2
    said = " ".join(ended.errors.split())
    assert "no chat template" in said
    assert "--tokenizer" in said


def test_plain_text_supports_evaluation_but_not_epochs(tmp_path: Path) -> None:
    """`--epochs` counts sequences, but plain text is sampled at random positions."""
    (tmp_path / "t.txt").write_text("the sea and the wind " * 100)
    plain = ["train", "--model", "tiny", "--seq", "32", "--batch-tokens", "64", "--host-memory", "1MiB", "--steps", "2"]
    ended = run_here(*[w for w in plain if w not in ("--steps", "2")], "--data", "t.txt", "--epochs", "2", "--out", "o")
    assert "--epochs 2 requires a dataset" in " ".join(ended.errors.split())
    found = run_here(*plain, "--data", "t.txt", "--eval-data", "t.txt", "--json", "--out", "o").summary
    assert [step for step, _ in found["eval_losses"]] == [2]
