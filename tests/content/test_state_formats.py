"""State formats: a split master is exact, smaller moments train as fp32 does, and nothing depends on the paging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.content.encoding import decode, encode
from infinity.content.format import FORMATS, SHARD_ALIGNMENT, StateFormat
from infinity.errors import ConfigError
from infinity.formats.dcp import DcpExport
from support import models
from support.ranks import RankPool
from support.resharding import begin, everything, go_on, newest, same
from support.session import EVERY, STEPS, Session
from support.tables import one_of, variants
from support.traffic import STEADY, WARM, as_planned, traffic
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

SMALL = ("bf16-moments", "8bit")
ADAM = (("exp_avg", "float32"), ("exp_avg_sq", "float32"))


def fp32(upper: int) -> torch.Tensor:
    """Return all 2^16 numbers with these upper 16 bits."""
    bits = (upper << 16) + torch.arange(1 << 16)
    return bits.where(bits < 1 << 31, bits - (1 << 32)).to(torch.int32).view(torch.float32)


# The split master #

EXPONENTS = (0x0000, 0x0080, 0x2000, 0x3F80, 0x6000, 0x7F00, 0x7F80)  # zero and denormals first, inf and NaN last
UPPER = [e + mantissa for e in EXPONENTS for mantissa in (0, 1, 0x3F, 0x40, 0x7E, 0x7F)]


@pytest.mark.parametrize("sign", [0, 0x8000])
def test_a_split_master_is_exact(sign: int) -> None:
    """All 2^16 remainders; even, odd and carrying mantissas; ties, denormals, what rounds to infinity, inf and NaN."""
    for upper in UPPER:
        master = fp32(sign | upper)
        weights, lower, rounded_up = encode(master, "split")
        assert torch.equal(weights.view(torch.int16), master.to(torch.bfloat16).view(torch.int16))
        found = decode((weights, lower.contiguous(), rounded_up), "split")
        exact = found.view(torch.int32) == master.view(torch.int32)
        assert (exact | (found.isnan() & master.isnan())).all(), hex(upper)
        assert (weights.nbytes, lower.nbytes, rounded_up.nbytes) == (2 << 16, 2 << 16, 1 << 13)


def test_sixteen_bits_would_not_do() -> None:
    """Both ties beside an even weight have the same lower half: only the bit tells them apart."""
    below, above = fp32(0x3F7F)[0x8000], fp32(0x3F80)[0x8000]
    (one, lower, up), (other, same_lower, down) = (
        encode(tie.repeat(SHARD_ALIGNMENT), "split") for tie in (below, above)
    )
    assert below != above
    assert torch.equal(one, other)
    assert torch.equal(lower, same_lower)
    assert not torch.equal(up, down)


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


@pytest.mark.parametrize(("recipe", "paging"), one_of(2, CASES))
def test_a_split_master_changes_no_bit(recipe: Recipe, paging: Paging, tmp_path: Path) -> None:
    """Losses, norms, parameters and moments equal those in memory."""
    assert compare(recipe, paging, str(tmp_path)) == []


@pytest.mark.parametrize("recipe", [Recipe(model="toy"), Recipe(model="gpt2", clip=0.5, steps=2)], ids=["toy", "gpt2"])
def test_a_split_master_changes_no_bit_on_two_ranks(recipe: Recipe, tmp_path: Path, pair: RankPool) -> None:
    """Even and uneven shards."""
    assert pair.run(compare, recipe, LEAST, str(tmp_path)) == [[], []]


def test_weights_from_fp16_are_exact(tmp_path: Path) -> None:
    """One in eight of them is a tie; what is loaded into the model, and saved from it, is the same."""
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


def rounded(values: torch.Tensor, encoding: str, step: int | None = None) -> torch.Tensor:
    """Return what is left of values that were stored."""
    return decode(encode(values, encoding, step), encoding)


@pytest.mark.parametrize("encoding", ["bfloat16", "8bit"])
@pytest.mark.parametrize("squared", [False, True])
def test_moments_are_rounded_without_bias(encoding: str, squared: bool) -> None:
    """The mean over steps is the value, also of small numbers beside large ones; the same step gives the same bits."""
    torch.manual_seed(0)
    values = torch.randn(1 << 12) * torch.logspace(-3, 0, 1 << 12)
    values = values.square() if squared else values
    steps = 500
    found = [rounded(values, encoding, step).double() for step in range(steps)]
    error = (torch.stack(found).mean(0) - values).abs() / values.abs()
    spacing = 2**-7 if encoding == "bfloat16" else 1 / 8
    seldom = 5 * spacing / 2 / steps**0.5
    assert error.quantile(0.99) < seldom
    assert torch.equal(rounded(values, encoding, 3), rounded(values, encoding, 3))
    assert not torch.equal(found[3], found[4])


@pytest.mark.parametrize("encoding", ["bfloat16", "8bit"])
def test_a_second_moment_falls(encoding: str) -> None:
    """Without gradients it halves in 693 steps of beta2 = 0.999; rounded to nearest it would stay for ever."""
    moments = torch.rand(1 << 12) + 0.5
    falling, stuck = moments, moments
    for step in range(693):
        falling = rounded(falling * 0.999, encoding, step)
        stuck = rounded(stuck * 0.999, encoding)
    assert abs(float(falling.mean() / moments.mean()) - 0.5) < 0.02
    assert float(stuck.mean() / moments.mean()) > 0.9


def test_codes_keep_three_bits() -> None:
    """To nearest: 1/16 of the value, down to 2^-16 of the block's largest, or 2^-32 where none is negative."""
    torch.manual_seed(0)
    for least, values in ((2.0**-16, torch.randn(1 << 16)), (2.0**-32, torch.randn(1 << 16).square())):
        for scale in (1e-30, 1e-8, 1.0, 1e20):
            given = values * scale
            error = (rounded(given, "8bit") - given).abs().view(-1, SHARD_ALIGNMENT)
            blocks = given.abs().view(-1, SHARD_ALIGNMENT)
            assert (error <= blocks / 16 + blocks.amax(1, keepdim=True) * least).all()
    assert not rounded(torch.zeros(SHARD_ALIGNMENT), "8bit", 1).any()
    assert not rounded(-torch.zeros(SHARD_ALIGNMENT), "8bit", 1).any()


@pytest.mark.parametrize("encoding", ["bfloat16", "8bit"])
@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000, 0x7F800000, -0x800000, 0x7FFFFFFF, -1, 0x7F800001])
def test_what_is_not_finite_stays_so(encoding: str, bits: int) -> None:
    """It is seen, not turned into a number, whatever bits of a NaN it has; other blocks are untouched."""
    values = torch.ones(2 * SHARD_ALIGNMENT)
    values.view(torch.int32)[3] = bits
    for step in (None, 7):
        found = rounded(values, encoding, step)
        assert not found[3].isfinite()
        assert torch.equal(found[SHARD_ALIGNMENT:], values[SHARD_ALIGNMENT:])


@pytest.mark.parametrize("name", SMALL)
def test_paging_changes_no_bit_of_smaller_moments(name: str, tmp_path: Path) -> None:
    """Rounding at random is the same for every host cache, page size and update schedule."""
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
    ("name", "policy", "most"), [("bf16-moments", "bf16", 0.01), ("8bit", "bf16", 0.03), ("8bit", "fp32", 0.03)]
)
def test_the_loss_falls_as_in_fp32(name: str, policy: str, most: float, tmp_path: Path) -> None:
    """From 5.0 to below 0.1, at every step no farther away than this; also where the weights are the master."""
    recipe = Recipe(model="toy", steps=40, policy=policy)
    expected, found = in_memory(recipe), paged(recipe, Paging(host_cache="least", format=name), tmp_path)
    assert found.losses[0] == expected.losses[0] > 4.9
    assert max(abs(a - b) for a, b in zip(expected.losses, found.losses, strict=True)) < most
    assert max(expected.losses[-1], found.losses[-1]) < 0.1


# Checkpoints #


@pytest.mark.parametrize("name", ["split", *SMALL])
def test_a_resumed_run_is_bit_equal(name: str, tmp_path: Path) -> None:
    """Random rounding goes on with the step, whoever asks."""
    runs = [tmp_path / "undisturbed", tmp_path / "resumed"]
    for run in runs:
        run.mkdir()
    state = {"format": name}
    with Session(runs[0], state=state) as session:
        undisturbed = session.run()
    with Session(runs[1], state=state) as session:
        session.run(EVERY)
    with Session(runs[1], state=state, run={"resume": "latest"}) as session:
        assert session.optimizer.steps == EVERY < STEPS
        assert session.run() == undisturbed[EVERY:]


@pytest.mark.parametrize("model", ["toy", "frozen"])
def test_another_world_and_format_change_no_bit(model: str, pair: RankPool, tmp_path: Path) -> None:
    """fp32 on one rank, split on two, fp32 on one again; the second half is trained on two, as without the detour."""
    recipe = Recipe(model=model, steps=2)
    begin(recipe, str(tmp_path))
    first = everything(newest(tmp_path))
    assert pair.run(go_on, recipe, str(tmp_path), 0, "split")[0][0] == 2
    assert same(first, everything(newest(tmp_path))) == []
    assert pair.run(go_on, recipe, str(tmp_path), 1, "split")[0][0] == 2
    trained = everything(newest(tmp_path))
    assert go_on(recipe, str(tmp_path), 0)[0] == 3
    assert same(trained, everything(newest(tmp_path))) == []
    assert same(first, trained) != []


def test_a_run_goes_on_with_smaller_moments(tmp_path: Path) -> None:
    """Weights and masters are the same; moments are rounded once."""
    recipe = Recipe(model="toy", steps=2)
    begin(recipe, str(tmp_path))
    before = everything(newest(tmp_path))
    for name, error in (("bf16-moments", 2**-8), ("8bit", 1 / 16 + 2**-8)):
        go_on(recipe, str(tmp_path), 0, name)
        found = everything(newest(tmp_path))
        changed = same(before, found)
        assert changed
        for key in changed:
            assert key.endswith(("exp_avg", "exp_avg_sq"))
            assert (found[key] - before[key]).norm() <= error * before[key].norm(), key


@pytest.mark.parametrize("name", ["split", *SMALL])
def test_exports_are_decoded(name: str, tmp_path: Path) -> None:
    """Whole parameters and states of a checkpoint are what the run has, any rows of them too, and dcp takes them."""
    with offloaded(Recipe(model="toy"), Paging(host_cache="least", format=name), tmp_path) as (model, optimizer):
        train(Recipe(model="toy", steps=3), model, optimizer, Outcome())
        optimizer.save_checkpoint()
        expected = {parameter: optimizer.read_state(parameter) for parameter, _ in model.named_parameters()}
    reader = newest(tmp_path)
    for index, spec in enumerate(reader.tensors):
        for section in ("master", "exp_avg", "exp_avg_sq"):
            whole = reader.read(index, section)
            assert whole.dtype == reader.dtype(index, section) == torch.float32
            assert torch.equal(whole.reshape(-1), expected[spec.names[0]][section])
            assert torch.equal(reader.read(index, section, rows=(1, spec.shape[0])), whole[1:])
    DcpExport(reader).write(tmp_path / "dcp", file_bytes=MIB)
    weights = tmp_path / "dcp"
    model = models.build("toy", meta=True)
    host = {"memory": {"host_bytes": 64 * MIB, "page_bytes": 64 * KIB}}
    config = settings(tmp_path, Paging(format="fp32"), 64 * MIB, **host)
    with infinity.offload(model, torch.optim.AdamW(model.parameters(), fused=True), config, weights=weights) as loaded:
        for parameter, states in expected.items():
            found = loaded.read_state(parameter)
            assert all(torch.equal(value, found[key]) for key, value in states.items() if key != "step")


# What it costs, and where it does not apply #


@pytest.mark.parametrize(
    ("name", "state", "most"), [("split", 12.125, 26.3), ("bf16-moments", 8.125, 18.3), ("8bit", 6.1875, 14.5)]
)
def test_bytes_per_parameter_with_nothing_cached(name: str, state: float, most: float, tmp_path: Path) -> None:
    """Weights twice, state twice, in a host cache that holds no more than one FSDP module."""
    paging = Paging(host_cache="least", page=448 * KIB, format=name, update_schedule="in_backward")
    seen = traffic(Recipe(model="even", steps=WARM), paging, str(tmp_path))
    assert seen["resident"] == 0
    assert seen["state"] == state * seen["parameters"], "this model is meant to have no padding"
    assert as_planned(seen["read"], seen["planned_read"]), seen
    assert (seen["read"] + seen["written"]) / STEADY / seen["parameters"] <= most


def refusal(recipe: Recipe, name: str, folder: Path) -> str:
    """Return the message with which a format is refused."""
    with pytest.raises(ConfigError) as caught, offloaded(recipe, Paging(host_cache="all", format=name), folder):
        pass
    return str(caught.value)


@pytest.mark.parametrize(("policy", "name"), [("fp32", "split"), ("pure_bf16", "split"), ("pure_bf16", "8bit")])
def test_a_format_that_would_change_nothing_is_refused(policy: str, name: str, tmp_path: Path) -> None:
    """There is no fp32 master beside bf16 weights, or no fp32 state: who asks for less is told."""
    assert "state.format" in refusal(Recipe(model="toy", policy=policy), name, tmp_path)


def test_a_format_concerns_what_it_can_be_of() -> None:
    """Other dtypes are stored as they are; what cannot be is not read from a description."""
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
