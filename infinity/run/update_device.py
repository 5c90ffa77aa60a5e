"""Choice of the device on which pages are updated: the host or the compute device."""

from __future__ import annotations

import time
from typing import Final

import torch

from infinity.config import Config
from infinity.content.layout import Layout
from infinity.errors import ConfigError, StallError
from infinity.memory.device import Device, transfer_bytes
from infinity.optim.update_thread import UpdateWorker
from infinity.schedule.link import UPDATE_BYTES, share_that_stays
from infinity.units import MIB

_COPIED: Final = 64 * MIB
"""Bytes copied in each direction to measure the link."""
_ELEMENTS: Final = 4 << 20
"""Number of parameters updated to measure the host."""
_PATIENCE: Final = 60.0
"""Time limit in seconds for a copy that takes milliseconds."""


def choose_update_device(
    settings: Config,
    device: Device,
    layout: Layout,
    worker: UpdateWorker,
    before: str | None,
    *,
    exchanges: bool = False,
) -> tuple[bool, str]:
    """Choose the device on which pages are updated.

    Args:
        before: type of the device on which the resumed checkpoint was updated, such as ``cpu``; None for a new run.
        exchanges: whether ranks exchange data during updates, which is supported only on the host.

    Returns:
        Whether pages are updated on the compute device, and the reason.

    Raises:
        ConfigError: if the value of `update.device` is not supported for this run.
        StallError: if the device does not respond.
    """
    wanted = settings.update.device
    encoded = any(segment.format.encoded for segment in layout.segments if segment.trainable)
    if wanted == "cuda" and device.name.type != "cuda":
        raise ConfigError(
            f'update.device = "cuda", but the model is on "{device.name.type}". Set "auto", or move the model to a GPU.'
        )
    if wanted == "cuda" and encoded:
        raise ConfigError(
            f'update.device = "cuda" requires state.format = "fp32", but it is "{settings.state.format}". '
            'Set update.device to "auto" or "cpu".'
        )
    if wanted != "auto":
        return wanted == "cuda", f'update.device = "{wanted}"'
    if not device.asynchronous:
        return False, "the model is on the CPU"
    if encoded:
        return False, f'state.format = "{settings.state.format}" requires updates on the CPU'
    if exchanges:
        return False, "ranks exchange full parameters on the host"
    if before is not None:
        return before != "cpu", "as in the resumed checkpoint"
    if any(segment.whole for segment in layout.segments):
        return True, "updating full parameters takes longer than copying them to the GPU"
    there, here = _seconds_on_device(device), _seconds_on_host(worker)
    compared = f"{1e9 * there:.2f} ns per parameter over the link to the GPU, {1e9 * here:.2f} ns on the CPU"
    stays = share_that_stays(layout, settings.memory.device_bytes or device.spare_bytes())
    if stays:
        compared += f", and about {stays:.0%} of the state fits on the GPU and does not cross the link"
    return there * (1 - stays) < here, compared


def _seconds_on_device(device: Device) -> float:
    """Return the time to update one parameter on the device, in seconds.

    This is the time that its bytes take to cross the link, in one direction at a time.
    """
    host, pinned = transfer_bytes(device, _COPIED, _COPIED)
    stream = device.stream("in")
    there = torch.empty(_COPIED, dtype=torch.uint8, device=device.name)
    device.record_event(device.current()).before(stream)  # the memory may still be in use by earlier work
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        device.copy_all([there], [host], stream)
        device.copy_all([host], [there], stream)
        if not device.wait(device.record_event(stream), _PATIENCE):
            # The memory stays registered, because the device may still access it.
            raise StallError(f"the device did not copy {_COPIED} bytes within {_PATIENCE:.0f} s")
        seconds.append(time.perf_counter() - began)
    pinned.close()
    device.take_copied()  # not part of a step
    return min(seconds) / (2 * _COPIED) * UPDATE_BYTES


def _seconds_on_host(worker: UpdateWorker) -> float:
    """Return the time to update one parameter on the update cores, in seconds, measured with torch's fused AdamW."""
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
