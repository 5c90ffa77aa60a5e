"""Tests of the `infinity train` command."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from infinity.telemetry import exporter
from infinity.telemetry.metrics import PARTS
from infinity_tools.signals import StopRequest
from support.command import SMALL, at_step, run_here, run_ranks
from support.fine_tuning import make_model, write_jsonl

KEYS = {
    "run_id", "parameters", "world_size", "steps", "tokens_per_step", "losses", "step_seconds", "tokens_per_second",
    "state_bytes", "host_memory_bytes", "peak_rss_bytes", "io_engine", "update_schedule", "nvme_read_bytes_per_step",
    "nvme_written_bytes_per_step", "predicted_read_bytes_per_step", "predicted_written_bytes_per_step",
    "stall_seconds_per_step", "compute_seconds_per_step", "nvme_paths", "transfer_seconds_per_step",
    "nvme_bandwidth_bytes_per_second", "predicted_transfer_seconds_per_step", "predicted_step_seconds", "recipe",
}  # fmt: skip


def losses(summary: dict[str, Any]) -> list[float]:
    """Return the losses without their steps."""
    return [loss for _, loss in summary["losses"]]


def test_train_writes_summary_and_plot_and_learns(tmp_path: Path) -> None:
    done = run_here(
        *SMALL, "--max_steps", "12", "--learning_rate", "3e-3", "--offload.storage.engine", "threads", "--out", "o",
        picture=True,
    )  # fmt: skip
    assert done.status == 0, done.errors
    assert "peak memory" in done.output
    assert "step 12/12" in done.errors
    assert not re.search("Warning|parallel_mode|multiple devices|departs", done.errors), done.errors
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    assert set(summary) >= KEYS
    assert losses(summary)[-1] < losses(summary)[0] - 0.5
    assert summary["steps"] == len(summary["losses"]) == len(summary["step_records"]) == 12
    assert (summary["tokens_per_step"], summary["io_engine"]) == (128, "threads")
    assert summary["host_memory_bytes"] == 1 << 20
    # Averaged over ten steps; the first completes transfers of the step before. schedule/test_traffic.py is exact.
    assert summary["nvme_read_bytes_per_step"] == pytest.approx(summary["predicted_read_bytes_per_step"], rel=0.05)
    assert summary["nvme_written_bytes_per_step"] == pytest.approx(
        summary["predicted_written_bytes_per_step"], rel=0.05
    )
    alone = summary["predicted_read_bytes_per_step"] + summary["predicted_written_bytes_per_step"]
    alone /= summary["nvme_bandwidth_bytes_per_second"]
    assert alone == pytest.approx(summary["predicted_transfer_seconds_per_step"])
    for record in summary["step_records"]:
        assert sum(record[f"{part}_seconds"] for part in PARTS) == pytest.approx(record["seconds"], rel=0.02)
    means = sum(summary[f"{part}_seconds_per_step"] for part in PARTS)
    assert means == pytest.approx(fmean(record["seconds"] for record in summary["step_records"][2:]), rel=0.02)
    assert (tmp_path / "o/summary.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (tmp_path / "o/steps.jsonl").read_text().splitlines()]
    assert [[line["step"], line["loss"]] for line in lines] == summary["losses"]
    assert {"learning_rate", "seconds", "tokens_per_second", "nvme_read_bytes", "stall_share"} <= {*lines[0]}
    assert summary["checkpointed_step"] == 12


def test_resumed_run_equals_uninterrupted_run() -> None:
    """The recipe is stored, so `--resume` needs only the folder."""
    few = [*SMALL, "--lr_scheduler_type", "constant", "--max_grad_norm", "1", "--json"]
    straight = run_here(*few, "--max_steps", "6", "--out", "a").summary
    first = run_here(*few, "--max_steps", "4", "--out", "b").summary
    second = run_here("train", "--resume", "--out", "b", "--max_steps", "6", "--json").summary
    assert (second["first_step"], second["run_id"]) == (5, first["run_id"])
    assert losses(first) + losses(second) == losses(straight)


def test_recipe_repeats_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds in any folder, and lists only what differs from the defaults of TRL and infinity."""
    (tmp_path / "text").write_bytes(bytes(range(256)) * 40)
    first = run_here(*SMALL, "--data", "text", "--max_steps", "2", "--out", "a", "--json").summary
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = run_here("train", tmp_path / "a/recipe.yaml", "--out", "b", "--json").summary
    assert losses(again) == losses(first)
    assert again["recipe"].pop("output_dir") == str(tmp_path / "elsewhere/b")
    assert first["recipe"].pop("output_dir") == str(tmp_path / "a")
    assert again["recipe"] == first["recipe"]
    assert first["recipe"]["data"] == [str(tmp_path / "text")]
    assert {"learning_rate", "offload.memory.host_bytes"} <= {*first["recipe"]}
    assert "adam_beta1" not in first["recipe"]


def test_two_ranks_match_one_rank(tmp_path: Path) -> None:
    """The state is checkpointed, and the traces contain both processes and the bytes of the summary."""
    alone = run_here(*SMALL, "--max_steps", "4", "--json", "--out", "a").summary
    options = ["--per_device_train_batch_size", "2", "--max_steps", "4", "--out", "b", "--save_steps", "3"]
    done = run_ranks(*SMALL, *options, "--trace", "t.json")
    assert done.status == 0, done.errors
    both = json.loads((tmp_path / "b/summary.json").read_text())
    assert (both["world_size"], both["parameters"]) == (2, alone["parameters"])
    assert both["tokens_per_step"] == alone["tokens_per_step"]
    assert losses(both) == pytest.approx(losses(alone), rel=1e-3)
    assert both["host_memory_bytes"] == 2 * alone["host_memory_bytes"]
    assert run_here("store", "verify", "b/nvme", "--json").status == 0
    trees = [json.loads((tmp_path / name).read_text()) for name in ("t.json", "t.rank1.json")]
    events = [event for tree in trees for event in tree["traceEvents"]]
    assert {event["pid"] for event in events} == {0, 1}
    for op, key in (("read", "nvme_read_bytes_total"), ("write", "nvme_written_bytes_total")):
        assert sum(e["args"]["bytes"] for e in events if e.get("cat") == f"nvme0 {op}") == both[key]


def test_gradient_accumulation_does_not_change_losses_or_traffic() -> None:
    """Micro-batches run layer by layer."""
    options = [*SMALL, "--bf16", "false", "--max_steps", "4", "--json"]
    full = run_here(*options, "--out", "a").summary
    parts = ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "4"]
    sliced = run_here(*options, *parts, "--out", "b").summary
    assert (full["micro_batches"], sliced["micro_batches"]) == (1, 4)
    assert full["tokens_per_step"] == sliced["tokens_per_step"]
    assert losses(sliced) == pytest.approx(losses(full), rel=1e-4)
    assert sliced["update_schedule"] == "in_backward"
    for op in ("read", "written"):
        assert sliced[f"predicted_{op}_bytes_per_step"] == full[f"predicted_{op}_bytes_per_step"] > 0


def questions(file: Path, count: int = 16) -> None:
    """Write a dataset of prompts and completions, all of one length."""
    rows = [{"prompt": f"What is {n:03}+{n:03}? ", "completion": f"{2 * n:03}"} for n in range(count)]
    write_jsonl(file, rows)


def test_pretrained_model_equals_sft_trainer_in_memory(tmp_path: Path) -> None:
    """The defaults suit fine-tuning: one epoch at 2e-5, with loss on completions only."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    make_model(tmp_path / "model", template=None)
    questions(tmp_path / "qa.jsonl")
    more = ["--bf16", "false", "--packing", "false", "--per_device_train_batch_size", "4", "--host-memory", "1MiB"]
    found = run_here("train", "--model", "model", "--data", "qa.jsonl", *more, "--out", "o", "--json").summary
    args = SFTConfig(
        str(tmp_path / "memory"), per_device_train_batch_size=4, num_train_epochs=1, learning_rate=2e-5, bf16=False,
        logging_steps=1, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32), args=args,
        train_dataset=load_dataset("json", data_files=str(tmp_path / "qa.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(tmp_path / "model"),
    )  # fmt: skip
    trainer.train()
    expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses(found) == pytest.approx(expected, rel=1e-5)
    assert found["steps"] == 4


def test_adapters_are_trained_on_base_in_its_dtype(tmp_path: Path) -> None:
    """A frozen bf16 parameter takes 2 bytes on NVMe. The run is resumed and exported as adapters."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = make_model(tmp_path / "model", template=None, dtype="bfloat16")
    questions(tmp_path / "qa.jsonl")
    command = ["train", "--model", "model", "--data", "qa.jsonl", "--host-memory", "1MiB", "--peft.r", "4", "--json"]
    command += ["--per_device_train_batch_size", "1", "--bf16", "true", "--learning_rate", "1e-2"]
    found = run_here(*command, "--max_steps", "2", "--max_length", "32", "--out", "o").summary
    assert found["dtype"] == "bf16"
    trained = found["parameters"] - base.num_parameters()
    assert 0 < trained < 20_000
    assert found["state_bytes"] < 2 * base.num_parameters() + 16 * trained + 64 * 1024
    assert run_here("train", "--resume", "--out", "o", "--max_steps", "3", "--json").summary["first_step"] == 3
    assert run_here("export", "o/nvme", "--out", "adapter").status == 0
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("model"), "adapter")
    assert any(value.any() for name, value in loaded.named_parameters() if "lora_B" in name)
    assert run_here("export", "o/nvme", "--merge", "--out", "merged").status == 0
    expected, found = (
        loaded.merge_and_unload().state_dict(),
        AutoModelForCausalLM.from_pretrained("merged").state_dict(),
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) and value.dtype == torch.bfloat16 for name, value in expected.items())
    assert any(not torch.equal(found[name], value) for name, value in base.state_dict().items())
    assert (tmp_path / "merged/tokenizer.json").is_file()


def test_export_has_dtype_and_tokenizer_of_the_run(tmp_path: Path) -> None:
    """The weights have the dtype that they were loaded in, and the tokenizer is the one given by `--tokenizer`."""
    from safetensors import safe_open
    from transformers import AutoTokenizer

    make_model(tmp_path / "model", template=None, dtype="bfloat16")
    questions(tmp_path / "qa.jsonl")
    other = AutoTokenizer.from_pretrained(tmp_path / "model")
    other.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    other.save_pretrained(tmp_path / "other")
    command = ["train", "--model", "model", "--data", "qa.jsonl", "--tokenizer", "other", "--host-memory", "1MiB"]
    run_here(*command, "--per_device_train_batch_size", "4", "--max_steps", "1", "--bf16", "false", "--out", "o")
    assert run_here("export", "o/nvme", "--out", "hf").status == 0
    with safe_open(tmp_path / "hf/model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == "bfloat16"
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template == other.chat_template


def test_evaluation_stops_early_and_keeps_best_checkpoint(tmp_path: Path) -> None:
    make_model(tmp_path / "model", template=None)
    questions(tmp_path / "qa.jsonl")
    command = ["train", "--model", "model", "--data", "qa.jsonl", "--eval_data", "qa.jsonl", "--host-memory", "2MiB"]
    command += ["--learning_rate", "0", "--eval_steps", "1", "--early_stopping_patience", "2"]
    command += ["--per_device_train_batch_size", "4", "--num_train_epochs", "9", "--bf16", "false", "--json"]
    found = run_here(*command, "--out", "o").summary
    assert found["steps"] == 3, "the loss does not improve after step 1"
    assert [step for step, _ in found["eval_losses"]] == [1, 2, 3]
    state = json.loads((tmp_path / "o/checkpoint-3/trainer_state.json").read_text())
    assert state["best_global_step"] == 1
    assert " --step 1 " in found["next"]["export"]
    found = run_here(*command, "--save_steps", "2", "--out", "p").summary
    assert (found["steps"], found["checkpointed_step"]) == (3, 3), "the last step is saved"
    assert " --step 3 " in found["next"]["export"], "step 1 was not saved"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_trace_is_written_after_signal(number: signal.Signals, tmp_path: Path) -> None:
    """The trace is valid JSON and contains complete steps."""
    with at_step(3, lambda: os.kill(os.getpid(), number)):
        ended = run_here(*SMALL, "--max_steps", "100000", "--out", "p", "--trace", "u.json")
    assert ended.status == 128 + number
    spans = [event for event in json.loads((tmp_path / "u.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in spans if event["name"].startswith("step ")] == ["step 1", "step 2", "step 3"]


def test_metrics_match_summary_until_a_signal_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Container runtimes send SIGKILL ten seconds after SIGTERM. The finished run exits with status 0."""
    ports: list[int] = []
    texts: list[str] = []
    timers: list[threading.Timer] = []
    serve, sleep = exporter.serve, StopRequest.sleep

    @contextmanager
    def serving(*arguments: Any) -> Iterator[Any]:
        with serve(*arguments) as server:
            ports.append(server.port)
            yield server

    def read() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/metrics", timeout=60) as answer:
            texts.append(answer.read().decode())

    def waiting(stop: StopRequest, seconds: float) -> None:
        read()
        timers.append(threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)))
        timers[0].start()
        sleep(stop, seconds)

    monkeypatch.setattr(exporter, "serve", serving)
    monkeypatch.setattr(StopRequest, "sleep", waiting)
    command = [*SMALL, "--max_steps", "3", "--max_grad_norm", "1", "--out", "o"]
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # a late signal must not end this process
    try:
        with at_step(2, read):
            ended = run_here(*command, "--metrics-port", "0", "--metrics-linger", "600")
    finally:
        for timer in timers:
            timer.join()
        signal.signal(signal.SIGTERM, before)
    assert ended.status == 0
    assert f":{ports[0]}/metrics" in ended.errors
    assert "is checkpointed in" in ended.output
    first, last = texts
    assert re.search(r'^infinity_steps_total{rank="0",run=".+"} [1-9]', first, re.MULTILINE)
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    for op, key in (("read", "nvme_read_bytes_total"), ("write", "nvme_written_bytes_total")):
        values = re.findall(rf'^infinity_io_bytes_total{{.*op="{op}".*}} (\S+)$', last, re.MULTILINE)
        assert sum(map(float, values)) == summary[key] > 0
    shown = {
        name: float(re.search(rf"^infinity_training_{name}{{.*}} (\S+)$", last, re.MULTILINE)[1])
        for name in ("loss", "gradient_norm", "tokens_total")
    }
    assert shown["loss"] == summary["losses"][-1][1]
    assert shown["tokens_total"] == summary["steps"] * summary["tokens_per_step"]
    assert shown["gradient_norm"] > 0
