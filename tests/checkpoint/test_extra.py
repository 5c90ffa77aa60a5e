"""Tests of `extra`: values are restored unchanged, or rejected before anything is written."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infinity.checkpoint.values import load_values, save_extra
from infinity.errors import CheckpointError, InfinityError
from infinity.schedule.pager import Pager
from infinity.schema import brief
from infinity.store.marker import look_for_runs
from support.ranks import RankPool
from support.session import Session

SUPPORTED: dict[str, Any] = {
    "numbers": [0, -1, 1 << 128, True, False, 0.1, -0.0, 5e-324, 1e308, math.inf, -math.inf],
    "texts": ["", "ü", "\x00", "\U0001f600"],
    "nothing": None,
    "nested": {"": [{}, [], [[1]]], "a.b['c']": {}},
    "subclasses": [OrderedDict(b=1, a=2), Counter("aab"), np.float64(0.1)],
    "tuples": [(), (1,), ((0.9, 0.999), [(None,)]), {"betas": (0.9, 0.999)}],
    "keys": {30: 1, None: {False: 2}, 0.5: (), "text": {"80": {80: []}}},
    "milestones": Counter([30, 80, 80]),
    "marks": [
        {"tuple": [1]},
        {"tensor": 1},
        {"pairs": []},
        {"pairs": [[1, 2]]},
        {"tuple": {"tuple": ()}},
        {"tuple": 1, "pairs": 2},
    ],
    "tuple": [1],
}
loop: list[Any] = []
loop.append(loop)
UNSUPPORTED: tuple[tuple[Any, str], ...] = (
    ({30: 1}, "extra is {30: 1}.* dict"),
    ({"a": [{"b": {(1, 2): 1}}]}, r"extra\['a'\]\[0\]\['b'\] has the key \(1, 2\)"),
    ({"a": {b"x": 1}}, r"a key of extra\['a'\] .*\bbytes"),
    ({"a": {"b": torch.ones(1)}}, r"extra\['a'\]\['b'\] .*\bTensor\b.* tolist\(\)"),
    ({"a": np.float32(1)}, r"extra\['a'\] .*\bfloat32\b"),
    ({"a": {1, 2}}, r"extra\['a'\] .*\bset\b"),
    ({"a": b"x"}, r"extra\['a'\] .*\bbytes\b"),
    ({"a": Path("x")}, r"extra\['a'\] .*\bPosixPath\b"),
    ({"a": "\ud83d\ude00"}, r"^extra\['a'\] .*hex\(\)"),
    ({"a": {"\ud800": 1}}, r"^a key of extra\['a'\] .*hex\(\)"),
    ({"a": 10**5000}, r"extra\['a'\] .*8192 bits"),
    ({"a": loop}, r"extra\['a'\].* nested more than 100 "),
    ([("a", 1)], r"extra is \[.* dict"),
    ("", "extra is ''.* dict"),
)


def test_supported_values_are_restored_unchanged(tmp_path: Path) -> None:
    """NaN and infinity are included, because scheduler states contain them."""
    with Session(tmp_path) as session:
        session.optimizer.save_checkpoint({**SUPPORTED, "nan": math.nan, "scheduler": session.scheduler.state_dict()})
    with Session(tmp_path, run={"resume": "latest"}) as session:
        found = session.optimizer.resumed_extra
    assert {name: found[name] for name in SUPPORTED} == SUPPORTED
    assert [repr(item) for item in found["numbers"]] == [repr(item) for item in SUPPORTED["numbers"]]
    assert math.isnan(found["nan"])


def test_unsupported_values_are_rejected_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error gives the position of the value and a fix, and the next checkpoint succeeds."""
    with Session(tmp_path) as session:
        session.step()
        monkeypatch.setattr(Pager, "flush", lambda _: pytest.fail("pages were written"))
        for extra, reason in UNSUPPORTED:
            with pytest.raises(CheckpointError, match=reason):
                session.optimizer.save_checkpoint(extra)
        monkeypatch.undo()
        (run,) = look_for_runs([tmp_path / "nvme0"])[0]
        assert list((run.roots[0] / "checkpoints").glob("step*")) == []
        session.save_checkpoint()
    with Session(tmp_path, run={"resume": "latest"}) as session:
        assert session.optimizer.steps == 1


def save_unsupported_on_one_rank(folder: str) -> str:
    """Save an unsupported value on rank 1; return the error message. Runs on every rank."""
    with Session(Path(folder)) as session:
        session.step()
        state = session.scheduler.state_dict()
        own = {"rank": {1}} if session.optimizer.run.ranks.rank else {}
        with pytest.raises(InfinityError) as caught:
            session.optimizer.save_checkpoint({"scheduler": state, **own})
        session.save_checkpoint()
        return str(caught.value)


def test_unsupported_value_on_one_rank_fails_all_ranks(pair: RankPool, tmp_path: Path) -> None:
    """All ranks raise an error, and can continue."""
    peer, own = pair.run(save_unsupported_on_one_rank, str(tmp_path))
    assert own.startswith("extra['rank'] ")
    assert " set" in own
    assert peer == f"checkpoint failed on rank 1: CheckpointError: {own}"


def schedulers() -> dict[str, Any]:
    """Return PyTorch's learning rate schedulers by class name."""
    rates = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    constant, falling = rates.ConstantLR(optimizer), rates.ExponentialLR(optimizer, 0.9)
    return {
        "LambdaLR": rates.LambdaLR(optimizer, lambda step: 1.0),
        "MultiplicativeLR": rates.MultiplicativeLR(optimizer, lambda step: 0.9),
        "StepLR": rates.StepLR(optimizer, 2),
        "LinearLR": rates.LinearLR(optimizer),
        "PolynomialLR": rates.PolynomialLR(optimizer),
        "CosineAnnealingLR": rates.CosineAnnealingLR(optimizer, 10),
        "CosineAnnealingWarmRestarts": rates.CosineAnnealingWarmRestarts(optimizer, 10),
        "ChainedScheduler": rates.ChainedScheduler([constant, falling]),
        "SequentialLR": rates.SequentialLR(optimizer, [constant, falling], [2]),
        "ReduceLROnPlateau": rates.ReduceLROnPlateau(optimizer),
        "CyclicLR": rates.CyclicLR(optimizer, 0.01, 0.1),
        "MultiStepLR": rates.MultiStepLR(optimizer, [2, 2, 4]),
        "OneCycleLR": rates.OneCycleLR(optimizer, 0.1, total_steps=10),
    }


def test_scheduler_states_can_be_saved() -> None:
    """The milestones of `MultiStepLR` have integer keys."""
    for name, scheduler in schedulers().items():
        state = scheduler.state_dict()
        assert load_values(json.loads(json.dumps(save_extra(state)))) == state, name


def test_malformed_extra_is_rejected() -> None:
    """The marks for tuples, pairs and tensors contain invalid values."""
    damaged: tuple[dict[str, Any], ...] = (
        {"tuple": 1}, {"pairs": {}}, {"pairs": [1]}, {"pairs": [[1]]}, {"pairs": [[[], 1]]}, {"tensor": ["float32"]},
        {"tensor": ["float31", [], 1]}, {"tensor": [[], [], 1]}, {"tensor": ["int8", [], 300]},
        {"tensor": ["float32", [2**62], []]}, {"tensor": ["float32", [2], [1.0, "x"]]},
    )  # fmt: skip
    for value in damaged:
        with pytest.raises(ValueError, match=f"^{re.escape(brief(value))} (does not c|is not a tensor)"):
            load_values({"a": [value]})
