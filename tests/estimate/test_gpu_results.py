"""Tests that compare the plan of steps on a GPU with the results of `make bench-gpu`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from infinity.estimate import estimate
from infinity.estimate.machine import Drives
from infinity.schedule import timing
from infinity_tools.plan.shapes import shape_of

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import bench_gpu  # noqa: E402

ROWS = {
    "412M, 16,384, host cache": ("gpu", "infinity_host"),
    "412M, 16,384, NVMe": ("gpu", "infinity_nvme"),
    "412M, 2,048, host cache": ("gpu-2048-tokens", "infinity_host"),
    "412M, 2,048, NVMe": ("gpu-2048-tokens", "infinity_nvme"),
    "2.0B, 16,384, host cache": ("gpu-2b", "infinity_host"),
}
CALLS_THEN = {"MODULE_CALLS": 2577, "GPU_RESIDENT_CALLS": 1201, "ACCESS_CALLS": 241, "PAGE_CALLS": 182}
"""Calls of Python functions at the commit of the results, counted in the same way as those of today."""
QUEUED_THEN = 2


@cache
def stored(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())  # type: ignore[no-any-return]


def planned(name: str, variant: str) -> float:
    """Return the planned seconds per step of a stored result. Computation takes as long as the step in memory."""
    result = stored(name)
    options, row = argparse.Namespace(**{"ranks": 1, **result["config"]}), result["variants"][variant]
    shape = shape_of(bench_gpu.source_of(options))
    facts = {"update_cores": row["update_cores"], "update_device": row["update_device"]}
    facts["device_bytes"] = result["device"]["cap_bytes"] // 4
    memory = {"shape": shape, "device": result["device"]}
    reached = bench_gpu.workload(options).flops(shape) / result["variants"]["fsdp_memory"]["step_seconds"]["median"]
    drives = Drives(**result["drives"])
    found = bench_gpu.planned(options, variant, {"fsdp_memory": memory, variant: facts}, reached, drives)
    return float(found["step_seconds"])


@pytest.mark.parametrize("row", ROWS)
def test_plan_explains_measured_steps(row: str) -> None:
    """The plan differs from that of the measured commit in the choice of GPU-resident modules and the batch size."""
    name, variant = ROWS[row]
    with patch.multiple(estimate, **CALLS_THEN), patch.object(timing, "QUEUED", QUEUED_THEN):
        found = planned(name, variant)
    assert found == pytest.approx(stored(name)["variants"][variant]["step_seconds"]["median"], rel=0.1)


def test_documented_predictions_match_the_plan() -> None:
    """docs/how-to/gpu.md lists measured and planned times, predictions for the current code, and a count of FLOPs."""
    page = (ROOT / "docs" / "how-to" / "gpu.md").read_text()
    for row, (name, variant) in ROWS.items():
        (cells,) = re.findall(rf"^\| {re.escape(row)} \| (.+) \|$", page, re.MULTILINE)
        measured, before, corrected, today = map(float, cells.split(" | "))
        result = stored(name)["variants"][variant]
        options = argparse.Namespace(**{"ranks": 1, **stored(name)["config"]})
        counted = bench_gpu.workload(options).flops(shape_of(bench_gpu.source_of(options)))
        assert counted == pytest.approx(0.95 * stored(name)["flops_per_step"], rel=0.005)
        assert measured == round(result["step_seconds"]["median"], 3)
        assert before == round(result["planned_seconds"]["before"], 3)
        assert corrected == pytest.approx(measured, rel=0.05)
        assert today == pytest.approx(planned(name, variant), rel=0.05)
