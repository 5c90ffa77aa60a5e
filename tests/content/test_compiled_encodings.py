"""Tests of encodings compiled by numba: bitwise equal to the reference, which is used if they are not available."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.content import compiled, kernels, reference
from infinity.content.encoding import decode, encode
from infinity.content.format import FORMATS, SHARD_ALIGNMENT
from infinity.run import inspection
from support.tables import all_but
from support.train import Paging, Recipe, offloaded, paged

ENCODINGS = ("split", "bfloat16", "8bit")
STEPS = (None, 0, 1, 7, 1 << 31, 10**12)
SPECIAL = (
    0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000,
    0x7DFFFFFF, 0x7E000000, 0x7E7FFFFF, 0x7F000000, 0x7F7F7FFF, 0x7F7FFFFF, 0x7F800000,
    0x7F800001, 0x7FC00000, 0x7FFFFFFF,
)  # fmt: skip
"""Zero, denormals, bf16 ties, the largest numbers, infinity and NaNs; each one is tested with both signs."""


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    found = compiled.prepare()
    assert found.kernels is not None, found.reason


def from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return the fp32 numbers with the given int64 bit patterns."""
    return bits.where(bits < 1 << 31, bits - (1 << 32)).to(torch.int32).view(torch.float32)


def bitwise_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two components are bitwise equal."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def check(values: torch.Tensor, encoding: str, step: int | None) -> None:
    """Compare encoding and decoding with the reference, with new memory and with a view of larger memory."""
    before = values.clone()
    expected = reference.encode(values, encoding, step)
    found = encode(values, encoding, step)
    assert all(map(bitwise_equal, found, expected)), (encoding, step)
    wider = [torch.ones(len(component) + 2, dtype=component.dtype) for component in expected]
    into = [component[1:-1] for component in wider]
    written = encode(values, encoding, step, into)
    assert all(map(bitwise_equal, written, expected))
    assert all(bool(component[0] == 1) and bool(component[-1] == 1) for component in wider)
    assert all(one is other for one, other in zip(written, into, strict=True))
    assert bitwise_equal(decode(found, encoding), reference.decode(expected, encoding))
    assert bitwise_equal(values, before)


def test_all_upper_halves_match_the_reference(subtests: pytest.Subtests) -> None:
    """All 2^16 signs, exponents and mantissas of bf16, each with one lower half, in order and shuffled."""
    upper = torch.arange(1 << 16)
    bits = (upper << 16) + upper * 40503 % (1 << 16)
    shuffled = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))
    finite = from_bits(bits)
    finite = finite[finite.abs() < 2.0**120]  # larger numbers are left to the reference
    finite = finite[: len(finite) // SHARD_ALIGNMENT * SHARD_ALIGNMENT]
    for encoding, step in product(ENCODINGS, STEPS):
        with subtests.test(encoding, step=step):
            for values in (from_bits(bits), from_bits(bits[shuffled]), finite, finite.abs()):
                check(values, encoding, step)


def test_special_numbers_match_the_reference(subtests: pytest.Subtests) -> None:
    """A special number alone, at the boundaries of its block, and as the entire block; other blocks are ordinary."""
    torch.manual_seed(0)
    ordinary = torch.randn(3 * SHARD_ALIGNMENT)
    places = (SHARD_ALIGNMENT, 2 * SHARD_ALIGNMENT - 1, slice(SHARD_ALIGNMENT, 2 * SHARD_ALIGNMENT))
    for encoding, bits, sign in product(ENCODINGS, SPECIAL, (0, 1 << 31)):
        with subtests.test(f"{encoding} {sign | bits:#x}"):
            for values, place in product((ordinary, ordinary.square()), places):
                given = values.clone()
                given[place] = from_bits(torch.tensor([sign | bits]))[0]
                check(given, encoding, 5)


PATTERNS = st.one_of(
    st.integers(0, (1 << 32) - 1),
    st.sampled_from(SPECIAL),
    st.integers(0x30000000, 0x40000000),
    st.integers(0xB0000000, 0xC0000000),
)


@settings(max_examples=150, deadline=None)
@given(
    patterns=st.lists(PATTERNS, min_size=1, max_size=2 * SHARD_ALIGNMENT),
    encoding=st.sampled_from(ENCODINGS),
    step=st.none() | st.integers(0, 1 << 40),
)
def test_arbitrary_bit_patterns_match_the_reference(patterns: list[int], encoding: str, step: int | None) -> None:
    count = -(-len(patterns) // SHARD_ALIGNMENT) * SHARD_ALIGNMENT
    check(from_bits(torch.tensor((patterns * count)[:count])), encoding, step)


def test_all_codes_and_scales_are_decoded_like_the_reference() -> None:
    """This includes codes and scales that the encoder never writes."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(1 << 14)
    for quarter in range(4):
        scales = torch.arange(quarter << 14, (quarter + 1) << 14).to(torch.int16).view(torch.bfloat16)
        components = codes, scales.repeat_interleave(256 // SHARD_ALIGNMENT)
        assert bitwise_equal(decode(components, "8bit"), reference.decode(components, "8bit"))


def test_all_split_weights_are_decoded_like_the_reference() -> None:
    """All weights are combined with some remainder and rounding bits."""
    every = torch.arange(1 << 16)
    weights = every.to(torch.int16).view(torch.bfloat16)
    lower, up = (every * 31153 % (1 << 16)).to(torch.int16), (every[: 1 << 13] * 37 % 256).to(torch.uint8)
    assert bitwise_equal(decode((weights, lower, up), "split"), reference.decode((weights, lower, up), "split"))


def test_flushing_denormals_matches_the_reference() -> None:
    """Such a thread computes different 8-bit codes, both with PyTorch and with the compiled kernels."""
    torch.manual_seed(0)
    values = torch.randn(4 * SHARD_ALIGNMENT)
    values[SHARD_ALIGNMENT::2] = -(2.0**-140)
    values[2 * SHARD_ALIGNMENT :] *= 2.0**-130
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        expected, found = reference.encode(values, "8bit", 3), encode(values, "8bit", 3)
    finally:
        torch.set_flush_denormal(False)
    assert all(map(bitwise_equal, found, expected))


def test_compiled_kernels_encode_finite_numbers() -> None:
    """Input with a NaN is left to the reference, and no kernel is compiled for another argument type."""
    cpu = compiled.kernels(torch.device("cpu"))
    values = torch.randn(2 * SHARD_ALIGNMENT)
    for encoding in ENCODINGS:
        made = [component.contiguous().zero_() for component in reference.encode(values.clone(), encoding, 1)]
        assert cpu.encode(values, encoding, 1, made)
        assert all(map(bitwise_equal, made, reference.encode(values, encoding, 1)))
        broken = values.clone()
        broken[3] = torch.nan
        assert not cpu.encode(broken, encoding, 1, made)
    assert compiled.kernels(torch.device("meta")) is None


def test_kernels_release_the_interpreter_lock() -> None:
    """Another thread counts while one encodes."""
    values, begun, ended = torch.randn(1 << 22), threading.Event(), threading.Event()

    def work() -> None:
        into = encode(values, "8bit", 1)
        begun.set()
        for step in range(20):
            compiled.kernels(values.device).encode(values, "8bit", step, into)
        ended.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # the interpreter does not ask threads to release the lock
    thread = threading.Thread(target=work)
    count = 0
    try:
        thread.start()
        begun.wait()
        while not ended.is_set():
            count += 1
            ended.wait(1e-4)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert count > 20


def test_run_prepares_the_kernels_of_its_format(
    subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run without kernels logs one warning before its first step; fp32 needs no kernels."""
    none = compiled.Prepared(None, "numba was removed by the test", 0.0)
    prepare = mock.Mock(return_value=none)
    monkeypatch.setattr(inspection, "prepare", prepare)
    caplog.set_level("WARNING", "infinity")
    for name in FORMATS:
        prepare.reset_mock()
        caplog.clear()
        with offloaded(Recipe(model="toy"), Paging(format=name), tmp_path):
            pass
        warnings = [record.getMessage() for record in caplog.records if "compiled kernels" in record.getMessage()]
        with subtests.test(name):
            assert prepare.call_count == len(warnings) == (name != "fp32")
            assert all(f'"{name}"' in line and "numba was removed by the test" in line for line in warnings)


@pytest.mark.parametrize("name", all_but(["split", "bf16-moments", "8bit"], "split", "bf16-moments"))
def test_run_without_kernels_is_bitwise_equal(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and states match in the smallest host cache too, where pages end inside a decoded range."""
    recipe, paging, found = Recipe(model="toy", groups=True), Paging(host_cache="least", format=name), []
    ready = compiled.prepare()
    for number, prepared in enumerate((ready, compiled.Prepared(None, "switched off", 0.0))):
        monkeypatch.setattr(compiled, "_prepared", prepared)
        (folder := tmp_path / str(number)).mkdir()
        found.append(paged(recipe, paging, folder))
    one, other = found
    assert one.losses == other.losses
    for parameter, states in one.state.items():
        assert all(torch.equal(value, other.state[parameter][kind]) for kind, value in states.items())


# Unavailable kernels #


def test_kernels_may_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NUMBA_DISABLE_JIT, there are no kernels: interpreted by Python, they would be slower than PyTorch."""
    monkeypatch.setattr("numba.core.config.DISABLE_JIT", 1)
    monkeypatch.setattr(compiled, "_prepared", None)
    assert compiled.prepare().kernels is None
    assert compiled.prepare().reason == "NUMBA_DISABLE_JIT is set"


def test_failed_preparation_selects_the_reference(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the reason that the run logs."""
    for error, reason in [
        (ModuleNotFoundError("No module named 'numba'", name="numba"), "pip install 'infinity-offload[jit]'"),
        (ImportError("Numba needs NumPy 2.5 or less"), "ImportError: Numba needs NumPy 2.5 or less"),
        (RuntimeError("LLVM\nat length"), "RuntimeError: LLVM"),
    ]:
        monkeypatch.setattr(compiled, "_differs", mock.Mock(side_effect=error))
        monkeypatch.setattr(compiled, "_prepared", None)
        with subtests.test(reason):
            found = compiled.prepare()
            assert found.kernels is None
            assert reason in found.reason
            values = torch.randn(SHARD_ALIGNMENT)
            assert all(map(bitwise_equal, encode(values, "8bit", 1), reference.encode(values, "8bit", 1)))


def flip_a_bit(kernel: Callable[..., bool], *arguments: Any) -> bool:
    """Run an encoding kernel and invert one bit of one component."""
    done = kernel(*arguments)
    arguments[2 if kernel is kernels.encode_8bit else 1][77] ^= 1
    return done


def test_kernels_that_differ_from_the_reference_are_rejected(subtests: pytest.Subtests) -> None:
    """The kernels are compared before their first use."""
    for encoding in ENCODINGS:
        name = f"encode_{encoding}"
        wrong = {**vars(kernels), name: partial(flip_a_bit, getattr(kernels, name))}
        with subtests.test(encoding):
            assert compiled._differs(compiled.Kernels(SimpleNamespace(**wrong)), encoding)
            assert not compiled._differs(compiled.Kernels(kernels), encoding)
