"""Tests of the bandwidths and speeds assumed for drives and accelerators."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.content.format import FORMATS
from infinity.estimate.machine import ACCELERATORS, UPDATE_SECONDS, Accelerator, Drives, Machine

SPEED = st.floats(1e8, 1e11)


@given(SPEED, SPEED, st.one_of(st.just(0.0), SPEED), st.floats(0.0, 1.0))
def test_mixed_bandwidth_is_interpolated(read: float, write: float, mixed: float, share: float) -> None:
    """The bandwidths of reads alone, writes alone and an even mix are the given ones."""
    drives = Drives(count=1, read=read, write=write, mixed=mixed)
    half = mixed or 2 / (1 / read + 1 / write)
    assert drives.bandwidth(0.0) == pytest.approx(read)
    assert drives.bandwidth(0.5) == pytest.approx(half)
    assert drives.bandwidth(1.0) == pytest.approx(write)
    near = (read, half) if share <= 0.5 else (half, write)
    assert min(near) * (1 - 1e-9) <= drives.bandwidth(share) <= max(near) * (1 + 1e-9)


def test_ranks_of_a_node_share_its_drives() -> None:
    """An additional drive is as fast as the others."""
    drives = Drives(count=2, read=8e9, write=4e9, mixed=6e9, space_bytes=100, endurance_bytes=1e15)
    machine = Machine(
        drives=drives, ranks_per_node=4, device=ACCELERATORS["h100"], update_seconds=UPDATE_SECONDS, update_cores=2
    )
    assert machine.bandwidth(0.0) == pytest.approx(2e9)
    assert machine.with_drives(3).drives == Drives(
        count=3, read=12e9, write=6e9, mixed=9e9, space_bytes=150, endurance_bytes=1.5e15
    )
    assert machine.update("fp32") == UPDATE_SECONDS["fp32"] / 2


def test_every_accelerator_has_cores_and_a_bandwidth_between_ranks() -> None:
    """Links between accelerators are faster than the detour through host memory."""
    for device in ACCELERATORS.values():
        assert device.cores > 0
        assert device.interconnect >= device.link / 2 > 0
    assert Accelerator(name="cpu", flops=1e12).interconnect == 0


def test_every_format_has_an_update_speed() -> None:
    assert UPDATE_SECONDS.keys() == FORMATS.keys()
