"""Tests of the default page size and of the drive space that a run reserves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

import infinity
from infinity import daemon_client
from infinity.budget import choose_budget, widest_access
from infinity.content.format import Role
from infinity.content.layout import FSDPModuleSpec, Layout, ShardSpec
from infinity.daemon_client import NodeDaemon
from infinity.errors import BudgetError, ConfigError
from infinity.run import space_reservation
from infinity.schedule.trace import range_access
from infinity.store.extents import SPARE_SLOTS, file_sizes
from infinity.store.page_store import lay_out
from support import models
from support.daemon_process import daemon, state
from support.layouts import FORMATS, layouts
from support.session import Session, draw
from support.train import Paging, Recipe, batch, build, make_optimizer, settings

MIB, GIB = 1 << 20, 1 << 30


def model(fsdp_modules: int, elements: int) -> list[FSDPModuleSpec]:
    """Return equal FSDP modules with one trainable matrix each."""
    return [
        FSDPModuleSpec(
            name=f"u{fsdp_module}",
            shards=(
                ShardSpec(
                    name=f"u{fsdp_module}.w", numel=elements, padded=elements, segment_key="halves", trainable=True
                ),
            ),
        )
        for fsdp_module in range(fsdp_modules)
    ]


@pytest.mark.parametrize(
    ("fsdp_modules", "elements", "host", "expected"),
    [
        (16, 7_000_000, GIB, 8 * MIB),  # few pages: default size
        (32, 218_000_000, 32 * GIB, 32 * MIB),  # 7 billion parameters: doubled until there are at most 4096 pages
        (32, 218_000_000, 4 * GIB, 16 * MIB),  # the host cache keeps 256 cache slots
        (32, 218_000_000, 3 * GIB, 8 * MIB),  # 16 MiB pages would leave fewer than 256 cache slots
        (80, 856_000_000, 512 * GIB, 256 * MIB),  # 70 billion parameters: maximum size
        (500, 6 * 341 * 2048, 16 * GIB, 8 * MIB),  # 16 MiB pages would be less than 80% full
    ],
)
def test_page_size_grows_with_the_state(fsdp_modules: int, elements: int, host: int, expected: int) -> None:
    """Pages grow as long as the host cache keeps enough cache slots and the pages are well filled."""
    budget = choose_budget(model(fsdp_modules, elements), FORMATS, host, 0)
    assert budget.layout.page_bytes == expected


@pytest.mark.parametrize(
    ("fsdp_modules", "elements", "host", "expected"),
    [
        (8, 51_000_000, 10 * GIB, 64 * MIB),  # 412 million parameters: all pages fit in the host cache
        (8, 51_000_000, 2 * GIB, 8 * MIB),  # larger pages would leave fewer than 256 cache slots
        (32, 218_000_000, 4 * GIB, 16 * MIB),  # the host cache keeps 256 cache slots
        (32, 218_000_000, 128 * GIB, 64 * MIB),  # 7 billion parameters: maximum size
    ],
)
def test_page_size_grows_earlier_on_a_gpu(fsdp_modules: int, elements: int, host: int, expected: int) -> None:
    """The Python overhead per page is a larger part of a GPU step."""
    assert choose_budget(model(fsdp_modules, elements), FORMATS, host, 0, device=True).layout.page_bytes == expected


def test_configured_page_size_is_used() -> None:
    assert choose_budget(model(32, 218_000_000), FORMATS, 32 * GIB, 8 * MIB).layout.page_bytes == 8 * MIB


def test_page_size_fits_long_rows() -> None:
    """Long rows, such as stacked expert matrices, raise the page size to the size that they need, up to a limit."""

    def stack(row: int) -> list[FSDPModuleSpec]:
        spec = ShardSpec(name="w", numel=8 * row, padded=8 * row, segment_key="plain", trainable=True, row=row)
        return [FSDPModuleSpec(name="u", shards=(spec,))]

    assert choose_budget(stack(1 << 21), FORMATS, 4 * GIB, 0).layout.page_bytes == 32 * MIB
    with pytest.raises(BudgetError, match=r"whole rows of w, .*memory\.page_bytes"):
        choose_budget(stack(1 << 26), FORMATS, 64 * GIB, 0)


@given(layouts())
def test_widest_access_is_the_longest_access_of_an_update(layout: Layout) -> None:
    """The number of pages of each access is counted without building the access."""
    accesses = [
        range_access(segment, position, components=len(segment.grad_pages))
        for fsdp_module in layout.fsdp_module_ranges
        for segment, position in fsdp_module
    ]
    assert widest_access(layout) == max(map(len, accesses), default=1)


RECIPE = Recipe(model="toy")


def reserved(runtime: Path) -> list[str]:
    return [entry["run_id"] for entry in state(runtime)["reservations"]]


def test_reservation_ends_after_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After allocation, the file system accounts for the space."""
    runtime = tmp_path / "daemon"
    runtime.mkdir()
    (tmp_path / "nvme").mkdir()
    seen: list[list[str]] = []
    reserve = space_reservation.reserve

    def observed_reserve(*arguments: Any) -> None:
        seen.append(reserved(runtime))
        reserve(*arguments)

    monkeypatch.setattr(space_reservation, "reserve", observed_reserve)
    with daemon(runtime):
        config = settings(tmp_path / "nvme", Paging(paths=2), 64 << 20)
        config["telemetry"] = {"runtime_dir": str(runtime)}
        model = build(RECIPE)
        with infinity.offload(model, make_optimizer(RECIPE, model), config) as optimizer:
            run_id = optimizer.run.folder.run_id
            assert len(seen) >= 2
            assert all(run_ids == [run_id] for run_ids in seen)
            assert reserved(runtime) == []
            models.loss_of(model, batch(model, 0)).backward()
            optimizer.step()


def test_rejected_reservation_is_retried_and_removes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retrying helps because the space of a run that is still allocating counts twice."""
    monkeypatch.setattr(daemon_client, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(daemon_client, "_PAUSE_SECONDS", 0.02)
    asked: list[str] = []

    def rejecting(_: NodeDaemon, op: str, **values: object) -> dict[str, object]:
        asked.append(op)
        return {"error": "1 GiB free, of which 1 GiB reserved by run other", "no_room": True} if op == "reserve" else {}

    with monkeypatch.context() as patch:
        patch.setattr(NodeDaemon, "answer", rejecting)
        model = build(RECIPE)
        with pytest.raises(BudgetError, match="reserved by run other"):
            infinity.offload(model, make_optimizer(RECIPE, model), settings(tmp_path, Paging(), 64 << 20))
    assert asked.count("reserve") > 1
    assert not list(tmp_path.rglob("*.pages"))
    model = build(RECIPE)
    infinity.offload(model, make_optimizer(RECIPE, model), settings(tmp_path, Paging(), 64 << 20)).close()


def test_reservation_without_a_daemon_succeeds(tmp_path: Path) -> None:
    with NodeDaemon(tmp_path).space_reserved(str(tmp_path), 1 << 60, "r"):
        pass


@pytest.mark.parametrize("clips", [False, True])
def test_gradient_space_is_kept_only_if_steps_use_it(clips: bool, tmp_path: Path) -> None:
    """Unused gradient space is freed after the first step, also after a resume, with equal losses."""
    losses: dict[str, list[float]] = {}
    for name, parts in (("once", [4]), ("twice", [2, 4])):
        losses[name] = []
        (tmp_path / name).mkdir()
        for until in parts:
            run = {"resume": "latest" if until > parts[0] else ""}
            with Session(tmp_path / name, run=run) as session:
                optimizer, files = session.optimizer, list((tmp_path / name).rglob("*.pages"))
                pages = optimizer.run.layout.pages
                bare = sum(file_sizes(lay_out(pages, [1.0], {}, SPARE_SLOTS, 1)[1], 1))  # without gradients
                gradients = optimizer.run.layout.bytes_of(Role.GRAD)
                assert bare + gradients <= sum(file.stat().st_size for file in files) <= bare + 2 * gradients
                while optimizer.steps < until:
                    loss = models.loss_of(session.model, draw())
                    loss.backward()
                    if clips:
                        optimizer.clip_grad_norm_(1e9)
                    optimizer.step()
                    session.scheduler.step()
                    optimizer.zero_grad()
                    losses[name].append(loss.item())
                    plan = optimizer.run.planner.plan
                    stores = plan.traffic.written[Role.GRAD] > 0
                    assert stores == clips
                    now = sum(file.stat().st_size for file in files)
                    assert bare + gradients * clips <= now <= bare + 2 * gradients
                    if optimizer.steps == until:  # until then, unused gradients may still be in flight
                        assert now == bare or clips
                        assert optimizer.run.stats.snapshot().value("tier_capacity_bytes", tier="nvme") == now
                session.save_checkpoint()
    assert losses["once"] == losses["twice"]


def test_zero_retained_checkpoints_halve_the_space_and_disable_saving(tmp_path: Path) -> None:
    """The error is raised before a checkpoint begins, and the checkpoint that the run resumed from is kept."""
    sizes = {}
    for retained in (0, 1):
        (folder := tmp_path / str(retained)).mkdir()
        with Session(folder, run={"retained_checkpoints": retained}) as session:
            session.step()
            session.step()
            if retained:
                session.save_checkpoint()
            else:
                with pytest.raises(ConfigError, match=r"run\.retained_checkpoints = 0"):
                    session.save_checkpoint()
            sizes[retained] = sum(file.stat().st_size for file in folder.rglob("*.pages"))
            state = session.optimizer.run.layout.state_bytes
    assert sizes[1] - sizes[0] == state
    with Session(folder, run={"retained_checkpoints": 0, "resume": "latest"}) as session:
        session.step()
        with pytest.raises(ConfigError, match=r"run\.retained_checkpoints = 0"):
            session.save_checkpoint()
    with Session(folder, run={"resume": "latest"}) as session:
        assert session.optimizer.steps == 2
