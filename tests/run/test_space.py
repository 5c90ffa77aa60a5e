"""A run asks the daemon for space before it allocates, so that two that start together do not both begin to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

import infinity
from infinity import node
from infinity.errors import BudgetError
from infinity.node import NodeDaemon
from infinity.run import space
from support import models
from support.daemon_process import daemon, talk
from support.train import Paging, Recipe, batch, build, make_optimizer, settings

RECIPE = Recipe(model="toy")


def reserved(runtime: Path) -> list[str]:
    return [entry["run_id"] for entry in talk(runtime, {"op": "status"})[0]["reservations"]]


def test_space_is_reserved_while_it_is_allocated_and_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on the file system says who has it."""
    runtime = tmp_path / "daemon"
    runtime.mkdir()
    (tmp_path / "nvme").mkdir()
    seen: list[list[str]] = []
    reserve = space.reserve

    def looking(file: Path, size: int) -> None:
        seen.append(reserved(runtime))
        reserve(file, size)

    monkeypatch.setattr(space, "reserve", looking)
    with daemon(runtime):
        config = settings(tmp_path / "nvme", Paging(paths=2), 64 << 20)
        config["telemetry"] = {"runtime_dir": str(runtime)}
        model = build(RECIPE)
        with infinity.offload(model, make_optimizer(RECIPE, model), config) as optimizer:
            run_id = optimizer.run.folder.run_id
            assert seen == [[run_id], [run_id]]
            assert reserved(runtime) == []
            models.loss_of(model, batch(model, 0)).backward()
            optimizer.step()


def test_a_refusal_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again for a while: who is allocating counts twice until that has ended."""
    monkeypatch.setattr(node, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(node, "_PAUSE_SECONDS", 0.02)
    asked: list[str] = []

    def refusing(_: NodeDaemon, op: str, values: object) -> dict[str, object]:
        asked.append(op)
        return {"error": "1 GiB free, of which 1 GiB reserved by run other", "no_room": True} if op == "reserve" else {}

    with monkeypatch.context() as patch:
        patch.setattr(NodeDaemon, "_answer", refusing)
        model = build(RECIPE)
        with pytest.raises(BudgetError, match="reserved by run other"):
            infinity.offload(model, make_optimizer(RECIPE, model), settings(tmp_path, Paging(), 64 << 20))
    assert asked.count("reserve") > 1
    assert not list(tmp_path.rglob("*.pages"))
    model = build(RECIPE)
    infinity.offload(model, make_optimizer(RECIPE, model), settings(tmp_path, Paging(), 64 << 20)).close()


def test_without_a_daemon_nothing_is_asked_twice(tmp_path: Path) -> None:
    """And nothing is in the way."""
    with NodeDaemon(tmp_path).space_reserved(str(tmp_path), 1 << 60, "r"):
        pass
