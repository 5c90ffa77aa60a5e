"""Muon, and others that need a whole parameter: pages of a matrix reserved together, slices of ranks put together."""

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
from support.train import Outcome, Paging, batch, settings, whole
from support.whole import MAKES, compare, compare_by_name, muon_and_adamw, paged

SINGLE: dict[str, tuple[str, dict[str, Any]]] = {
    "in backward, on a thread": ("muon and adamw", {}),
    "in forward": ("muon and adamw", {"update_schedule": "in_forward"}),
    "after backward, at once": ("muon and adamw", {"update_schedule": "after_backward", "cores": 0}),
    "resumed": ("muon and adamw", {"update_schedule": "in_forward", "checkpoint": 3}),
    "a matrix of four dimensions": ("muon by flag", {}),
    "a split master": ("muon and adamw", {"format": "split"}),
}
PAIR: dict[str, tuple[str, dict[str, Any]]] = {
    "in backward, on a thread": ("muon and adamw", {}),
    "after backward": ("muon and adamw", {"update_schedule": "after_backward"}),
    "at once, resumed": ("muon by flag", {"cores": 0, "checkpoint": 3}),
}


@pytest.mark.parametrize("case", SINGLE)
def test_bits_are_those_of_memory(case: str, tmp_path: Path) -> None:
    """Matrices span pages; the host cache is the smallest that is let through."""
    name, given = SINGLE[case]
    assert compare(MAKES[name], tmp_path, **given) == []


@pytest.mark.parametrize("case", PAIR)
def test_two_ranks_have_the_bits_of_unsharded_matrices(case: str, tmp_path: Path, pair: RankPool) -> None:
    """Also where they share rows unevenly, as of the embedding."""
    name, given = PAIR[case]
    assert pair.run(compare_by_name, name, str(tmp_path), given) == [[], []]


def test_updates_run_in_backward(tmp_path: Path) -> None:
    """Where nothing is clipped, as those of element-wise optimizers."""
    assert paged(muon_and_adamw, tmp_path).update_schedule == "in_backward"


def test_two_ranks_update_in_backward_or_in_step(tmp_path: Path, pair: RankPool) -> None:
    """In the next forward a rank could run ahead to an exchange; where one rank has looked at a gradient, all know."""
    assert pair.run(update_schedules, str(tmp_path)) == [["in_backward", "after_backward", "refused"]] * 2


def update_schedules(folder: str) -> list[str]:
    """Runs on every rank."""
    rank = torch.distributed.get_rank()
    return [
        _update_schedule(Path(folder), looks=False),
        _update_schedule(Path(folder), looks=rank == 1),
        _refused(Path(folder)),
    ]


def _refused(folder: Path) -> str:
    model = build()
    tree = settings(folder, Paging(update_schedule="in_forward"), 64 << 20)
    with pytest.raises(ConfigError, match=r"update\.schedule = .in_forward."):
        infinity.offload(model, muon_and_adamw(list(model.parameters())), tree)
    return "refused"


def _update_schedule(folder: Path, *, looks: bool) -> str:
    model = build()
    tree = settings(folder, Paging(), 64 << 20)
    with infinity.offload(model, muon_and_adamw(list(model.parameters())), tree) as optimizer:
        for step in range(2):
            models.loss_of(model, batch(model, step)).backward()
            if looks and step == 0:
                model.head.weight.grad.to_local().sum()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.update_schedule


def test_ranks_that_update_other_parameters_are_told(tmp_path: Path, pair: RankPool) -> None:
    """One has dropped a gradient that the other has: no slices of different matrices are put together."""
    told = pair.run(drop_on_one, str(tmp_path))
    assert any("ranks update different parameters" in one for one in told), told


def drop_on_one(folder: str) -> str:
    """Runs on every rank."""
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
            optimizer.run.pager.flush()  # not a checkpoint, which would wait for a rank that knows already
    except InfinityError as error:
        return str(error)
    return ""


def test_the_largest_matrix_counts_in_the_budget(tmp_path: Path) -> None:
    """What is put together lies beside the host cache;

    the error names the parameter, and what it asks for is enough.
    """
    model = build()
    given = muon_and_adamw(list(model.parameters()))
    with pytest.raises(BudgetError, match=r"to update \S+weight as a full parameter"):
        infinity.offload(model, given, settings(tmp_path, Paging(), 64 << 10))
    with infinity.offload(model, given, settings(tmp_path, Paging(), 64 << 20)) as optimizer:
        largest = max(param.numel() for group in given[0].param_groups for param in group["params"])
        assert whole_bytes(optimizer.run.layout) >= 2 * 12 * largest


def test_a_run_of_two_ranks_goes_on_with_one(tmp_path: Path, pair: RankPool) -> None:
    """State is sharded as FSDP2 shards, so it is dealt out anew as that of any optimizer."""
    expected, _ = pair.run(checkpoint_whole, str(tmp_path))
    model = build()
    tree = settings(tmp_path, Paging(), 64 << 20, run={"resume": "latest"})
    with infinity.offload(model, muon_and_adamw(list(model.parameters())), tree) as optimizer:
        assert optimizer.steps == 3
        found = full_state(model, optimizer)
        models.loss_of(model, batch(model, 3)).backward()
        optimizer.step()
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def checkpoint_whole(folder: str) -> dict[str, torch.Tensor]:
    """Runs on every rank."""
    model = build()
    given = muon_and_adamw(list(model.parameters()))
    with infinity.offload(model, given, settings(Path(folder), Paging(), 64 << 20)) as optimizer:
        train(model, optimizer, Outcome(), 0, 3)
        optimizer.save_checkpoint()
        return full_state(model, optimizer)


def full_state(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return whole weights, and whole momenta and moments."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = whole(param)
        for key, value in optimizer.state[param].items():
            found[f"{name}/{key}"] = whole(value)
    return found


class Narrow(models.Toy):
    """Its last matrix has one row, which two ranks cannot share."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.narrow = torch.nn.Linear(models.WIDTH, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return super().forward(tokens) + self.narrow(self.blocks[0](x)).float().square().mean()


def test_a_rank_may_have_nothing_of_a_matrix(tmp_path: Path, pair: RankPool) -> None:
    """It takes part in the exchange all the same."""
    assert pair.run(compare_narrow, str(tmp_path)) == [[], []]


def compare_narrow(folder: str) -> list[str]:
    """Runs on every rank."""

    def narrow() -> torch.nn.Module:
        torch.manual_seed(0)
        return models.shard(Narrow())

    return compare(muon_and_adamw, Path(folder), build=narrow)


def test_ranks_may_close_while_updates_run(tmp_path: Path, pair: RankPool) -> None:
    """The one that is late finishes what the other one waits for, instead of dropping it; nobody hangs."""
    assert pair.run(close_at_once, str(tmp_path)) == [None, None]


def close_at_once(folder: str) -> None:
    """Runs on every rank."""
    model = build()
    with infinity.offload(
        model, muon_and_adamw(list(model.parameters())), settings(Path(folder), Paging(host_cache="all"), 64 << 20)
    ) as optimizer:
        train(model, optimizer, Outcome(), 0, 2)
        if torch.distributed.get_rank():
            optimizer.run.worker.submit(partial(time.sleep, 1.0))
        train(model, optimizer, Outcome(), 2, 3)


def test_a_rank_that_fails_leaves_no_exchange_waiting(tmp_path: Path, pair: RankPool) -> None:
    """Each ends with its own error, though one has begun updates that the other never comes to.

    So it is where that one collects its garbage, and with it the process group, before the other one does.
    """
    began = time.monotonic()
    assert pair.run(fail_at_once, str(tmp_path)) == ["mine", "mine"]
    pair.run(collect_garbage)
    assert time.monotonic() - began < 60


_NOT_COLLECTED: list[Any] = []
"""Process groups of a rank that does not collect its garbage."""


def collect_garbage() -> None:
    """Runs on every rank."""
    gc.collect()
    torch.distributed.barrier()
    _NOT_COLLECTED.clear()


def fail_at_once(folder: str) -> str:
    """Runs on every rank."""
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
                raise ValueError("mine")
            optimizer.step()
            raise ValueError("mine")
    except ValueError as error:
        return str(error)


def test_a_rank_may_be_later_than_the_time_limit_of_a_transfer(tmp_path: Path, pair: RankPool) -> None:
    """The other one waits in an exchange, and its training thread for that, for as long as it takes."""
    assert pair.run(be_late, str(tmp_path)) == ["", ""]


def be_late(folder: str) -> str:
    """Runs on every rank."""
    model = build()
    tree = settings(Path(folder), Paging(update_schedule="after_backward"), 64 << 20, storage={"timeout_seconds": 2})
    with infinity.offload(model, muon_and_adamw(list(model.parameters())), tree) as optimizer:
        train(model, optimizer, Outcome(), 0, 2)
        models.loss_of(model, batch(model, 2)).backward()
        if torch.distributed.get_rank():
            time.sleep(5)
        try:
            optimizer.step()
            optimizer.zero_grad()
            train(model, optimizer, Outcome(), 3, 4)
        except InfinityError as error:
            return str(error)
    return ""


def test_an_exchange_without_the_other_rank_names_the_parameter(tmp_path: Path, pair: RankPool) -> None:
    """Where a rank ends the run, and the other one does not come to its update any more."""
    told, _ = pair.run(end_alone, str(tmp_path))
    assert "another rank" in told
    assert ".weight" in told


def end_alone(folder: str) -> str:
    """Runs on every rank."""
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
