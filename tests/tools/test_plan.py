"""Tests of the `infinity plan` command: output, files and options."""

from __future__ import annotations

import json
import pkgutil
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.content.format import Role
from infinity.daemon_client import NodeDaemon
from support.command import ROOT, run_here
from support.plan_page import SAMPLE

LARGE = (
    "plan --parameters 70e9 --layers 80 --hidden 8192 --vocabulary 128256 --host-memory 256GiB "
    "--nvme-bandwidth 7e9/5e9 --nvme-count 4 --gpu h100 --batch-tokens 32768"
)
QUICK = (
    "plan --parameters 3e8 --layers 8 --hidden 1536 --vocabulary 16000 --host-memory 512MiB "
    "--nvme-bandwidth 7e9/5e9 --gpu h100 --update-cores 8 --batch-tokens 8192"
)


def planned(line: str) -> dict[str, Any]:
    """Return the JSON output of a command line."""
    done = run_here(*shlex.split(line), "--json")
    answer = json.loads(done.output)
    assert done.status == (0 if answer["fits"] else 1)
    return answer


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement of the drive, which takes two seconds."""
    rates = {str(tmp_path): dict.fromkeys(("read", "write", "mixed"), 1e9)}
    monkeypatch.setattr("infinity_tools.plan.plan_drives.quick_rates", lambda names: rates)


def computed_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns the result of its first call, whatever its arguments."""
    results: list[Any] = []

    def call(*arguments: Any) -> Any:
        if not results:
            results.append(function(*arguments))
        return results[0]

    return call


def test_example_of_help_and_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    """It plans 70e9 parameters without allocating them. The guide shows it with 8 cores, in 80 columns."""
    text = " ".join(run_here("plan", "-h").output.replace("│", " ").split())
    assert f"infinity {LARGE}" in text
    assert sorted(SAMPLE) == sorted(shlex.split(f"{LARGE} --update-cores 8"))
    for place in ("infinity_tools.plan.inputs.plan_of", "infinity.estimate.advice.best_changes"):
        monkeypatch.setattr(place, computed_once(pkgutil.resolve_name(place)))
    monkeypatch.setenv("COLUMNS", "80")
    done = run_here(*SAMPLE)
    assert done.status == 0
    page = (ROOT / "docs/how-to/plan.md").read_text()
    sample = page.split("<!-- sample -->\n```\n")[1].split("\n```\n")[0]
    assert [line.rstrip() for line in done.output.splitlines()] == sample.splitlines()
    assert page.count("# Settings for infinity") == 1
    assert f"`infinity {shlex.join(SAMPLE)}` prints:" in page.replace("\n", " ")
    found = planned(LARGE)
    assert found["fits"]
    assert found["model"]["parameters"] == pytest.approx(70e9, rel=0.01)
    assert found["host_cache"]["bytes"] <= 256 << 30
    assert found["seconds"]["step"] >= max(found["seconds"]["computation"]["busy"], found["seconds"]["reads"])
    assert found["read_bytes_per_step"] == sum(found["read_bytes"].values())
    assert found["bytes"].keys() == {role.value for role in Role}
    infinity.load_config(tomllib.loads(found["toml"]))


def test_report_fits_any_terminal_width(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    """No number is truncated; only the settings, which are meant to be copied, may be wider."""
    parts = ("state per rank", "host cache: ", "time per step", "tokens per second", "changes that would help most")
    for place in ("infinity_tools.plan.inputs.plan_of", "infinity.estimate.advice.best_changes"):
        monkeypatch.setattr(place, computed_once(pkgutil.resolve_name(place)))
    for width in (60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        done = run_here(*QUICK.split(), "--gpu-memory", "4GiB")  # with more memory, there are no changes to suggest
        report, _, toml = done.output.partition("# Settings for infinity")
        with subtests.test(width=width):
            assert done.status == 0
            assert max(map(len, report.splitlines())) <= width
            assert "…" not in report
            assert [part for part in parts if part not in " ".join(report.split())] == []
            assert 'host_bytes = "512MiB"' in toml


@pytest.mark.usefixtures("measured")
def test_out_files_match_json_and_actual_run(tmp_path: Path) -> None:
    """A run with the written settings transfers and stores the planned bytes."""
    out = tmp_path / "plan"
    said = planned(f"plan --model tiny --host-memory 2MiB --nvme {tmp_path} --tflops 0.05 --batch-tokens 512 --seq 64 "
                   f"--retained-checkpoints 2 --update in_forward --out {out}")  # fmt: skip
    assert json.loads((out / "plan.json").read_text()) == said
    assert (out / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "infinity.toml").read_text() == said["toml"]
    settings = tomllib.loads(said["toml"])
    assert settings == {
        "storage": {"paths": [str(tmp_path)]},
        "memory": {"host_bytes": "2MiB"},
        "update": {"schedule": "in_forward"},
        "run": {"retained_checkpoints": 2},
    }
    again = planned(f"plan --model tiny --config {out / 'infinity.toml'} --nvme {tmp_path} --tflops 0.05 "
                    "--batch-tokens 512 --seq 64 --no-changes")  # fmt: skip
    assert again["toml"] == said["toml"]
    train = ("train", "--model", "tiny", "--bf16", "true", "--per_device_train_batch_size", "8", "--max_length", "64")
    more = ("--max_steps", "3", "--gradient_checkpointing", "--save_strategy", "no", "--out", tmp_path / "o", "--json")
    trained = run_here(*train, "--config", out / "infinity.toml", *more)
    assert trained.summary["predicted_read_bytes_per_step"] == said["read_bytes_per_step"]
    assert trained.summary["predicted_written_bytes_per_step"] == said["written_bytes_per_step"]
    assert trained.summary["stored_bytes"] == said["drive_bytes"]


def test_table_shows_state_on_accelerator() -> None:
    """Columns for device memory are shown only if state is kept there."""
    line = "plan --model llama-1b --gpu h100 --host-memory 4GiB --nvme-bandwidth 7GB/5GB --no-changes"
    words = run_here(*line.split()).output.split()
    text = " ".join(words)
    assert "size in host memory on device read written" in text
    for row in (
        "weights 1.92 GiB 0 B 1.92 GiB 0 B 0 B", "master, moments 11.5 GiB 0 B 11.5 GiB 0 B 0 B",
        "gradients: 3.83 GiB, consumed in backward, not stored", "total 13.4 GiB 0 B 13.4 GiB 0 B 0 B",
        "I/O mostly overlapped at any batch size",
    ):  # fmt: skip
        assert row in text
    said = planned(line)
    assert said["device"]["gpu_resident_bytes"]["param"] == said["bytes"]["param"]
    partly = planned(f"{line} --gpu-memory 12GiB")
    assert 0 < partly["device"]["gpu_resident_bytes"]["update"] < partly["bytes"]["update"]
    assert sum(partly["device"]["gpu_resident_bytes"].values()) <= partly["device"]["bytes"]
    assert "size in host memory on device" not in " ".join(
        run_here(*QUICK.split(), "--gpu-memory", "3GiB").output.split()
    )


def test_cpu_is_measured_without_gpu_option(tmp_path: Path) -> None:
    """Three layers are trained briefly, and their files are removed."""
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    said = planned(f"plan --model tiny --host-memory 4MiB --nvme {nvme} --batch-tokens 128 --seq 64 --no-changes")
    assert said["seconds"]["computation"]["busy"] > 0
    assert said["seconds"]["updates"]["busy"] > 0
    assert any("three layers were measured" in line for line in said["assumptions"])
    assert list(nvme.iterdir()) == []


@pytest.mark.usefixtures("measured")
def test_daemon_bandwidth_and_wear_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the profile is invalid, the drive is measured instead."""
    profile = {"device": "d", "read": 3e9, "write": 2e9, "mixed": None}
    wear = {"device": "d", "left_bytes": 5 * 10**14}
    answer: dict[str, Any] = {"bandwidth": {str(tmp_path): profile}, "together": None, "wear": {str(tmp_path): wear}}
    monkeypatch.setattr(NodeDaemon, "ask", lambda self, op, **values: answer)
    line = f"plan --model tiny --host-memory 2MiB --nvme {tmp_path} --tflops 0.05 --batch-tokens 512 --no-changes"
    said = planned(line)
    assert said["machine"]["drives"]["read"] == 3e9
    assert said["machine"]["drives"]["endurance_bytes"] == 5e14
    assert said["drive_days"] > 0
    assert any("infinityd" in line for line in said["assumptions"])
    profile["read"] = "fast"
    assert any("measured for two seconds" in line for line in planned(line)["assumptions"])


@pytest.mark.usefixtures("measured")
def test_runtime_folder_selects_daemon(
    subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder comes from `--runtime-dir` or the settings file, and is kept in the planned settings."""
    asked: list[Path] = []
    monkeypatch.setattr(NodeDaemon, "ask", lambda self, op, **values: asked.append(self._socket.parent))
    config = tmp_path / "some.toml"
    config.write_text(f'[storage]\npaths = ["{tmp_path}"]\n[telemetry]\nruntime_dir = "{tmp_path}/run"\n')
    for options, telemetry in (
        (f"--nvme {tmp_path} --runtime-dir {tmp_path}/run", {"runtime_dir": f"{tmp_path}/run"}),
        (f"--config {config}", {"runtime_dir": f"{tmp_path}/run"}),
        (f"--nvme {tmp_path}", None),
    ):
        with subtests.test(options):
            asked.clear()
            line = f"plan --model tiny --host-memory 2MiB --tflops 0.05 --batch-tokens 512 --no-changes {options}"
            settings = tomllib.loads(planned(line)["toml"])
            assert settings["storage"]["paths"] == [str(tmp_path)]
            assert settings.get("telemetry") == telemetry
            assert (asked == [tmp_path / "run"]) == (telemetry is not None)


def test_summary_contains_the_bytes_per_copy(tmp_path: Path) -> None:
    """With LoRA, the first two copies contain the frozen base, and later ones do not."""
    config = tmp_path / "some.toml"
    config.write_text("[run]\ncopies = 1\n")
    line = f"{QUICK} --config {config} --no-changes"
    adapters, complete = planned(f"{line} --lora 8"), planned(line)
    assert 0 < adapters["copy"]["received"] < adapters["first_copy"]["received"] / 20
    assert 0 < complete["copy"]["received"] == complete["first_copy"]["received"]
    assert planned(QUICK)["copy"] == {"received": 0, "written": 0}
    for options, rows in (("", [True, False]), ("--lora 8", [True, True])):
        output = run_here(*shlex.split(f"{line} {options}")).output
        assert [row in output for row in ("copy of a checkpoint", "first two copies")] == rows


def test_plan_that_does_not_fit_exits_with_status_1(tmp_path: Path) -> None:
    """The report is still printed in full; a host cache that is too small for the model is an error instead."""
    done = run_here(*QUICK.split(), "--nvme-size", "1GB", "--no-changes")
    assert done.status == 1
    text = " ".join(done.output.split())
    assert "does not fit: " in text
    assert "954 MiB free" in text
    small = run_here(*QUICK.replace("512MiB", "64KiB").split())
    assert small.status == 2
    assert "the host cache is too small for this model" in small.errors


def test_micro_batches_default_to_memory_need() -> None:
    """An explicit number is used even if the run does not fit."""
    assert planned(f"{QUICK} --no-changes")["workload"]["micro_batches"] == 1
    assert planned(f"{QUICK} --no-changes --gpu-memory 2GiB")["workload"]["micro_batches"] == 2
    assert not planned(f"{QUICK} --no-changes --gpu-memory 2GiB --micro-batches 1")["fits"]


def test_gpu_list_prints_table_and_json() -> None:
    names = [one["name"] for one in json.loads(run_here("plan", "--gpu", "list", "--json").output)]
    assert "h100" in names
    shown = run_here("plan", "--gpu", "list").output
    assert all(name in shown for name in names)


def test_cores_default_to_those_of_the_accelerators_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is the same on every machine, and states the number; with --tflops, it is that of this machine."""
    line = QUICK.replace("--update-cores 8", "--no-changes --state-format split")
    plans = []
    for mine in (1, 64):
        monkeypatch.setattr("os.sched_getaffinity", lambda process, mine=mine: set(range(mine)))
        plans.append(planned(line))
    assert plans[0] == plans[1]
    assert "14 CPU cores per rank (as in a common node with h100; set --cores)" in plans[0]["assumptions"]
    few = planned(f"{line} --cores 1")
    assert "1 CPU core per rank (from --cores)" in few["assumptions"]
    assert few["tokens_per_second"] < plans[0]["tokens_per_second"] / 2
    monkeypatch.setattr("infinity_tools.plan.inputs.cores_of_groups", lambda: 64.0)
    own = planned(line.replace("--gpu h100", "--tflops 400 --link 55e9 --gpu-memory 80GiB --ranks 2"))
    assert "32 CPU cores per rank (this machine's; set --cores)" in own["assumptions"]


def test_bandwidth_between_ranks_defaults_to_that_of_the_accelerator(subtests: pytest.Subtests) -> None:
    for options, bandwidth, says in [
        ("--ranks 2", 360e9, "360 GB/s (80% of the links between accelerators in each direction; set --interconnect)"),
        ("--ranks 2 --nodes 2", 360e9, "the network between nodes is not included; set --interconnect"),
        ("--ranks 2 --gpu rtx4090", 12.5e9, "half of the link to the host, because data passes through host memory"),
        ("--ranks 2 --interconnect 5e9", 5e9, "5 GB/s (from --interconnect)"),
        ("--ranks 2 --tflops 400 --gpu-memory 80GiB", 360e9, "between accelerators"),
        ("", 0.0, ""),
    ]:
        with subtests.test(options):
            found = planned(f"{QUICK} --no-changes {options}")
            points = found["machine"]["network"]["all_gather"]
            assert (points[-1][0] if points else 0.0) == bandwidth
            assert (found["seconds"]["collectives"]["busy"] > 0) == (bandwidth > 0)
            said = [line for line in found["assumptions"] if line.startswith("communication between ranks")]
            assert len(said) == (bandwidth > 0)
            assert says in "".join(said)


def test_unknown_bandwidth_between_ranks_is_stated() -> None:
    found = planned(f"{QUICK} --no-changes --ranks 2".replace("--gpu h100", "--tflops 1"))
    assert found["seconds"]["collectives"]["busy"] == 0
    assert "communication between ranks takes no time (set --interconnect)" in found["assumptions"]


def test_network_between_nodes_adds_to_the_step() -> None:
    """A bandwidth in bits per second is that of a node's network. Both shardings are compared."""
    line = f"{QUICK} --no-changes --ranks 2 --nodes 2 --interconnect"
    slow, fast = planned(f"{line} 1GbE"), planned(f"{line} 100Gbit/s")
    for found, rate in ((slow, 1e9 / 8), (fast, 100e9 / 8)):
        network, load = found["network"], found["seconds"]["collectives"]
        assert load["busy"] == pytest.approx(network["sent_bytes_per_node"] / rate)
        assert found["seconds"]["step"] >= load["busy"]
        assert "per node in each direction, without latency (from --interconnect)" in " ".join(found["assumptions"])
        assert found["shardings"]["full_shard"]["network"] == network
    assert slow["seconds"]["step"] > fast["seconds"]["step"]
    assert slow["shardings"]["faster"] == "hsdp"
    assert slow["shardings"]["says"].startswith("HSDP is faster")
    assert planned(f"{QUICK} --no-changes --ranks 2")["shardings"] is None


def test_model_from_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is found by its id, and nothing is downloaded."""
    from infinity_tools import presets

    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "vocab_size": 256,
    }))  # fmt: skip
    monkeypatch.setattr(presets, "_in_cache", lambda name: tmp_path if name == "org/small" else None)
    said = planned("plan --model org/small --host-memory 2MiB --nvme-bandwidth 1e9/1e9 --tflops 1 --no-changes")
    assert said["model"]["name"] == "org/small"
    assert said["model"]["layers"] == 4
