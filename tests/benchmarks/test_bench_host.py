"""Limits on the number of Python calls per step, which do not depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from bench_host import LIMITS, ROOT, SHARDING_LIMITS, reference

from infinity.estimate.estimate import ACCESS_CALLS, GPU_RESIDENT_CALLS, MODULE_CALLS, PAGE_CALLS, PASS_CALLS


def test_a_step_calls_few_python_functions() -> None:
    """Losses are equal, too: bitwise, with and without clipping, on one rank and on two."""
    words = [sys.executable, "-W", "ignore", "benchmarks/bench_host.py", "--json"]
    found = json.loads(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    for variant, (python_calls, ratio) in LIMITS.items():
        row, memory = found[variant], found[reference(variant)]
        assert row["losses"] == memory["losses"], variant
        assert row["python_calls"] <= python_calls, variant
        assert row["torch_calls"] <= ratio * memory["torch_calls"], variant
    # The plan counts the same calls. A slow drive only adds calls, because threads check for failures while they wait.
    for variant, most in (("device", 1.1), ("resident", 1.1), ("device_nvme", 100)):
        row, layers, gpu_resident = found[variant], 8, 9 * (variant == "resident")
        planned = 4 * layers * PASS_CALLS + 9 * MODULE_CALLS + gpu_resident * GPU_RESIDENT_CALLS
        planned += row["accesses"] * ACCESS_CALLS + row["pages"] * PAGE_CALLS
        assert 0.9 * planned < row["python_calls"] < most * planned, variant
    for variant, sharding_calls in SHARDING_LIMITS.items():
        row = found[variant]
        assert 0 < row["sharding_calls"] <= sharding_calls, variant
        assert row["sharding_calls"] + row["update_calls"] < row["python_calls"], variant
    assert found["device_split"]["losses"] == found["memory"]["losses"]  # "8bit" rounds the moments
    assert found["device_8bit"]["losses"] != found["memory"]["losses"]
