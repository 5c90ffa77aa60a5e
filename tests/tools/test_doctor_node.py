"""Tests of the `infinity doctor` checks of the node, its accelerators and torch."""

from __future__ import annotations

import shutil
import socket
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import infinity
from infinity.daemon_client import SOCKET_NAME
from infinity.errors import UnsupportedError
from infinity.memory.device import CudaDevice, opened
from infinity_tools.doctor import accelerator, daemon_check
from infinity_tools.doctor.finding import Finding
from infinity_tools.doctor.world import World
from support.doctor import GIB, Machine, matches


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine on which every check passes."""
    return Machine(tmp_path / "root")


def daemon_finding(runtime: Path, answer: dict[str, Any] | None) -> Finding:
    """Return the finding for a daemon that gives this information about itself, or for no daemon."""
    here = World.of([], runtime)
    here.daemon.__dict__["state"] = answer and {"node": answer}
    return daemon_check.daemon.look(here)


def test_daemon_status(tmp_path: Path) -> None:
    runtime = tmp_path / "run time"
    assert matches(
        daemon_finding(runtime, {"version": infinity.__version__, "pid": 7}), "ok", f"infinityd {infinity.__version__}"
    )
    assert matches(daemon_finding(runtime, {"version": "0.0.9", "pid": 7}), "warning", "0.0.9", "kill 7")
    assert matches(daemon_finding(runtime, None), "note", "not running", f"infinityd --runtime-dir '{runtime}' &")
    runtime.mkdir(mode=0o700)
    (runtime / SOCKET_NAME).touch()
    assert matches(daemon_finding(runtime, None), "note", "answers in")
    assert matches(
        daemon_finding(runtime / SOCKET_NAME / "x", None), "warning", "Not a directory", "telemetry.runtime_dir"
    )
    runtime.chmod(0o777)
    assert matches(daemon_finding(runtime, None), "warning", "mode 0777", "telemetry.runtime_dir")


def test_host_name_must_resolve_to_this_host(
    subtests: pytest.Subtests, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo listens on the address that the host name resolves to."""
    for addresses, status, says in [
        (["127.0.0.1"], "ok", "of this host"),
        (["192.0.2.1", "127.0.0.1"], "ok", "of this host"),
        (["192.0.2.1"], "warning", "other hosts"),
        ([], "warning", "does not resolve"),
    ]:
        with subtests.test(says):

            def resolve(*_: object, **__: object) -> list[Any]:
                if not addresses:
                    raise socket.gaierror(-2, "Name or service not known")
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

            monkeypatch.setattr(socket, "getaddrinfo", resolve)
            assert matches(machine.look(daemon_check.host_name), status, says)


def test_missing_loopback_is_a_problem(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert matches(machine.look(daemon_check.loopback), "ok")
    monkeypatch.setattr(socket, "create_server", mock.Mock(side_effect=OSError(99, "Cannot assign requested address")))
    assert matches(machine.look(daemon_check.loopback), "problem", "Cannot assign", "ip link set lo up")


def test_rank_variables_must_be_complete(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert matches(machine.look(daemon_check.ranks), "ok")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert matches(machine.look(daemon_check.ranks), "problem", "RANK is not set", "unset RANK")
    for name, value in zip(names, ("1", "2", "1", "2", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert matches(machine.look(daemon_check.ranks), "note", "rank 1 of 2", "unset RANK")


class FakeTorch:
    """Attributes of torch that the checks read."""

    def __init__(self, gpus: int = 0, cuda: str | None = None, other: str = "", nccl: bool = True) -> None:
        properties = SimpleNamespace(name="H100", total_memory=80 * GIB)
        self.__version__ = "2.13.0"
        self.version = SimpleNamespace(cuda=cuda, hip=None)
        self.cuda = SimpleNamespace(
            is_available=lambda: gpus > 0, device_count=lambda: gpus, get_device_properties=lambda index: properties
        )
        self.accelerator = SimpleNamespace(
            is_available=lambda: bool(other), current_accelerator=lambda: SimpleNamespace(type=other)
        )
        self.distributed = SimpleNamespace(
            is_available=lambda: True, is_gloo_available=lambda: True, is_nccl_available=lambda: nccl
        )


def test_accelerator(subtests: pytest.Subtests, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices that torch sees are compared with the devices in /dev."""
    for torch, device, status, says, fix in [
        (FakeTorch(), "", "ok", "on the CPU", ""),
        (FakeTorch(gpus=8, cuda="12.8"), "nvidiactl", "ok", "8 x H100 with 80 GiB", ""),
        (FakeTorch(), "nvidiactl", "warning", "built without CUDA", "pytorch.org"),
        (FakeTorch(), "kfd", "warning", "built without ROCm", "pytorch.org"),
        (FakeTorch(cuda="12.8"), "nvidiactl", "warning", "a GPU is present", "nvidia-smi"),
        (FakeTorch(other="xpu"), "", "note", "xpu", "CUDA"),
        (None, "", "note", "not installed", "`torch`"),
    ]:
        with subtests.test(says):
            monkeypatch.setattr(accelerator, "_torch", lambda: torch)
            shutil.rmtree(machine.root / "dev", ignore_errors=True)
            if device:
                machine.write(f"dev/{device}", "")
            assert matches(machine.look(accelerator.accelerator), status, says, fix)


def test_host_registration_is_tried_and_undone(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, no memory has to be registered."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert matches(machine.look(accelerator.host_registration), "ok", "no GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda name: nullcontext())
    monkeypatch.setattr(CudaDevice, "numa_node", lambda self: -1)
    monkeypatch.setattr(CudaDevice, "_clear", lambda self: None)
    opened.cache_clear()
    unregistered: list[object] = []
    for status, verdict in ((0, "ok"), (2, "warning")):
        cudart = SimpleNamespace(
            cudaHostRegister=lambda address, size, flags, status=status: status, cudaHostUnregister=unregistered.append
        )
        monkeypatch.setattr(torch.cuda, "cudart", lambda cudart=cudart: cudart)
        assert matches(machine.look(accelerator.host_registration), verdict, "register")
    assert len(unregistered) == 1, "the registered memory is unregistered"
    opened.cache_clear()


def test_nccl_is_required_only_with_gpus(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for torch, status, says in (
        (FakeTorch(nccl=False), "ok", "gloo"),
        (FakeTorch(gpus=1), "ok", "gloo and NCCL"),
        (FakeTorch(gpus=1, nccl=False), "problem", "NCCL"),
        (None, "note", "skipped"),
    ):
        monkeypatch.setattr(accelerator, "_torch", lambda torch=torch: torch)
        assert matches(machine.look(accelerator.collectives), status, says)


def test_missing_fsdp2_apis_are_a_problem(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert matches(machine.look(accelerator.fsdp2), "ok")
    monkeypatch.setattr(
        accelerator, "import_module", mock.Mock(side_effect=UnsupportedError("torch 9 is not supported"))
    )
    assert matches(machine.look(accelerator.fsdp2), "problem", "torch 9 is not supported", "torch>=2.11,<=2.15")
    monkeypatch.setattr(accelerator, "installed", lambda package: None)
    assert matches(machine.look(accelerator.fsdp2), "note", "not installed")


def test_broken_torch_installation_is_a_problem(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other checks that need torch are skipped."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert matches(machine.look(accelerator.fsdp2), "problem", "torch cannot be imported", "--force-reinstall")
    assert matches(machine.look(accelerator.collectives), "note", "skipped")
