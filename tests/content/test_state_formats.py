"""Tests of state formats: a split master is exact, smaller moments train like fp32, and paging changes no bits."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import infinity
from infinity.content.encoding import decode, encode
from infinity.content.format import FORMATS, SHARD_ALIGNMENT, StateFormat
from infinity.content.spans import full_spans
from infinity.errors import ConfigError
from infinity.formats.dcp import export_dcp
from support import models
from support.ranks import RankPool
from support.resharding import all_tensors, newest_checkpoint, resume_and_train, train_and_save, unequal_names
from support.session import EVERY, STEPS, Session
from support.tables import WIDE, all_but, only, variants
from support.traffic import STEADY, WARM, matches_plan, traffic
from support.train import (
    KIB,
    MIB,
    Outcome,
    Paging,
    Recipe,
    compare,
    in_memory,
    offloaded,
    paged,
    settings,
    train,
)

SMALLER_MOMENTS = ("bf16-moments", "8bit")
ADAM = (("exp_avg", "float32"), ("exp_avg_sq", "float32"))


def numbers_with_upper_half(upper: int) -> torch.Tensor:
    """Return all 2^16 fp32 numbers with the given upper 16 bits."""
    bits = (upper << 16) + torch.arange(1 << 16)
    return bits.where(bits < 1 << 31, bits - (1 << 32)).to(torch.int32).view(torch.float32)


# The split master #

EXPONENTS = (0x0000, 0x0080, 0x2000, 0x3F80, 0x6000, 0x7F00, 0x7F80)  # zero and denormals first, inf and NaN last
UPPER = [e + mantissa for e in EXPONENTS for mantissa in (0, 1, 0x3F, 0x40, 0x7E, 0x7F)]


def test_split_master_is_exact() -> None:
    """All 2^16 remainders are exact with even, odd and carrying mantissas, ties, denormals, infinity and NaN."""
    for upper in [sign | upper for upper in UPPER for sign in (0, 0x8000)]:
        master = numbers_with_upper_half(upper)
        weights, lower, rounded_up = encode(master, "split")
        assert torch.equal(weights.view(torch.int16), master.to(torch.bfloat16).view(torch.int16))
        found = decode((weights, lower.contiguous(), rounded_up), "split")
        exact = found.view(torch.int32) == master.view(torch.int32)
        assert (exact | (found.isnan() & master.isnan())).all(), hex(upper)
        assert (weights.nbytes, lower.nbytes, rounded_up.nbytes) == (2 << 16, 2 << 16, 1 << 13)


LEAST = Paging(host_cache="least", format="split")
SPLIT = {
    "least": LEAST,
    "forward": Paging(host_cache="least", format="split", update_schedule="in_forward"),
    "after": Paging(format="split", update_schedule="after_backward"),
}
CASES = [
    *variants({"llama": Recipe(), "clip": Recipe(clip=0.5), "toy": Recipe(model="toy", groups=True)}, SPLIT),
    *variants(
        {
            "accumulate": Recipe(model="toy", micro=2),
            "frozen": Recipe(model="frozen", evaluate=True),
            "spare": Recipe(model="spare", clip=0.5),
            "tied": Recipe(model="tied"),
            "radam": Recipe(model="toy", optimizer="radam"),
            "momentum": Recipe(model="toy", optimizer="sgd_nesterov"),
        },
        {"least": LEAST},
    ),
    *variants(
        {"toy": Recipe(model="toy")},
        {
            "delays": Paging(host_cache="least", format="split", delays=True),
            "all": Paging(host_cache="all", format="split"),
        },
    ),
]


@pytest.mark.parametrize(("recipe", "paging"), only(CASES, "llama-least", "clip-forward", "toy-after"))
def test_split_master_training_matches_training_in_memory(recipe: Recipe, paging: Paging, tmp_path: Path) -> None:
    """Losses, norms, parameters and moments are bitwise equal."""
    assert compare(recipe, paging, str(tmp_path)) == []


def test_split_master_on_two_ranks_matches_training_in_memory(tmp_path: Path, pair: RankPool) -> None:
    """The shards are uneven."""
    recipe = Recipe(model="gpt2", clip=0.5, steps=2)
    assert pair.run(compare, recipe, LEAST, str(tmp_path)) == [[], []]


def test_fp16_weights_in_a_split_master_are_exact(tmp_path: Path) -> None:
    """One in eight is a tie, and both copying into and reading from the model preserve it."""
    with offloaded(Recipe(model="toy"), LEAST, tmp_path) as (model, _):
        values = {name: torch.randn(param.shape).half().float() for name, param in model.named_parameters()}
        ties = sum(int((value.view(torch.int32) & 0xFFFF == 0x8000).sum()) for value in values.values())
        assert ties > 1000
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.to_local().copy_(values[name])
        for name, param in model.named_parameters():
            assert torch.equal(param.to_local().clone(), values[name]), name


# Smaller moments #


def round_trip(values: torch.Tensor, encoding: str, step: int | None = None) -> torch.Tensor:
    """Return values after encoding and decoding."""
    return decode(encode(values, encoding, step), encoding)


def test_moments_are_rounded_without_bias(subtests: pytest.Subtests) -> None:
    """The mean over steps is unbiased for small numbers next to large ones, and rounding is deterministic per step."""
    torch.manual_seed(0)
    signed, steps = torch.randn(1 << 12) * torch.logspace(-3, 0, 1 << 12), 500
    for (encoding, spacing), values in product({"bfloat16": 2**-7, "8bit": 1 / 8}.items(), (signed, signed.square())):
        with subtests.test(encoding, squared=values is not signed):
            found = [round_trip(values, encoding, step).double() for step in range(steps)]
            error = (torch.stack(found).mean(0) - values).abs() / values.abs()
            assert error.quantile(0.99) < 5 * spacing / 2 / steps**0.5
            assert torch.equal(round_trip(values, encoding, 3), round_trip(values, encoding, 3))
            assert not torch.equal(found[3], found[4])


def test_second_moment_decays() -> None:
    """Without gradients it halves in 693 steps with beta2 = 0.999; rounding to nearest would keep it constant."""
    for encoding in ("bfloat16", "8bit"):
        falling = stuck = moments = torch.rand(1 << 12) + 0.5
        for step in range(693):
            falling = round_trip(falling * 0.999, encoding, step)
            stuck = round_trip(stuck * 0.999, encoding)
        assert abs(float(falling.mean() / moments.mean()) - 0.5) < 0.02, encoding
        assert float(stuck.mean() / moments.mean()) > 0.9, encoding


def test_8bit_codes_keep_three_bits() -> None:
    """The error is at most 1/16, down to 2^-16 of the block's maximum, or 2^-32 if no value is negative."""
    torch.manual_seed(0)
    for least, values in ((2.0**-16, torch.randn(1 << 16)), (2.0**-32, torch.randn(1 << 16).square())):
        for scale in (1e-30, 1e-8, 1.0, 1e20):
            given = values * scale
            error = (round_trip(given, "8bit") - given).abs().view(-1, SHARD_ALIGNMENT)
            blocks = given.abs().view(-1, SHARD_ALIGNMENT)
            assert (error <= blocks / 16 + blocks.amax(1, keepdim=True) * least).all()
    assert not round_trip(torch.zeros(SHARD_ALIGNMENT), "8bit", 1).any()
    assert not round_trip(-torch.zeros(SHARD_ALIGNMENT), "8bit", 1).any()


def test_nonfinite_values_remain_nonfinite() -> None:
    """This holds for all bit patterns of NaN, and other blocks are unchanged."""
    patterns = (0x7FC00000, -0x400000, 0x7F800000, -0x800000, 0x7FFFFFFF, -1, 0x7F800001)
    for bits, encoding, step in product(patterns, ("bfloat16", "8bit"), (None, 7)):
        values = torch.ones(2 * SHARD_ALIGNMENT)
        values.view(torch.int32)[3] = bits
        found = round_trip(values, encoding, step)
        assert not found[3].isfinite(), (bits, encoding, step)
        assert torch.equal(found[SHARD_ALIGNMENT:], values[SHARD_ALIGNMENT:]), (bits, encoding, step)


@pytest.mark.parametrize("name", all_but(SMALLER_MOMENTS, "bf16-moments"))
def test_smaller_moments_do_not_depend_on_paging(name: str, tmp_path: Path) -> None:
    """Stochastic rounding is the same for every host cache, page size and update schedule."""
    recipe = Recipe(model="toy", groups=True)
    found = []
    for number, (host_cache, update_schedule, page) in enumerate(
        [("all", "after_backward", 64), ("least", "in_backward", 64), ("least", "in_forward", 192)]
    ):
        (folder := tmp_path / str(number)).mkdir()
        found.append(
            paged(
                recipe,
                Paging(host_cache=host_cache, update_schedule=update_schedule, page=page * KIB, format=name),
                folder,
            )
        )
    for other in found[1:]:
        assert other.losses == found[0].losses
        for parameter, states in found[0].state.items():
            assert all(torch.equal(value, other.state[parameter][kind]) for kind, value in states.items())


@pytest.mark.parametrize(
    ("name", "policy", "most"),
    [
        ("8bit", "bf16", 0.03),
        pytest.param("8bit", "fp32", 0.03, marks=WIDE),
        pytest.param("bf16-moments", "bf16", 0.01, marks=WIDE),
    ],
)
def test_loss_with_smaller_moments_matches_fp32(name: str, policy: str, most: float, tmp_path: Path) -> None:
    """The loss falls from 5.0 to below 0.1 and differs by at most `most` at every step, also with fp32 weights."""
    recipe = Recipe(model="toy", steps=40, policy=policy)
    expected, found = in_memory(recipe), paged(recipe, Paging(host_cache="least", format=name), tmp_path)
    assert found.losses[0] == expected.losses[0] > 4.9
    assert max(abs(a - b) for a, b in zip(expected.losses, found.losses, strict=True)) < most
    assert max(expected.losses[-1], found.losses[-1]) < 0.1


# Checkpoints #


@pytest.mark.parametrize("name", all_but(["split", *SMALLER_MOMENTS], "split", "bf16-moments"))
def test_resumed_run_with_state_format_is_bitwise_equal(name: str, tmp_path: Path) -> None:
    """Stochastic rounding depends only on the step."""
    runs = [tmp_path / "uninterrupted", tmp_path / "resumed"]
    for run in runs:
        run.mkdir()
    state = {"format": name}
    with Session(runs[0], state=state) as session:
        uninterrupted = session.run()
    with Session(runs[1], state=state) as session:
        session.run(EVERY)
    with Session(runs[1], state=state, run={"resume": "latest"}) as session:
        assert session.optimizer.steps == EVERY < STEPS
        assert session.run() == uninterrupted[EVERY:]


@pytest.mark.parametrize("model", all_but(["toy", "frozen"], "toy"))
def test_resharding_and_format_changes_are_exact(model: str, pair: RankPool, tmp_path: Path) -> None:
    """fp32 on one rank, split on two, fp32 on one: the state does not change without steps, and training matches."""
    recipe = Recipe(model=model, steps=2)
    train_and_save(recipe, str(tmp_path))
    first = all_tensors(newest_checkpoint(tmp_path))
    assert pair.run(resume_and_train, recipe, str(tmp_path), 0, "split")[0][0] == 2
    assert unequal_names(first, all_tensors(newest_checkpoint(tmp_path))) == []
    assert pair.run(resume_and_train, recipe, str(tmp_path), 1, "split")[0][0] == 2
    trained = all_tensors(newest_checkpoint(tmp_path))
    assert resume_and_train(recipe, str(tmp_path), 0)[0] == 3
    assert unequal_names(trained, all_tensors(newest_checkpoint(tmp_path))) == []
    assert unequal_names(first, trained) != []


def test_run_resumes_with_smaller_moments(tmp_path: Path) -> None:
    """Weights and masters are unchanged, and moments are rounded once."""
    recipe = Recipe(model="toy", steps=2)
    train_and_save(recipe, str(tmp_path))
    before = all_tensors(newest_checkpoint(tmp_path))
    for name, error in (("bf16-moments", 2**-8), ("8bit", 1 / 16 + 2**-8)):
        resume_and_train(recipe, str(tmp_path), 0, name)
        found = all_tensors(newest_checkpoint(tmp_path))
        changed = unequal_names(before, found)
        assert changed
        for key in changed:
            assert key.endswith(("exp_avg", "exp_avg_sq"))
            assert (found[key] - before[key]).norm() <= error * before[key].norm(), key


@pytest.mark.parametrize("name", all_but(["split", *SMALLER_MOMENTS], "bf16-moments"))
def test_exports_of_encoded_states_are_decoded(name: str, tmp_path: Path) -> None:
    """Full parameters and states of a checkpoint, any rows of them, and DCP exports match the run."""
    with offloaded(Recipe(model="toy"), Paging(host_cache="least", format=name), tmp_path) as (model, optimizer):
        train(Recipe(model="toy", steps=3), model, optimizer, Outcome())
        optimizer.save_checkpoint()
        expected = {parameter: optimizer.read_state(parameter) for parameter, _ in model.named_parameters()}
    reader = newest_checkpoint(tmp_path)
    for index, spec in enumerate(reader.tensors):
        for section in ("master", "exp_avg", "exp_avg_sq"):
            full = reader.read(index, section)
            assert full.dtype == reader.dtype(index, section) == torch.float32
            assert torch.equal(full.reshape(-1), expected[spec.names[0]][section])
            spans = (((1, spec.shape[0]),), *full_spans(spec.shape)[1:])
            assert torch.equal(reader.read(index, section, spans=spans), full[1:])
    export_dcp(reader, tmp_path / "dcp")
    weights = tmp_path / "dcp"
    model = models.build("toy", meta=True)
    host = {"memory": {"host_bytes": 64 * MIB, "page_bytes": 64 * KIB}}
    config = settings(tmp_path, Paging(format="fp32"), 64 * MIB, **host)
    with infinity.offload(model, torch.optim.AdamW(model.parameters(), fused=True), config, weights=weights) as loaded:
        for parameter, states in expected.items():
            found = loaded.read_state(parameter)
            assert all(torch.equal(value, found[key]) for key, value in states.items() if key != "step")


# Traffic and unsupported formats #


@pytest.mark.parametrize(
    ("name", "state", "most"),
    [
        ("8bit", 6.1875, 14.5),
        pytest.param("split", 12.125, 26.3, marks=WIDE),
        pytest.param("bf16-moments", 8.125, 18.3, marks=WIDE),
    ],
)
def test_bytes_per_parameter_of_state_formats_without_caching(
    name: str, state: float, most: float, tmp_path: Path
) -> None:
    """The host cache holds one FSDP module, so weights and state are each transferred twice."""
    paging = Paging(host_cache="least", page=448 * KIB, format=name, update_schedule="in_backward")
    seen = traffic(Recipe(model="even", steps=WARM), paging, str(tmp_path))
    assert seen["resident"] == 0
    assert seen["state"] == state * seen["parameters"], "the model must have no padding"
    assert matches_plan(seen["read"], seen["planned_read"]), seen
    assert (seen["read"] + seen["written"]) / STEADY / seen["parameters"] <= most


def unsupported_format_message(recipe: Recipe, name: str, folder: Path) -> str:
    """Return the message of the error that a format raises."""
    with pytest.raises(ConfigError) as caught, offloaded(recipe, Paging(host_cache="all", format=name), folder):
        pass
    return str(caught.value)


def test_format_without_effect_is_rejected(subtests: pytest.Subtests) -> None:
    """The policy has no fp32 master in addition to bf16 weights, or no fp32 state."""
    for policy, name in [("fp32", "split"), ("pure_bf16", "split"), ("pure_bf16", "8bit")]:
        with subtests.test(policy, name=name), TemporaryDirectory() as folder:
            tmp_path = Path(folder)
            assert "state.format" in unsupported_format_message(Recipe(model="toy", policy=policy), name, tmp_path)


def test_format_applies_to_fp32_components_only() -> None:
    """Other dtypes are stored unchanged, and invalid combinations raise."""
    mixed = StateFormat(param="bfloat16", master="float32", kinds=ADAM, grads=("float32",))
    sizes = {name: mixed.stored_as(name).state_bytes for name in FORMATS}
    assert sizes == {"fp32": 14, "split": 12.125, "bf16-moments": 8.125, "8bit": 6.1875}
    half = StateFormat(param="float16", master="float32", kinds=(("mask", "bool"), ADAM[0]))
    assert half.stored_as("8bit").encodings == (("exp_avg", "8bit"),)
    wrong: list[dict[str, Any]] = [
        {"param": "float16", "master": "float32", "encodings": (("master", "split"),)},
        {"param": "bfloat16", "encodings": (("master", "split"),)},
        {"param": "bfloat16", "master": "float32", "encodings": (("master", "8bit"),)},
        {"param": "bfloat16", "kinds": ADAM, "encodings": (("exp_avg", "split"),)},
        {"param": "bfloat16", "kinds": ADAM, "encodings": (("exp_avg", "8bit"), ("exp_avg", "8bit"))},
        {"param": "bfloat16", "kinds": (("exp_avg", "int32"),), "encodings": (("exp_avg", "8bit"),)},
        {"param": "bfloat16", "kinds": (*ADAM, *ADAM)},
    ]
    for fields in wrong:
        with pytest.raises(ValueError, match=r"cannot be stored|the same name"):
            StateFormat(**fields).check()
