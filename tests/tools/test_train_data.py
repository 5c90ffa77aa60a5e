"""`infinity train` on data sets: the batches, the loss on them, and how a run goes on in them."""

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


def test_clipping_accumulation_and_micro_batches(tmp_path: Path) -> None:
    """Clipped as in memory, bit for bit; slices of the batch give the same up to the order of sums."""
    make_model(tmp_path / "m")
    write_jsonl(tmp_path / "d.jsonl", chats(60))
    train = [*TRAIN, "--data", "d.jsonl", "--steps", "4"]
    clipped = run_here(*train, "--max-grad-norm", "0.5", "--json", "--out", "o").summary
    assert clipped["losses"] == in_memory(tmp_path / "o", 4, clip=0.5)
    rows = [json.loads(line) for line in (tmp_path / "o/steps.jsonl").read_text().splitlines()]
    assert all(row["grad_norm"] > 0 and row["stall_seconds"] >= 0 for row in rows)
    sliced = run_here(*train, "--micro-tokens", "64", "--json", "--out", "p").summary
    assert sliced["losses"] == pytest.approx(in_memory(tmp_path / "p", 4), rel=1e-4)


def test_a_run_goes_on_at_the_next_sample(tmp_path: Path) -> None:
    """Without its options, over the end of an epoch, to the bit; and no earlier than where it was."""
    make_model(tmp_path / "m")
    write_jsonl(tmp_path / "d.jsonl", chats(30))
    whole = [*TRAIN, "--data", "d.jsonl", "--eval-data", "d.jsonl", "--eval-every", "2", "--epochs", "3", "--json"]
    straight = run_here(*whole, "--out", "a").summary
    sequences = len(prepared(tmp_path / "a"))
    assert sequences % 4, "an epoch ends within a batch"
    assert straight["steps"] == -(-3 * sequences // 4)
    until = straight["steps"] - sequences // 4
    cut = run_here(*[word for word in whole if word not in ("--epochs", "3")], "--steps", str(until),
                   "--lr-steps", str(straight["steps"]), "--out", "b").summary  # fmt: skip
    (tmp_path / "elsewhere").mkdir()
    for file in (tmp_path / "b/data").iterdir():
        file.unlink()  # it is made again, the same
    resumed = run_here("train", "--resume", "--out", "b", "--epochs", "3", "--host-memory", "1MiB", "--json").summary
    assert resumed["first_step"] == until + 1
    assert cut["losses"] + resumed["losses"] == straight["losses"]
    assert resumed["eval_losses"][-1] == straight["eval_losses"][-1]
    ended = run_here("train", "--resume", "--out", "b", "--host-memory", "1MiB")
    assert "finished" in ended.errors, "the checkpoint has --epochs 3"


def test_epochs_end_where_they_do_with_other_batches_and_other_data(tmp_path: Path) -> None:
    """Sequences count that were drawn, not steps: a run that goes on with larger batches draws more in each."""
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


def test_what_the_data_were_is_not_changed_unasked(tmp_path: Path) -> None:
    """Other data, another length and other labels are refused; --override begins with them."""
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
    """Leave the file as `.gz` only."""
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


def test_all_formats_are_the_same_data(tmp_path: Path) -> None:
    """By file and by folder; of several splits the one to train on, and one that is held out."""
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
    assert not is_data_set(tmp_path / "jsonl"), "a folder of text, in which there is a file of JSON too"


def test_ranks_share_the_batches(tmp_path: Path) -> None:
    """Two ranks that `--nproc` starts have the losses of one: every token counts alike, though their numbers differ."""
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
    assert done.errors.count("step 4/4  loss") == 1, "one rank speaks"


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
def test_what_cannot_be_trained_on_is_said(row: Any, options: list[str], message: str, tmp_path: Path) -> None:
    """In one line, before anything is written but the data that are ready."""
    make_model(tmp_path / "m")
    (tmp_path / "d.jsonl").write_text(row if isinstance(row, str) else "" if row is None else json.dumps(row) + "\n")
    ended = run_here(*TRAIN, "--data", "d.jsonl", *options, "--out", "o")
    assert ended.status == 2, ended.errors
    assert message in " ".join(ended.errors.split())
    assert {found.name for found in tmp_path.glob("o/*")} <= ({"data"} if "--lora" in options else set())


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    """What to do is said; the base model itself has none."""
    make_model(tmp_path / "m", template=None)
    write_jsonl(tmp_path / "d.jsonl", chats(3))
    ended = run_here(*TRAIN, "--data", "d.jsonl", "--out", "o")
    assert ended.status == 2
    said = " ".join(ended.errors.split())
    assert "no chat template" in said
    assert "--tokenizer" in said


def test_plain_text_takes_no_options_of_data_sets_and_can_be_held_out(tmp_path: Path) -> None:
    """`--epochs` counts sequences, which random places of a text are not."""
    (tmp_path / "t.txt").write_text("the sea and the wind " * 100)
    plain = ["train", "--model", "tiny", "--seq", "32", "--batch-tokens", "64", "--host-memory", "1MiB", "--steps", "2"]
    ended = run_here(*[w for w in plain if w not in ("--steps", "2")], "--data", "t.txt", "--epochs", "2", "--out", "o")
    assert "--epochs 2 requires a dataset" in " ".join(ended.errors.split())
    found = run_here(*plain, "--data", "t.txt", "--eval-data", "t.txt", "--json", "--out", "o").summary
    assert [step for step, _ in found["eval_losses"]] == [2]
