"""Tests of the `infinity train` command."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from statistics import fmean

import pytest
import torch

from infinity.telemetry.metrics import PARTS
from support.command import SMALL, environment, run_here, run_process, training

KEYS = {
    "run_id", "parameters", "world_size", "steps", "tokens_per_step", "losses", "step_seconds", "tokens_per_second",
    "state_bytes", "host_memory_bytes", "peak_rss_bytes", "io_engine", "update_schedule", "nvme_read_bytes_per_step",
    "nvme_written_bytes_per_step", "predicted_read_bytes_per_step", "predicted_written_bytes_per_step",
    "stall_seconds_per_step", "compute_seconds_per_step", "nvme_paths", "transfer_seconds_per_step",
    "nvme_bandwidth_bytes_per_second", "predicted_transfer_seconds_per_step", "predicted_step_seconds",
}  # fmt: skip


def test_train_writes_summary_and_plot_and_learns(tmp_path):
    done = run_here(*SMALL, "--steps", "12", "--lr", "3e-3", "--out", "o", picture=True)
    assert done.status == 0, done.errors
    assert "peak memory" in done.output
    assert "step 12/12" in done.errors
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    assert set(summary) >= KEYS
    assert summary["losses"][-1] < summary["losses"][0] - 0.5
    assert summary["steps"] == len(summary["losses"]) == len(summary["step_records"]) == 12
    assert summary["host_memory_bytes"] == 1 << 20
    # Averaged over ten steps; the first completes transfers of the step before. schedule/test_traffic.py is exact.
    assert summary["nvme_read_bytes_per_step"] == pytest.approx(summary["predicted_read_bytes_per_step"], rel=0.05)
    assert summary["nvme_written_bytes_per_step"] == pytest.approx(
        summary["predicted_written_bytes_per_step"], rel=0.05
    )
    assert "planned step" in done.output
    alone = summary["predicted_read_bytes_per_step"] + summary["predicted_written_bytes_per_step"]
    alone /= summary["nvme_bandwidth_bytes_per_second"]
    assert alone == pytest.approx(summary["predicted_transfer_seconds_per_step"])
    # The time in addition to the transfers was measured in some of the steps.
    steps = sum(record["seconds"] for record in summary["step_records"])
    assert alone <= summary["predicted_step_seconds"] < alone + steps
    assert (tmp_path / "o/summary.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (tmp_path / "o/steps.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == summary["losses"]
    assert summary["checkpointed_step"] == 12


def test_steps_log_contains_learning_rate_of_each_step(tmp_path):
    """It is not the rate of the next step, even after resuming."""
    few = [*SMALL, "--lr", "4e-3", "--warmup-steps", "3", "--lr-steps", "7", "--checkpoint-every", "2", "--out", "o"]
    assert run_here(*few, "--steps", "4").status == 0
    assert run_here(*few, "--steps", "7", "--resume").status == 0
    rows = [json.loads(line) for line in (tmp_path / "o/steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 8))
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert [row["lr"] for row in rows] == pytest.approx([4e-3 * factor for factor in (0.25, 0.5, 0.75, *cosine)])


def test_step_parts_add_up_to_step_time(tmp_path):
    """They match within 2 % in every step and on average."""
    summary = run_here(*SMALL, "--steps", "6", "--max-grad-norm", "1", "--json", "--out", "o").summary
    for record in summary["step_records"]:
        assert sum(record[f"{part}_seconds"] for part in PARTS) == pytest.approx(record["seconds"], rel=0.02)
    means = sum(summary[f"{part}_seconds_per_step"] for part in PARTS)
    assert means == pytest.approx(fmean(record["seconds"] for record in summary["step_records"][2:]), rel=0.02)


def test_trace_is_written_after_ctrl_c(tmp_path):
    """The trace is valid JSON and contains complete steps."""
    with training(tmp_path, *SMALL, "--steps", "100000", "--out", "p", "--trace", "u.json") as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 128 + signal.SIGINT
    spans = [event for event in json.loads((tmp_path / "u.json").read_text())["traceEvents"] if event["ph"] == "X"]
    steps = [event["name"] for event in spans if event["name"].startswith("step ")]
    assert steps == [f"step {number}" for number in range(1, len(steps) + 1)]


def test_resumed_run_matches_uninterrupted_run_bitwise():
    straight = run_here(*SMALL, "--steps", "10", "--json", "--out", "a").summary
    first = run_here(
        *SMALL, "--steps", "6", "--lr-steps", "10", "--checkpoint-every", "4", "--json", "--out", "b"
    ).summary
    second = run_here(*SMALL, "--steps", "10", "--resume", "--json", "--out", "b").summary
    assert second["first_step"] == 7
    assert second["run_id"] == first["run_id"]
    assert first["losses"] + second["losses"] == straight["losses"]
    again = run_here(*SMALL, "--steps", "6", "--resume", "--out", "b")
    assert again.status == 0, "resuming a finished run is not an error"
    assert "finished at step 10" in again.errors


def test_json_prints_only_the_summary(tmp_path):
    done = run_process(
        tmp_path, *SMALL, "--steps", "2", "--json", "--out", "o", "--dtype", "bf16", "--engine", "threads"
    )
    assert done.summary == json.loads((tmp_path / "o/summary.json").read_text())
    assert done.errors == ""
    assert (done.summary["dtype"], done.summary["io_engine"]) == ("bf16", "threads")


def test_two_ranks_match_one_rank(tmp_path):
    alone = run_here(*SMALL, "--steps", "4", "--json", "--out", "a").summary
    options = ["--steps", "4", "--out", "b", "--checkpoint-every", "3", "--trace", "t.json"]
    done = run_process(tmp_path, *SMALL, *options, ranks=2)
    assert done.status == 0, done.errors
    both = json.loads((tmp_path / "b/summary.json").read_text())
    assert (both["world_size"], both["parameters"]) == (2, alone["parameters"])
    assert both["losses"] == pytest.approx(alone["losses"], rel=1e-3)
    assert both["host_memory_bytes"] == 2 * alone["host_memory_bytes"]
    verified = run_here("store", "verify", "b/nvme", "--json")
    assert verified.status == 0
    assert json.loads(verified.output)["pages"] > 0
    # The traces contain two processes and the bytes of the summary.
    trees = [json.loads((tmp_path / name).read_text()) for name in ("t.json", "t.rank1.json")]
    events = [event for tree in trees for event in tree["traceEvents"]]
    assert {event["pid"] for event in events} == {0, 1}
    for op, key in (("read", "nvme_read_bytes_total"), ("write", "nvme_written_bytes_total")):
        assert sum(e["args"]["bytes"] for e in events if e.get("cat") == f"nvme0 {op}") == both[key]


def test_micro_batches_do_not_change_losses_or_traffic():
    options = [*SMALL, "--dtype", "fp32", "--steps", "4"]
    full_batch = run_here(*options, "--json", "--out", "a").summary
    done = run_here(*options, "--micro-tokens", "32", "--activation-checkpointing", "--out", "b")
    assert "128 tokens, 4 micro-batches per rank" in done.output
    sliced = json.loads(Path("b/summary.json").read_text())
    assert (full_batch["micro_batches"], sliced["micro_batches"]) == (1, 4)
    by_tokens = run_here(*options, "--loss-tokens", "10", "--json", "--out", "c").summary
    assert by_tokens["losses"] == pytest.approx(full_batch["losses"], rel=1e-4)
    assert by_tokens["losses"] != full_batch["losses"]
    assert sliced["losses"] == pytest.approx(full_batch["losses"], rel=1e-4)
    assert sliced["update_schedule"] == "in_backward"
    for op in ("read", "written"):
        key = f"predicted_{op}_bytes_per_step"
        assert sliced[key] == full_batch[key] > 0


def test_first_loss_of_pretrained_model_matches_transformers(tmp_path):
    import transformers

    from infinity_tools.data import Batches, Corpus

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=300
    )
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "pretrained")
    (tmp_path / "text").write_bytes(bytes(range(256)) * 40)
    tokens = Batches(Corpus.of([tmp_path / "text"]), sequences=4, length=32, seed=7, rank=0, world_size=1).at(0)[
        "input_ids"
    ]
    with torch.no_grad():
        expected = model(input_ids=tokens, labels=tokens).loss.item()
    options = ["--model", "pretrained", "--data", "text", "--seed", "7", "--dtype", "fp32", "--steps", "2"]
    found = run_here(*SMALL, *options, "--json", "--out", "o").summary
    assert found["losses"][0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--nvme", "missing/run"], 2, "'missing' is not a folder"),
        (["--data", "missing"], 2, "--data 'missing'"),
        (["--model", "tinny"], 2, "did you mean tiny?"),
        (["--batch-tokens", "100"], 2, "try 96"),
        (["--micro-tokens", "48"], 2, "possible: 32, 64, 128"),
        (["--micro-tokens", "96"], 2, "the 128 tokens per rank"),
        (["--host-memory", "64KiB"], 2, "the host cache is too small"),
        (["--resume"], 2, "no checkpoint to resume from"),
        (["--seq", "8192", "--batch-tokens", "8192"], 2, "4096 positions"),
        (["--lr", "1e30", "--warmup-steps", "0", "--steps", "4"], 1, "try a lower --lr"),
    ],
)
def test_invalid_options_are_reported_without_traceback(options, status, message):
    done = run_here(*SMALL, "--steps", "1", "--out", "o", *options)
    assert done.status == status, done.errors
    assert message in done.errors
    assert "Traceback" not in done.errors


def test_unknown_setting_suggests_nearest_setting(tmp_path):
    (tmp_path / "settings.toml").write_text('[memory]\nhost_byte = "1MiB"\n')
    done = run_here(*SMALL, "--config", "settings.toml")
    assert done.status == 2
    assert "did you mean memory.host_bytes?" in done.errors


def test_metrics_match_summary_after_sigterm(tmp_path):
    command = [
        sys.executable,
        "-m",
        "infinity_tools",
        *SMALL,
        "--steps",
        "100000",
        "--out",
        "o",
        "--max-grad-norm",
        "1",
    ]
    with subprocess.Popen(
        [*command, "--metrics-port", "0", "--metrics-linger", "600", "--checkpoint-every", "100000"],
        cwd=tmp_path, env=environment(tmp_path / "tmp"), stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            address = re.search(r"http://\S+", process.stderr.readline())
            assert address is not None
            while "step 1/" not in process.stderr.readline():
                assert process.poll() is None
            assert re.search(r'^infinity_steps_total{rank="0",run=".+"} [1-9]', _get(address[0]), re.MULTILINE)
            process.send_signal(signal.SIGTERM)
            _wait_for(tmp_path / "o/summary.json", process)
            summary = json.loads((tmp_path / "o/summary.json").read_text())
            text = _get(address[0])
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert summary["interrupted"]
    for op, key in (("read", "nvme_read_bytes_total"), ("write", "nvme_written_bytes_total")):
        values = re.findall(rf'^infinity_io_bytes_total{{.*op="{op}".*}} (\S+)$', text, re.MULTILINE)
        assert sum(map(float, values)) == summary[key] > 0
    shown = {
        name: float(re.search(rf"^infinity_training_{name}{{.*}} (\S+)$", text, re.MULTILINE)[1])
        for name in ("loss", "learning_rate", "gradient_norm", "tokens_total")
    }
    last = json.loads((tmp_path / "o/steps.jsonl").read_text().splitlines()[-1])
    assert (shown["loss"], shown["learning_rate"]) == (last["loss"], last["lr"])
    assert shown["tokens_total"] == summary["steps"] * summary["tokens_per_step"]
    assert shown["gradient_norm"] > 0
    assert (
        json.loads(run_here("store", "ls", "o/nvme", "--json").output)[0]["checkpoints"][0]["step"] == summary["steps"]
    )


def test_preset_list_and_version():
    listed = run_here("train", "--model", "list").output
    assert re.search(r"llama-100m +113\.7 M +256", listed)
    assert re.search(r"gpt2-354m +354\.8 M +50257", listed)
    assert json.loads(run_here("version", "--json").output)["infinity"]


def _get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return answer.read().decode()


def _wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 300
    while not file.exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
