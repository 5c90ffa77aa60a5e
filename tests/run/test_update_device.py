"""Tests of the update device (as configured, as in the resumed checkpoint, or the faster one) and of update cores."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import infinity
from infinity.config import Config, UpdateConfig
from infinity.errors import ConfigError
from infinity.memory import device as device_module
from infinity.memory.device import AcceleratorDevice, CudaDevice, Device
from infinity.optim.update_thread import UpdateWorker
from infinity.processor import share_of_cores
from infinity.run import update_device
from infinity.run.update_device import choose_update_device
from support import models
from support.command import run_here
from support.layouts import transformer
from support.tables import WIDE

CPU = Device(torch.device("cpu"))
LAYOUT = transformer(1, 4096, 64 << 10)


class Gpu(Device):
    """Fake GPU."""

    asynchronous = True


GPU = Gpu(torch.device("cuda", 0))


@pytest.fixture
def worker() -> Iterator[UpdateWorker]:
    """Worker that updates on one core."""
    made = UpdateWorker(1, lambda error: None)
    yield made
    made.close()


def choose(worker: UpdateWorker, device: Device, wanted: str = "auto", before: str | None = None) -> tuple[bool, str]:
    """Return the choice for a setting and its reason."""
    settings = Config().with_values(**{"update.device": wanted})
    return choose_update_device(settings, device, LAYOUT, worker, before)


def test_configured_update_device_is_used_or_rejected(worker: UpdateWorker) -> None:
    assert not choose(worker, CPU, "cpu")[0]
    assert not choose(worker, GPU, "cpu")[0]
    assert choose(worker, GPU, "cuda")[0]
    with pytest.raises(ConfigError, match=r'update\.device = "cuda".*"cpu"'):
        choose(worker, CPU, "cuda")


def test_cpu_models_are_updated_on_the_cpu(worker: UpdateWorker) -> None:
    assert choose(worker, CPU) == (False, "the model is on the CPU")
    assert not choose(worker, CPU, before="cuda")[0]


@pytest.mark.parametrize("before", ["cpu", "cuda"])
def test_resume_keeps_the_update_device(before: str, worker: UpdateWorker) -> None:
    """Results on a different device would not be bitwise equal."""
    assert choose(worker, GPU, before=before) == (before == "cuda", "as in the resumed checkpoint")


@pytest.mark.parametrize(("link", "host", "on_gpu"), [(0.1e-9, 0.5e-9, True), (2e-9, 0.5e-9, False)])
def test_auto_chooses_the_faster_device_and_reports_both_times(
    link: float, host: float, on_gpu: bool, worker: UpdateWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are reported in nanoseconds per parameter."""
    monkeypatch.setattr(update_device, "_seconds_on_device", lambda device: link)
    monkeypatch.setattr(update_device, "_seconds_on_host", lambda worker: host)
    found, why = choose(worker, GPU)
    assert found is on_gpu
    assert f"{1e9 * link:.2f} ns per parameter over the link" in why
    assert "0.50 ns on the CPU" in why


def test_gpu_resident_state_does_not_count_as_link_traffic(
    worker: UpdateWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With half of the state in GPU memory, the transfer time is halved."""
    monkeypatch.setattr(update_device, "_seconds_on_device", lambda device: 0.8e-9)
    monkeypatch.setattr(update_device, "_seconds_on_host", lambda worker: 0.5e-9)
    half = Config().with_values(**{"memory.device_bytes": LAYOUT.state_bytes // 2})
    found, why = choose_update_device(half, GPU, LAYOUT, worker, None)
    assert found
    assert "about 50%" in why
    assert not choose(worker, GPU)[0], "no state fits: the device has no free memory"


def test_update_times_are_measured_on_both_devices(worker: UpdateWorker) -> None:
    assert update_device._seconds_on_device(CPU) > 0
    assert update_device._seconds_on_host(worker) > 0


def test_device_kinds() -> None:
    """CUDA is an accelerator, and the meta device is not asynchronous."""
    assert device_module.KINDS["cuda"] is CudaDevice
    assert issubclass(CudaDevice, AcceleratorDevice)
    assert not device_module.open_device(torch.device("meta")).asynchronous


def test_gpu_memory_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenth of the memory, and at least 1 GiB, is kept free."""
    for free, total, spare in ((60 << 30, 80 << 30, 52 << 30), (5 << 30, 6 << 30, 4 << 30), (1 << 29, 6 << 30, 0)):
        monkeypatch.setattr(AcceleratorDevice, "_memory", lambda self, found=(free, total): found)
        assert AcceleratorDevice(torch.device("cpu")).spare_bytes() == spare


@pytest.mark.parametrize(
    ("device", "cores", "expected"),
    [("cuda", 1, 1), ("cuda", 3, 1), ("cuda", 4, 1), ("cuda", 8, 5), ("cuda", 11, 8), ("cuda", 64, 8),
     ("cpu", 1, 0), ("cpu", 2, 0), ("cpu", 3, 1), ("cpu", 64, 1)],
)  # fmt: skip
def test_default_update_cores(device: str, cores: int, expected: int) -> None:
    """On a GPU, updates use all cores except three, at most eight; on a CPU, one core if two threads leave it idle."""
    assert UpdateConfig().thread_cores(device, cores=cores, computing=2) == expected
    assert UpdateConfig(cores=5).thread_cores(device, cores=cores, computing=2) == 5


@pytest.mark.parametrize(
    ("cores", "expected", "hashers"),
    [(1, 0, 0), (6, 1, 2), *(pytest.param(*row, marks=WIDE) for row in ((2, 1, 0), (5, 1, 0), (64, 1, 4)))],
)
def test_run_uses_the_cores_of_its_rank(
    cores: int, expected: int, hashers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch computes on one core in this test."""
    assert torch.get_num_threads() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("infinity.run.run.cores_of_groups", lambda: math.inf)
    model = models.build("even")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with infinity.offload(model, optimizer, {"storage": {"paths": [str(tmp_path)]}}) as paged:
        assert paged.run.update_cores == expected
        assert paged.run.worker.threaded is bool(expected)
        assert paged.run.hashers == hashers


@pytest.mark.parametrize(
    ("of_node", "limit", "expected"),
    [
        ([range(16)] * 2, math.inf, 8),  # torchrun sets no affinity
        ([range(8), range(8, 16)], math.inf, 8),  # each rank has its own cores, as with Slurm
        ([range(8), range(4, 8)], math.inf, 6),  # the ranks share four cores
        ([range(16)] * 2, 8.0, 4),  # the container is limited to eight cores
        ([range(3)] * 3, math.inf, 1),
    ],
)
def test_cores_are_divided_by_cpu_affinity(of_node: list[range], limit: float, expected: int) -> None:
    """The expected number is for the first rank."""
    sets = [set(cores) for cores in of_node]
    assert share_of_cores(sets[0], sets, limit) == expected


def test_plan_reserves_update_cores_from_the_cores_of_a_rank() -> None:
    line = "plan --parameters 3e8 --layers 8 --hidden 1536 --vocabulary 16000 --host-memory 512MiB --no-changes --json"
    for cores, expected in ((16, "on 8 reserved cores"), (8, "on 5 reserved cores"), (2, "on 1 reserved core")):
        given = f"--nvme-bandwidth 7e9/5e9 --gpu h100 --cores {cores} --batch-tokens 8192"
        found = json.loads(run_here(*line.split(), *given.split()).output)
        assert any(expected in assumed for assumed in found["assumptions"]), found["assumptions"]
