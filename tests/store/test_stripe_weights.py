"""Tests of stripe weights: stored and measured bandwidths must be usable, because checkpoints record them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity.daemon_client import NodeDaemon
from infinity.store import path_bandwidth
from support.daemon_process import daemon


@pytest.mark.parametrize(
    "value", ["Infinity", "NaN", "-1", "0", "1e300", "1e-300", "1" + "0" * 400, '"x"', "null", "[]"]
)
def test_invalid_stored_bandwidths_are_measured_again(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    file = runtime / path_bandwidth.CACHE_NAME
    file.write_text(f'{{"{"|".join(paths)}": [1.0, {value}]}}')
    file.chmod(0o600)
    monkeypatch.setattr(path_bandwidth, "quick_mixed", lambda names, engine: dict(zip(names, [3.0, 4.0], strict=True)))
    assert path_bandwidth.path_stripe_weights(paths, "threads", runtime) == [3.0, 4.0]
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


@pytest.mark.parametrize(
    ("alone", "together", "stripe_weights"),
    [
        ((("a", 9e9, 9e9, 2e9), ("b", 1.0, 1.0, 1e9)), None, [2e9, 1e9]),
        ((("a", 3e9, 1e9, None), ("b", 2e9, 2e9, None)), None, [1.5e9, 2e9]),
        ((("a", 1.0, 1.0, 4e9), ("a", 1.0, 1.0, 4e9), ("b", 1.0, 1.0, 3e9)), None, [2e9, 2e9, 3e9]),
        ((("a", 1.0, 1.0, 9e9), ("b", 1.0, 1.0, 1e9)), (("a", 1.0, 1.0, 3e9), ("b", 1.0, 1.0, 2e9)), [3e9, 2e9]),
    ],
)
def test_daemon_profile_determines_stripe_weights(
    alone: Any, together: Any, stripe_weights: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A joint measurement has precedence, paths on one drive share its bandwidth, and the run measures nothing."""
    paths = [str(tmp_path / f"{number}") for number in range(len(alone))]

    def by_path(found: Any) -> Any:
        return found and {path: path_profile(*one) for path, one in zip(paths, found, strict=True)}

    requests = answer_every_request({"bandwidth": by_path(alone), "together": by_path(together)}, monkeypatch)
    assert path_bandwidth.path_stripe_weights(paths, "threads", tmp_path / "runtime") == pytest.approx(stripe_weights)
    assert requests == [("bandwidth", {"paths": paths})]


@pytest.mark.parametrize(
    "answer",
    [None, {}, {"bandwidth": None, "together": None}, {"bandwidth": {}, "together": None}, {"bandwidth": 3},
     {"bandwidth": "b", "together": []}],
)  # fmt: skip
def test_unusable_daemon_answer_falls_back_to_measurement(
    answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run measures the paths itself and reports the result to the daemon."""
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    requests = answer_every_request(answer, monkeypatch)
    monkeypatch.setattr(path_bandwidth, "quick_mixed", lambda names, engine: dict(zip(names, [3.0, 4.0], strict=True)))
    assert path_bandwidth.path_stripe_weights(paths, "threads", tmp_path / "runtime") == [3.0, 4.0]
    rates = {paths[0]: {"mixed": 3.0}, paths[1]: {"mixed": 4.0}}
    assert requests[1] == ("record_bandwidth", {"rates": rates, "source": "run"})


@pytest.mark.parametrize("known", ["read", "mixed"])
def test_profile_without_valid_bandwidth_is_ignored(
    known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    monkeypatch.setattr(path_bandwidth, "quick_mixed", lambda names, engine: dict(zip(names, [3.0, 4.0], strict=True)))
    for value in (None, 0, -1.0, "x", [], float("nan"), 10**400):
        values = {"read": None, "write": 1.0, "mixed": None, known: value}
        found = {path: {"device": "d", **values} for path in paths}
        answer_every_request({"bandwidth": found, "together": None}, monkeypatch)
        assert path_bandwidth.path_stripe_weights(paths, "threads", tmp_path / f"{value!r:.5}") == [3.0, 4.0]


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
