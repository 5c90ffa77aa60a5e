"""Bandwidths that nobody can have are not taken for shares:

a checkpoint that names them would be refused by its reader.
"""

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
def test_what_is_remembered_is_checked(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured anew, and kept."""
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    file = runtime / path_bandwidth.CACHE_NAME
    file.write_text(f'{{"{"|".join(paths)}": [1.0, {value}]}}')
    file.chmod(0o600)
    monkeypatch.setattr(path_bandwidth, "quick_mixed", lambda names, engine: dict(zip(names, [3.0, 4.0], strict=True)))
    assert path_bandwidth.path_stripe_weights(paths, "threads", runtime) == [3.0, 4.0]
    assert json.loads(file.read_text())["|".join(paths)] == [3.0, 4.0]


def answering(answer: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Have a daemon that answers every question so; return what it is asked."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def ask(_: NodeDaemon, op: str, **values: Any) -> Any:
        asked.append((op, values))
        return answer

    monkeypatch.setattr(NodeDaemon, "ask", ask)
    return asked


def profile(device: str, read: float | None, write: float | None, mixed: float | None) -> dict[str, Any]:
    """Return what a daemon says of a path."""
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
def test_the_profile_of_a_daemon_is_used(
    alone: Any, together: Any, stripe_weights: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of all together counts more than that of each; paths on a drive share it; nothing is measured."""
    paths = [str(tmp_path / f"{number}") for number in range(len(alone))]

    def by_path(found: Any) -> Any:
        return found and {path: profile(*one) for path, one in zip(paths, found, strict=True)}

    asked = answering({"bandwidth": by_path(alone), "together": by_path(together)}, monkeypatch)
    assert path_bandwidth.path_stripe_weights(paths, "threads", tmp_path / "runtime") == pytest.approx(stripe_weights)
    assert asked == [("bandwidth", {"paths": paths})]


@pytest.mark.parametrize(
    "answer",
    [None, {}, {"bandwidth": None, "together": None}, {"bandwidth": {}, "together": None}, {"bandwidth": 3},
     {"bandwidth": "b", "together": []}],
)  # fmt: skip
def test_whatever_a_daemon_says_a_start_goes_on(answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures, and tells what it found."""
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    asked = answering(answer, monkeypatch)
    monkeypatch.setattr(path_bandwidth, "quick_mixed", lambda names, engine: dict(zip(names, [3.0, 4.0], strict=True)))
    assert path_bandwidth.path_stripe_weights(paths, "threads", tmp_path / "runtime") == [3.0, 4.0]
    rates = {paths[0]: {"mixed": 3.0}, paths[1]: {"mixed": 4.0}}
    assert asked[1] == ("record_bandwidth", {"rates": rates, "source": "run"})


@pytest.mark.parametrize("known", ["read", "mixed"])
def test_a_profile_that_says_nothing_of_a_path_is_not_used(
    known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is one of zeros and strings."""
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    monkeypatch.setattr(path_bandwidth, "quick_mixed", lambda names, engine: dict(zip(names, [3.0, 4.0], strict=True)))
    for value in (None, 0, -1.0, "x", [], float("nan"), 10**400):
        values = {"read": None, "write": 1.0, "mixed": None, known: value}
        found = {path: {"device": "d", **values} for path in paths}
        answering({"bandwidth": found, "together": None}, monkeypatch)
        assert path_bandwidth.path_stripe_weights(paths, "threads", tmp_path / f"{value!r:.5}") == [3.0, 4.0]


def test_a_daemon_that_knows_nothing_knows_what_a_run_has_measured(tmp_path: Path) -> None:
    """And tells the next one, which has another cache or none."""
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    runtime = tmp_path / "runtime"
    for folder in (*paths, runtime):
        Path(folder).mkdir(mode=0o700)
    with daemon(runtime):
        measured = path_bandwidth.path_stripe_weights(paths, "threads", runtime)
        (runtime / path_bandwidth.CACHE_NAME).unlink()
        told = path_bandwidth.path_stripe_weights(paths, "threads", runtime)
        assert not (runtime / path_bandwidth.CACHE_NAME).exists()
    assert sum(told) == pytest.approx(sum(measured))
    assert told[0] == told[1]  # both are on the same drive
