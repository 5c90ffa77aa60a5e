"""Where pages are updated: what is asked for, what a checkpoint says, or what is faster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.memory import device as room
from infinity.memory.device import AcceleratorDevice, CpuDevice, CudaDevice, Device
from infinity.optim.update_thread import UpdateWorker
from infinity.run import update_device
from infinity.run.update_device import choose_update_device
from support.layouts import transformer

CPU = CpuDevice(torch.device("cpu"))
LAYOUT = transformer(1, 4096, 64 << 10)


class Gpu(CpuDevice):
    """What can be asked of a device without having one."""

    asynchronous = True


GPU = Gpu(torch.device("cuda", 0))


@pytest.fixture
def worker() -> Iterator[UpdateWorker]:
    """Updates on one core."""
    made = UpdateWorker(1, lambda error: None)
    yield made
    made.close()


def chosen(worker: UpdateWorker, device: Device, wanted: str = "auto", before: str | None = None) -> tuple[bool, str]:
    """Return what is chosen for a setting, and why."""
    settings = Config().with_values(**{"update.device": wanted})
    return choose_update_device(settings, device, LAYOUT, worker, before)


def test_what_is_asked_for_is_done_or_refused(worker: UpdateWorker) -> None:
    """Before anything is measured."""
    assert not chosen(worker, CPU, "cpu")[0]
    assert not chosen(worker, GPU, "cpu")[0]
    assert chosen(worker, GPU, "cuda")[0]
    with pytest.raises(ConfigError, match=r'update\.device = "cuda".*"cpu"'):
        chosen(worker, CPU, "cuda")


def test_the_cpu_updates_what_it_computes(worker: UpdateWorker) -> None:
    """There is nothing to choose."""
    assert chosen(worker, CPU) == (False, "the model is on the CPU")
    assert not chosen(worker, CPU, before="cuda")[0]


@pytest.mark.parametrize("before", ["cpu", "cuda"])
def test_a_checkpoint_is_continued_where_it_was_updated(before: str, worker: UpdateWorker) -> None:
    """Another device has other bits."""
    assert chosen(worker, GPU, before=before) == (before == "cuda", "as in the resumed checkpoint")


@pytest.mark.parametrize(("link", "host", "there"), [(0.1e-9, 0.5e-9, True), (2e-9, 0.5e-9, False)])
def test_auto_takes_what_is_faster_and_says_both(
    link: float, host: float, there: bool, worker: UpdateWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In nanoseconds per parameter."""
    monkeypatch.setattr(update_device, "_seconds_on_device", lambda device: link)
    monkeypatch.setattr(update_device, "_seconds_on_host", lambda worker: host)
    found, why = chosen(worker, GPU)
    assert found is there
    assert f"{1e9 * link:.2f} ns per parameter over the link" in why
    assert "0.50 ns on the CPU" in why


def test_what_has_room_on_the_device_does_not_count(worker: UpdateWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """It crosses no link: with half of the state there, the link counts half."""
    monkeypatch.setattr(update_device, "_seconds_on_device", lambda device: 0.8e-9)
    monkeypatch.setattr(update_device, "_seconds_on_host", lambda worker: 0.5e-9)
    half = Config().with_values(**{"memory.device_bytes": LAYOUT.state_bytes // 2})
    found, why = choose_update_device(half, GPU, LAYOUT, worker, None)
    assert found
    assert "about 50%" in why
    assert not chosen(worker, GPU)[0], "none has: its free bytes are 0"


def test_both_are_measured(worker: UpdateWorker) -> None:
    """Copies there and back, and an update on the worker's thread."""
    assert update_device._seconds_on_device(CPU) > 0
    assert update_device._seconds_on_host(worker) > 0


def test_kinds_of_devices() -> None:
    """Any accelerator that torch has is one, and what is on the meta device waits for nothing."""
    assert room.KINDS["cuda"] is CudaDevice
    assert issubclass(CudaDevice, AcceleratorDevice)
    assert not room.open_device(torch.device("meta")).asynchronous


def test_a_part_of_the_memory_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of what the process may have, and a GiB at least."""
    for free, total, spare in ((60 << 30, 80 << 30, 52 << 30), (5 << 30, 6 << 30, 4 << 30), (1 << 29, 6 << 30, 0)):
        monkeypatch.setattr(AcceleratorDevice, "_memory", lambda self, found=(free, total): found)
        assert AcceleratorDevice(torch.device("cpu")).spare_bytes() == spare
