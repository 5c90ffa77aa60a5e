"""Tests of optimizers that need full parameters, such as Muon: pages are reserved together and shards are exchanged."""

from __future__ import annotations

import gc
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.budget import whole_bytes
from infinity.errors import BudgetError, ConfigError, InfinityError
from support import models
from support.optimizers import build, train
from support.ranks import RankPool
from support.tables import all_but
from support.train import Outcome, Paging, batch, full_copy, settings
from support.unsharded import MAKES, compare, muon_and_adamw

SINGLE: dict[str, tuple[str, dict[str, Any]]] = {
    "in backward, on an update thread, with a four-dimensional matrix": ("muon by flag", {}),
    "in forward, resumed": ("muon and adamw", {"update_schedule": "in_forward", "checkpoint": 2}),
    "after backward, on the training thread, with a split master": (
        "muon and adamw", {"update_schedule": "after_backward", "cores": 0, "format": "split"},
    ),
}  # fmt: skip
PAIR: dict[str, tuple[str, dict[str, Any]]] = {
    "in backward, on an update thread": ("muon and adamw", {}),
    "after backward, on the training thread, resumed": (
        "muon by flag", {"update_schedule": "after_backward", "cores": 0, "checkpoint": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", all_but(SINGLE, "after backward, on the training thread, with a split master"))
def test_full_parameter_updates_match_training_in_memory(case: str, tmp_path: Path) -> None:
    """Matrices span several pages, and the host cache has the smallest permitted size."""
    name, options = SINGLE[case]
    assert compare(MAKES[name], tmp_path, **options) == []


class Narrow(models.Toy):
    """Model whose last matrix has one row, which two ranks cannot split."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.narrow = torch.nn.Linear(models.WIDTH, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embedding(tokens))
        return super().forward(tokens) + self.narrow(x).float().square().mean()


@pytest.mark.parametrize("case", all_but(PAIR, "after backward, on the training thread, resumed"))
def test_two_ranks_match_updates_of_unsharded_matrices(case: str, tmp_path: Path, pair: RankPool) -> None:
    """This includes uneven shards, for example of the embedding, and empty shards."""
    assert pair.run(compare_narrow, case, str(tmp_path)) == [[], []]


def compare_narrow(case: str, folder: str) -> list[str]:
    """Return the differences between paged training and training in memory. Runs on every rank."""
    name, options = PAIR[case]
    return compare(MAKES[name], Path(folder), build=narrow, **options)


def narrow() -> torch.nn.Module:
    """Return the sharded model."""
    torch.manual_seed(0)
    return models.shard(Narrow())


def test_two_ranks_do_not_update_in_forward(tmp_path: Path, pair: RankPool) -> None:
    """In forward, a rank could reach an exchange early; if one rank reads a gradient, all use `after_backward`."""
    assert pair.run(update_schedules, str(tmp_path)) == [["in_backward", "after_backward"]] * 2


def update_schedules(folder: str) -> list[str]:
    """Return the update schedules of runs without and with a gradient read on one rank. Runs on every rank.

    Updates in forward raise an error.
    """
    found = []
    for reads_gradient in (False, torch.distributed.get_rank() == 1):
        model = build()
        tree = settings(Path(folder), Paging(), 64 << 20)
        with infinity.offload(model, muon_and_adamw(list(model.parameters())), tree) as optimizer:
            for step in range(2):
                models.loss_of(model, batch(model, step)).backward()
                if reads_gradient and step == 0:
                    model.head.weight.grad.to_local().sum()
                optimizer.step()
                optimizer.zero_grad()
            found.append(optimizer.update_schedule)
    model = build()
    tree = settings(Path(folder), Paging(update_schedule="in_forward"), 64 << 20)
    with pytest.raises(ConfigError, match=r"update\.schedule = .in_forward."):
        infinity.offload(model, muon_and_adamw(list(model.parameters())), tree)
    return found


def test_ranks_updating_different_parameters_raise(tmp_path: Path, pair: RankPool) -> None:
    """If one rank dropped a gradient, shards of different matrices must not be combined."""
    errors = pair.run(drop_gradient_on_one_rank, str(tmp_path))
    assert any("ranks update different parameters" in error for error in errors), errors


def drop_gradient_on_one_rank(folder: str) -> str:
    """Drop a gradient on the second rank; return the error of the step. Runs on every rank."""
    model = build()
    tree = settings(Path(folder), Paging(update_schedule="after_backward"), 64 << 20)
    optimizer = infinity.offload(model, muon_and_adamw(list(model.parameters())), tree)
    models.loss_of(model, batch(model, 0)).backward()
    if torch.distributed.get_rank():
        model.embedding.weight.grad = None
    try:
        with optimizer:
            optimizer.step()
            optimizer._runner.updates.drain()
            optimizer.run.pager.flush()  # a checkpoint would wait for the rank that has already failed
    except InfinityError as error:
        return str(error)
    return ""


def test_budget_includes_the_largest_matrix(tmp_path: Path) -> None:
    """The memory is separate from the host cache, and the error names the parameter."""
    model = build()
    base_optimizers = muon_and_adamw(list(model.parameters()))
    with pytest.raises(BudgetError, match=r"to update \S+weight as a full parameter"):
        infinity.offload(model, base_optimizers, settings(tmp_path, Paging(), 64 << 10))
    with infinity.offload(model, base_optimizers, settings(tmp_path, Paging(), 64 << 20)) as optimizer:
        largest = max(param.numel() for group in base_optimizers[0].param_groups for param in group["params"])
        assert whole_bytes(optimizer.run.layout) >= 2 * 12 * largest


def test_run_on_two_ranks_resumes_on_one(tmp_path: Path, pair: RankPool) -> None:
    """The state is sharded like the parameters, so it is resharded like any optimizer's state."""
    expected, _ = pair.run(checkpoint_full_state, str(tmp_path))
    model = build()
    tree = settings(tmp_path, Paging(), 64 << 20, run={"resume": "latest"})
    with infinity.offload(model, muon_and_adamw(list(model.parameters())), tree) as optimizer:
        assert optimizer.steps == 2
        found = full_state(model, optimizer)
        models.loss_of(model, batch(model, 2)).backward()
        optimizer.step()
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def checkpoint_full_state(folder: str) -> dict[str, torch.Tensor]:
    """Save a checkpoint after two steps; return the full state. Runs on every rank."""
    model = build()
    base_optimizers = muon_and_adamw(list(model.parameters()))
    with infinity.offload(model, base_optimizers, settings(Path(folder), Paging(), 64 << 20)) as optimizer:
        train(model, optimizer, Outcome(), 0, 2)
        optimizer.save_checkpoint()
        return full_state(model, optimizer)


def full_state(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return full weights, momenta and moments."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = full_copy(param)
        for key, value in optimizer.state[param].items():
            found[f"{name}/{key}"] = full_copy(value)
    return found


def test_closing_during_updates_does_not_hang(tmp_path: Path, pair: RankPool) -> None:
    """The slower rank finishes the updates that the other rank waits for instead of dropping them."""
    assert pair.run(close_during_updates, str(tmp_path)) == [None, None]


def close_during_updates(folder: str) -> None:
    """Close the run while updates run, late on the second rank. Runs on every rank."""
    model = build()
    with infinity.offload(
        model, muon_and_adamw(list(model.parameters())), settings(Path(folder), Paging(host_cache="all"), 64 << 20)
    ) as optimizer:
        train(model, optimizer, Outcome(), 0, 2)
        if torch.distributed.get_rank():
            optimizer.run.worker.submit(partial(time.sleep, 0.5))
        train(model, optimizer, Outcome(), 2, 3)


def test_failed_rank_does_not_block_an_exchange(tmp_path: Path, pair: RankPool) -> None:
    """Each rank raises its own error, even if one collects its garbage, with the process group, first."""
    began = time.monotonic()
    assert pair.run(fail_during_an_exchange, str(tmp_path)) == ["own error", "own error"]
    pair.run(collect_garbage)
    assert time.monotonic() - began < 60


_NOT_COLLECTED: list[Any] = []
"""Process groups that one rank keeps alive."""


def collect_garbage() -> None:
    """Collect garbage, then release the kept process groups. Runs on every rank."""
    gc.collect()
    torch.distributed.barrier()
    _NOT_COLLECTED.clear()


def fail_during_an_exchange(folder: str) -> str:
    """Fail on both ranks after one of them has started updates. Runs on every rank."""
    model = build()
    try:
        with infinity.offload(
            model, muon_and_adamw(list(model.parameters())), settings(Path(folder), Paging(host_cache="all"), 64 << 20)
        ) as optimizer:
            if torch.distributed.get_rank():
                _NOT_COLLECTED.extend(torch.distributed.distributed_c10d._world.pg_map)
            train(model, optimizer, Outcome(), 0, 2)
            models.loss_of(model, batch(model, 2)).backward()
            if torch.distributed.get_rank():
                raise ValueError("own error")
            optimizer.step()
            raise ValueError("own error")
    except ValueError as error:
        return str(error)


@pytest.mark.wide
def test_late_rank_does_not_exceed_the_transfer_time_limit(tmp_path: Path, pair: RankPool) -> None:
    """Waits in an exchange, and for a page of an update in an exchange, are not limited."""
    assert pair.run(step_late_on_one_rank, str(tmp_path)) == ["", ""]


def step_late_on_one_rank(folder: str) -> str:
    """Step late, by more than the limit, on the second rank; return the error message. Runs on every rank."""
    model = build()
    tree = settings(Path(folder), Paging(update_schedule="after_backward"), 64 << 20, storage={"timeout_seconds": 2})
    with infinity.offload(model, muon_and_adamw(list(model.parameters())), tree) as optimizer:
        train(model, optimizer, Outcome(), 0, 2)
        models.loss_of(model, batch(model, 2)).backward()
        if torch.distributed.get_rank():
            time.sleep(3)
        try:
            optimizer.step()
            optimizer.zero_grad()
            train(model, optimizer, Outcome(), 3, 4)
        except InfinityError as error:
            return str(error)
    return ""


def test_exchange_without_the_other_rank_names_the_parameter(tmp_path: Path, pair: RankPool) -> None:
    """One rank closes the run while the other never reaches its update."""
    message, _ = pair.run(close_on_one_rank, str(tmp_path))
    assert "another rank" in message
    assert ".weight" in message


def close_on_one_rank(folder: str) -> str:
    """Close on the first rank while the second one takes no step; return the error message. Runs on every rank."""
    model = build()
    tree = settings(Path(folder), Paging(update_schedule="after_backward"), 64 << 20, storage={"timeout_seconds": 1})
    optimizer = infinity.offload(model, muon_and_adamw(list(model.parameters())), tree)
    train(model, optimizer, Outcome(), 0, 2)
    models.loss_of(model, batch(model, 2)).backward()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        optimizer.step()
        optimizer.close()
    torch.distributed.barrier()
    try:
        optimizer.close()
    except InfinityError as error:
        return str(error)
    return str(optimizer.run.pager.failure or "")
