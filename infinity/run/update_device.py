"""Where pages are updated: on the host, or on the device that computes."""

from __future__ import annotations

import time
from typing import Final

import torch

from infinity.config import Config
from infinity.content.layout import Layout
from infinity.errors import ConfigError, StallError
from infinity.memory.device import Device, transfer_bytes, wait
from infinity.optim.update_thread import UpdateWorker
from infinity.schedule.link import UPDATE_BYTES, share_that_stays
from infinity.units import MIB

_COPIED: Final = 64 * MIB
"""Bytes that are copied each way to measure the link."""
_ELEMENTS: Final = 4 << 20
"""Parameters that are updated to measure the host."""
_PATIENCE: Final = 60.0
"""Seconds for a copy that takes milliseconds."""


def choose_update_device(
    settings: Config,
    device: Device,
    layout: Layout,
    worker: UpdateWorker,
    before: str | None,
    *,
    exchanges: bool = False,
) -> tuple[bool, str]:
    """Return whether pages are updated on the device, and why.

    Args:
        worker: updates on the host.
        before: where the checkpoint was updated that is continued: ``cpu`` or the type of a device; None for a new run.
        exchanges: whether ranks exchange what they have in updates, which they do on the host.

    Raises:
        ConfigError: update.device asks for what cannot be.
        StallError: the device does not answer.
    """
    wanted = settings.update.device
    encoded = any(segment.format.encoded for segment in layout.segments if segment.trainable)
    if wanted == "cuda" and device.name.type != "cuda":
        raise ConfigError(
            f'update.device = "cuda", but the model is on "{device.name.type}"; set "auto", or move it to a GPU'
        )
    if wanted == "cuda" and encoded:
        raise ConfigError(
            f'update.device = "cuda" is for state.format = "fp32"; "{settings.state.format}" is updated on the CPU'
        )
    if wanted != "auto":
        return wanted == "cuda", f'update.device = "{wanted}"'
    if not device.asynchronous:
        return False, "the model is on the CPU"
    if encoded:
        return False, f'state.format = "{settings.state.format}" is updated on the CPU'
    if exchanges:
        return False, "ranks put parameters that are updated whole together there"
    if before is not None:
        return before != "cpu", "as in the checkpoint that is continued"
    if any(segment.whole for segment in layout.segments):
        return True, "whole parameters are updated, which takes more than to copy them"
    there, here = _seconds_on_device(device), _seconds_on_host(worker)
    compared = f"{1e9 * there:.2f} ns per parameter over the link of the GPU, {1e9 * here:.2f} ns on the CPU"
    stays = share_that_stays(layout, settings.memory.device_bytes or device.spare_bytes())
    if stays:
        compared += f", and about {stays:.0%} of the state has room on the GPU and does not cross the link"
    return there * (1 - stays) < here, compared


def _seconds_on_device(device: Device) -> float:
    """Return how long one parameter takes on the device: its bytes cross the link one way after the other."""
    host, pinned = transfer_bytes(device, _COPIED, _COPIED)
    stream = device.stream("in")
    there = torch.empty(_COPIED, dtype=torch.uint8, device=device.name)
    device.record_event(device.current()).before(stream)  # behind what the memory was used for before
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        device.copy(there, host, stream)
        device.copy(host, there, stream)
        if not wait(
            device.record_event(stream), _PATIENCE
        ):  # the memory stays registered: the device may still be at it
            raise StallError(f"waited {_PATIENCE:.0f} s for the device to copy {_COPIED} bytes")
        seconds.append(time.perf_counter() - began)
    pinned.close()
    device.take_copied()  # is no part of a step
    return min(seconds) / (2 * _COPIED) * UPDATE_BYTES


def _seconds_on_host(worker: UpdateWorker) -> float:
    """Return how long one parameter takes on the cores of updates, with the fastest AdamW that torch has for them."""
    param = torch.nn.Parameter(torch.zeros(_ELEMENTS))
    param.grad = torch.ones(_ELEMENTS)
    optimizer = torch.optim.AdamW([param], fused=True)
    seconds: list[float] = []

    def step() -> None:
        began = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - began)

    for _ in range(3):
        worker.submit(step)
    worker.drain()
    return min(seconds) / _ELEMENTS
