"""Tests of stripe weights: stored and measured bandwidths must be usable, because checkpoints record them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity.daemon_client import NodeDaemon
from infinity.store import path_bandwidth
from support.daemon_process import daemon


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two paths, whose measured bandwidths are 3 and 4."""
    measured = [{"mixed": 3.0}, {"mixed": 4.0}]
    monkeypatch.setattr(path_bandwidth, "quick_rates", lambda names, *_: dict(zip(names, measured, strict=True)))
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def test_invalid_stored_bandwidths_are_measured_again(
    subtests: pytest.Subtests, paths: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "runtime" / path_bandwidth.CACHE_NAME
    file.parent.mkdir(mode=0o700)
    for value in ("Infinity", "NaN", "-1", "0", "1e300", "1e-300", "1" + "0" * 400, '"x"', "null", "[]"):
        file.write_text(f'{{"{"|".join(paths)}": [1.0, {value}]}}')
        file.chmod(0o600)
        with subtests.test(value[:9]):
            assert path_bandwidth.path_stripe_weights(paths, "threads", file.parent) == [3.0, 4.0]
            assert json.loads(file.read_text())["|".join(paths)] == [3.0, 4.0]


def answer_every_request(answer: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Make the daemon answer every request with `answer`; return the list of requests."""
    requests: list[tuple[str, dict[str, Any]]] = []

    def ask(_: NodeDaemon, op: str, **values: Any) -> Any:
        requests.append((op, values))
        return answer

    monkeypatch.setattr(NodeDaemon, "ask", ask)
    return requests


def path_profile(device: str, read: float | None, write: float | None, mixed: float | None) -> dict[str, Any]:
    """Return the profile of a path as the daemon sends it."""
    return {"device": device, "read": read, "write": write, "mixed": mixed, "measured": 1.0}


def test_daemon_profile_determines_stripe_weights(
    subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A joint measurement has precedence, paths on one drive share its bandwidth, and the run measures nothing."""
    for alone, together, stripe_weights in [
        ((("a", 9e9, 9e9, 2e9), ("b", 1.0, 1.0, 1e9)), (), [2e9, 1e9]),
        ((("a", 3e9, 1e9, None), ("b", 2e9, 2e9, None)), (), [1.5e9, 2e9]),
        ((("a", 1.0, 1.0, 4e9), ("a", 1.0, 1.0, 4e9), ("b", 1.0, 1.0, 3e9)), (), [2e9, 2e9, 3e9]),
        ((("a", 1.0, 1.0, 9e9), ("b", 1.0, 1.0, 1e9)), (("a", 1.0, 1.0, 3e9), ("b", 1.0, 1.0, 2e9)), [3e9, 2e9]),
    ]:
        paths = [str(tmp_path / f"{number}") for number in range(len(alone))]
        profiles = [
            dict(zip(paths, (path_profile(*one) for one in found), strict=False)) for found in (alone, together)
        ]
        requests = answer_every_request({"bandwidth": profiles[0], "together": profiles[1] or None}, monkeypatch)
        with subtests.test(alone=alone):
            found = path_bandwidth.path_stripe_weights(paths, "threads", tmp_path / "runtime")
            assert found == pytest.approx(stripe_weights)
            assert requests == [("bandwidth", {"paths": paths})]


def test_unusable_daemon_answer_falls_back_to_measurement(
    subtests: pytest.Subtests, paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run measures the paths itself and reports the result to the daemon."""
    answers: list[Any] = [
        None, {}, {"bandwidth": None, "together": None}, {"bandwidth": {}, "together": None}, {"bandwidth": 3},
        {"bandwidth": "b", "together": []},
    ]  # fmt: skip
    for known in ("read", "mixed"):
        for value in (None, 0, -1.0, "x", [], float("nan"), 10**400):
            profile = {"device": "d", "read": None, "write": 1.0, "mixed": None, known: value}
            answers.append({"bandwidth": dict.fromkeys(paths, profile), "together": None})
    rates = {paths[0]: {"mixed": 3.0}, paths[1]: {"mixed": 4.0}}
    for number, answer in enumerate(answers):
        requests = answer_every_request(answer, monkeypatch)
        with subtests.test(answer=str(answer)[:200]):
            runtime = tmp_path / f"runtime{number}"
            assert path_bandwidth.path_stripe_weights(paths, "threads", runtime) == [3.0, 4.0]
            assert requests[1] == ("record_bandwidth", {"rates": rates, "source": "run"})


def test_daemon_shares_the_measurement_of_a_run(tmp_path: Path) -> None:
    """A later run without a local cache gets the bandwidths that the first run reported."""
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    runtime = tmp_path / "runtime"
    for folder in (*paths, runtime):
        Path(folder).mkdir(mode=0o700)
    with daemon(runtime):
        measured = path_bandwidth.path_stripe_weights(paths, "threads", runtime)
        (runtime / path_bandwidth.CACHE_NAME).unlink()
        received = path_bandwidth.path_stripe_weights(paths, "threads", runtime)
        assert not (runtime / path_bandwidth.CACHE_NAME).exists()
    assert sum(received) == pytest.approx(sum(measured))
    assert received[0] == received[1]  # both paths are on the same drive
