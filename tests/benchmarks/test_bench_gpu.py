"""Tests of `make bench-gpu` on the CPU with a tiny model."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.estimate.machine import Drives
from infinity.estimate.model import decoder
from support.processes import fork_server

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import bench_gpu

VARIANTS = ["fsdp_memory", "infinity_host", "infinity_nvme"]
TINY = ("--variants", ",".join(VARIANTS), "--device", "cpu", "--threads", 1, "--model", "tiny",
        "--layers", 2, "--tokens", 32, "--seq", 16, "--steps", 2, "--rounds", 2, "--host-memory", "1536KiB",
        "--page-bytes", "64KiB", "--nvme-bandwidth", "1e9/1e9")  # fmt: skip


def bench(*options: object) -> tuple[object, str, str]:
    """Run the benchmark with its variants in processes of `fork_server`; return its status and its output."""
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        patch.setattr(sys, "argv", ["bench_gpu.py", *map(str, options)])
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(bench_gpu, "mp", SimpleNamespace(get_context=lambda _: fork_server()))
        with pytest.raises(SystemExit) as ended:
            bench_gpu.main()
    return ended.value.code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of a run on the CPU, which the benchmark both prints and stores."""
    folder = tmp_path_factory.mktemp("bench")
    status, out, _ = bench(*TINY, "--nvme", folder, "--out", folder / "gpu.json", "--json")
    assert status == 0
    printed: dict[str, Any] = json.loads(out)
    assert json.loads((folder / "gpu.json").read_text()) == printed
    assert sorted(path.name for path in folder.iterdir()) == ["gpu.json", "gpu.png"]
    return printed


def test_all_variants_have_bitwise_equal_losses(results: dict[str, Any]) -> None:
    """On the CPU, all updates use the same device; every step of every round is compared."""
    assert results["losses"]["steps"] == 6
    (kind, row), *others = results["losses"]["by_update_device"].items()
    assert not others
    assert (kind, row["equal"], row["first_difference"]) == ("cpu", True, None)
    assert row["variants"] == VARIANTS
    assert len(set(row["last"].values())) == 1


def test_rates_match_the_step_times(results: dict[str, Any]) -> None:
    for row in results["variants"].values():
        assert len(row["samples"]) == 2
        fastest = row["step_seconds"]["min"]
        assert row["tokens_per_second"]["max"] == pytest.approx(32 / fastest)
        assert row["tflops"]["max"] == pytest.approx(results["flops_per_step"] / fastest / 1e12)
    assert results["flops_per_step"] > 8 * 0.9 * 32 * (results["model"]["parameters"] - 2 * 256 * 64)


def test_measured_bytes_and_seconds_match_the_plan(results: dict[str, Any]) -> None:
    """If the state fits in host memory, no bytes move; otherwise the planned bytes move, or fewer during warm-up."""
    host, nvme = results["variants"]["infinity_host"], results["variants"]["infinity_nvme"]
    for name in ("read", "write"):
        assert host["bytes"][name] == {"measured": 0, "planned_before": 0, "planned": 0}
        moved = nvme["bytes"][name]
        assert moved["planned_before"] == moved["planned"] > 0
        assert moved["measured"] > 0
    for row in (host, nvme):
        assert row["update_device"] == "cpu"
        for way in ("to_device", "from_device"):  # the CPU has no link
            assert row["bytes"][way] == {"measured": 0, "planned_before": None, "planned": 0}
        assert 0.9 < row["bytes"]["gathered"]["measured"] / row["bytes"]["gathered"]["planned_before"] <= 1
        assert row["planned_seconds"]["before"] > 0
        resources = row["exposed"]["by_resource"]
        assert list(resources) == ["computation", "collectives", "links", "updates", "drives", "Python"]
        assert all(one["planned"] >= 0 for one in resources.values())
        assert resources["computation"]["planned_busy"] == pytest.approx(
            results["variants"]["fsdp_memory"]["step_seconds"]["median"]
        )
        assert resources["computation"]["ledger"] > 0
        assert resources["updates"]["planned_busy"] > 0
    assert host["exposed"]["by_resource"]["drives"]["planned_busy"] == 0
    assert nvme["exposed"]["by_resource"]["drives"]["planned_busy"] > 0
    assert nvme["planned_seconds"]["with_own_rates"] > 0
    assert nvme["host_bytes"] < nvme["state_bytes"] < host["host_bytes"]
    for name in ("drives", "links_and_updates"):
        between = nvme["exposed"]["between_variants"][name]
        assert set(between["measured"]) == {"median", "min", "max"}
        assert between["planned"] >= 0


@pytest.mark.wide
def test_two_ranks_under_torchrun(tmp_path: Path) -> None:
    """Each rank compares its own losses, and the first one prints the figures."""
    launcher = (sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    tiny = [*map(str, TINY)]
    tiny[tiny.index("1536KiB")] = "832KiB"
    command = [
        *launcher,
        bench_gpu.__file__,
        *tiny,
        "--nvme",
        str(tmp_path),
        "--out",
        str(tmp_path / "gpu.json"),
        "--json",
    ]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["config"]["ranks"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.png"]
    (row,) = found["losses"]["by_update_device"].values()
    assert row["equal"]
    nvme = found["variants"]["infinity_nvme"]
    assert nvme["bytes"]["read"]["planned_before"] == nvme["bytes"]["read"]["planned"] > 0
    assert nvme["bytes"]["read"]["measured"] > 0
    assert nvme["exposed"]["by_resource"]["collectives"]["ledger"] > 0


def test_invalid_runs_are_rejected_in_one_line() -> None:
    """A missing GPU and an invalid batch size are reported with status 2."""
    for options, message in (((), "sees no GPU"), (("--tokens", 33, "--seq", 16), "not a multiple")):
        status, out, err = bench(*options)
        assert (status, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1


def test_different_losses_are_detected() -> None:
    """Only variants whose updates run on the same kind of device are compared."""
    losses = {"a": [3.0, 2.0], "b": [3.0, 2.5], "c": [3.0, 2.5]}
    by_device = bench_gpu.compared(losses, {"a": "cuda", "b": "cpu", "c": "cpu"})["by_update_device"]
    assert {device: row["equal"] for device, row in by_device.items()} == {"cpu": True, "cuda": True}
    (row,) = bench_gpu.compared(losses, dict.fromkeys(losses, "cpu"))["by_update_device"].values()
    assert (row["equal"], row["first_difference"]) == (False, 1)


@pytest.mark.parametrize("variant", ["fsdp_memory", "fsdp_cpu_offload", "infinity_host", "infinity_nvme"])
def test_all_variants_except_fsdp_memory_are_capped(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA device is mocked."""
    caps: list[tuple[float, int]] = []
    device = SimpleNamespace(name="a GPU", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *cap: caps.append(cap))
    options = SimpleNamespace(device="cuda", deterministic=False, cap_fraction=0.05, device_bytes=0, local_rank=0)
    facts, prefetched = bench_gpu.prepare(options, variant)
    assert caps == ([] if variant == "fsdp_memory" else [(0.05, 0)])
    assert facts == {"name": "a GPU", "memory_bytes": 80 << 30, "cap_bytes": 4 << 30}
    assert prefetched == 1 << 30


@pytest.mark.parametrize("updates", ["cpu", "cuda"])
def test_the_plan_for_a_gpu_covers_all_resources(updates: str) -> None:
    """Pages that are updated on the GPU cross the link in both directions."""
    shape = decoder(parameters=1e9, layers=20, hidden=2048, vocabulary=256)
    options = SimpleNamespace(
        tokens=8192,
        seq=2048,
        host_memory=2 << 30,
        page_bytes=0,
        update="auto",
        update_cores=-1,
        update_device=updates,
        ranks=1,
    )
    device = {"name": "a GPU", "cap_bytes": 4 << 30, "link": 55e9}
    facts = {
        "fsdp_memory": {"shape": shape, "device": device},
        "infinity_nvme": {"update_cores": 1, "update_device": updates, "device_bytes": 1 << 30},
    }
    plan = bench_gpu.planned(options, "infinity_nvme", facts, 400e12, Drives(count=1, read=7e9, write=5e9))
    resources = {name: one["planned_busy"] for name, one in plan["by_resource"].items()}
    assert all(seconds > 0 for name, seconds in resources.items() if name != "collectives")
    if updates == "cpu":
        assert resources["links"] == pytest.approx(max(plan["bytes"][way] for way in bench_gpu.LINK) / 55e9)
    else:
        assert resources["updates"] <= max(plan["bytes"][way] for way in bench_gpu.LINK) / 55e9
        # The direction with more bytes includes the weights.
        assert 12 <= resources["updates"] * 55e9 / shape.parameters <= 14
    assert plan["step_seconds"] >= max(resources.values())
