"""Tests of user collectives on offloaded tensors: reads match memory, and writes raise on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from infinity.errors import UnsupportedError
from infinity.fsdp.paged_tensor import written
from support import models
from support.ranks import RankPool
from support.train import Paging, Recipe, batch, make_optimizer, offloaded

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # some of these functions are deprecated

RECIPE = Recipe(model="toy")
functions = torch.ops._c10d_functional


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return one tensor per rank with the shape of `tensor`; the values differ by rank."""
    return [torch.full(tensor.shape, float(dist.get_rank() + 1)) for _ in range(dist.get_world_size())]


def neighbor() -> int:
    """Return the rank of the neighbor."""
    return (dist.get_rank() + 1) % dist.get_world_size()


def coalesced(tensor: torch.Tensor) -> None:
    """Run a coalesced all-reduce."""
    with dist._coalescing_manager():
        dist.all_reduce(tensor)


def even(tensor: torch.Tensor) -> torch.Tensor:
    """Return as many of the 101 or 202 rows as two ranks can divide evenly."""
    return tensor[:100]


def concatenated_parts(tensor: torch.Tensor) -> torch.Tensor:
    """Return the concatenation of `parts`."""
    return torch.cat(parts(tensor))


def world_group_name() -> str:
    """Return the name of the default group for functional collectives."""
    return str(dist.group.WORLD.group_name)


def mean(tensor: torch.Tensor) -> None:
    """Average across ranks."""
    dist.all_reduce(tensor)
    tensor.div_(dist.get_world_size())


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "broadcast": lambda t: dist.broadcast(t, 0),
    "all_reduce": lambda t: dist.all_reduce(t),
    "all_reduce, async": lambda t: dist.all_reduce(t, async_op=True).wait(),
    "all_reduce_coalesced": lambda t: dist.all_reduce_coalesced([t, torch.ones(2)]),
    "coalescing_manager": coalesced,
    "mean": mean,
    "reduce": lambda t: dist.reduce(t, 0),
    "scatter": lambda t: dist.scatter(t, parts(t) if dist.get_rank() == 0 else None, 0),
    "reduce_scatter": lambda t: dist.reduce_scatter(t, parts(t)),
    "reduce_scatter_tensor": lambda t: dist.reduce_scatter_tensor(t, concatenated_parts(t)),
    "all_gather_into_tensor": lambda t: dist.all_gather_into_tensor(
        even(t), 3 * even(t).chunk(dist.get_world_size())[0]
    ),
    "all_to_all_single": lambda t: dist.all_to_all_single(even(t), 2 * even(t)),
    "into a view": lambda t: dist.all_reduce(t[1:3]),
    "of the group": lambda t: dist.group.WORLD.allreduce([t]).wait(),
    "functional, in place": lambda t: functions.wait_tensor(functions.all_reduce_(t, "sum", world_group_name())),
    "functional, out": lambda t: functions.wait_tensor(
        functions.reduce_scatter_tensor_out(
            concatenated_parts(t), "sum", dist.get_world_size(), world_group_name(), out=t
        )
    ),
}
"""Collectives that write to a tensor on each rank."""

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_gather_into_tensor": lambda t: filled(concatenated_parts(t), lambda out: dist.all_gather_into_tensor(out, t)),
    "all_gather": lambda t: filled(parts(t), lambda out: dist.all_gather(out, t)),
    "gather": lambda t: filled(parts(t), lambda out: dist.gather(t, out if dist.get_rank() == 0 else None, 0)),
    "reduce_scatter_tensor": lambda t: filled(
        torch.zeros(100 // dist.get_world_size(), t.shape[1]), lambda out: dist.reduce_scatter_tensor(out, even(t))
    ),
    "all_to_all_single": lambda t: filled(torch.zeros(100, t.shape[1]), lambda o: dist.all_to_all_single(o, even(t))),
    "functional": lambda t: functional.all_reduce(t, "sum", dist.group.WORLD).clone(),
}
"""Collectives that read a tensor on each rank and return the result."""


def filled(result: Any, fill: Callable[[Any], Any]) -> Any:
    """Return a result after a collective has filled it."""
    fill(result)
    return result


def exchanged(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of the neighbor."""
    received = torch.empty(tensor.shape)
    work = dist.irecv(received, neighbor())
    dist.send(tensor, neighbor())
    work.wait()
    return received


def weight(model: nn.Module, _: Any) -> torch.Tensor:
    """Return this rank's part of a weight."""
    return model.blocks[0].up.weight.to_local()


def gradient(model: nn.Module, _: Any) -> torch.Tensor:
    """Return this rank's part of the weight's gradient."""
    return model.blocks[0].up.weight.grad.to_local()


def state(model: nn.Module, optimizer: Any) -> torch.Tensor:
    """Return this rank's part of the weight's first moment."""
    return optimizer.state[model.blocks[0].up.weight]["exp_avg"].to_local()


KINDS = {"weight": weight, "gradient": gradient, "state": state}


def step_and_backward(model: nn.Module, optimizer: Any) -> None:
    """Take a step, then run another backward."""
    for number in range(2):
        models.loss_of(model, batch(model, number)).backward()
        if number == 0:
            optimizer.step()
            optimizer.zero_grad()


@contextmanager
def both(folder: str) -> Iterator[list[tuple[nn.Module, Any]]]:
    """Yield a model in memory and its offloaded copy, both with gradients."""
    model = models.build("toy")
    optimizer = make_optimizer(RECIPE, model)
    step_and_backward(model, optimizer)
    with offloaded(RECIPE, Paging(update_schedule="after_backward"), Path(folder)) as (paged, paged_optimizer):
        step_and_backward(paged, paged_optimizer)
        yield [(model, optimizer), (paged, paged_optimizer)]


def missed_writes(folder: str) -> list[str]:
    """Return the writes that do not raise in time, that change the tensor, or whose workaround gives different bits."""
    found = []
    with both(folder) as (in_memory, paged), torch.no_grad():
        for kind, of in KINDS.items():
            for name, write in WRITES.items():
                tensor, expected = of(*paged), of(*in_memory)
                before = tensor.clone()
                try:
                    write(tensor)
                    found.append(f"{name} of a {kind}: no error")
                except UnsupportedError as error:
                    if "copy = " not in str(error) or ".copy_(copy)" not in str(error) or "up.weight" not in str(error):
                        found.append(f"{name} of a {kind}: {error}")
                if not torch.equal(tensor.clone(), before):
                    found.append(f"{name} of a {kind}: changed despite the error")
                write(expected)
                copy = tensor.clone()
                write(copy)
                tensor.copy_(copy)
                if not torch.equal(tensor.clone(), expected):
                    found.append(f"{name} of a {kind}: the workaround gives different bits")
    return found


def wrong_reads(folder: str) -> list[str]:
    """Return the reads whose results differ from memory."""
    with both(folder) as (in_memory, paged), torch.no_grad():
        reads = READS | {"send": exchanged}
        return [
            f"{name} of a {kind}"
            for kind, of in KINDS.items()
            for name, read in reads.items()
            if not all(map(torch.equal, read(of(*in_memory)), read(of(*paged))))
        ]


def test_collectives_that_write_raise_on_both_ranks(tmp_path: Path, pair: RankPool) -> None:
    """They raise before communication, so that no rank waits and later collectives still match.

    The values would be lost. The workaround in the error message gives the bits of memory.
    """
    assert pair.run(missed_writes, str(tmp_path)) == [[], []]


def test_collectives_that_read_match_memory_on_both_ranks(tmp_path: Path, pair: RankPool) -> None:
    assert pair.run(wrong_reads, str(tmp_path)) == [[], []]


READ_ONLY = {"barrier", "check_for_nan", "monitored_barrier_", "send"}
"""c10d collectives that write to none of their arguments. `monitored_barrier_` allocates its own tensor."""


def test_written_arguments_of_collectives_are_known() -> None:
    """The schemas do not declare them, but in-place collectives write to their first argument."""
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")]
    assert len(schemas) >= 20
    for schema in schemas:
        name = schema.name.removeprefix("c10d::")
        first, *_ = schema.arguments
        assert first.name.startswith(("output", "tensor")), f"the first argument of {name} is {first.name}"
        if name != "monitored_barrier_":
            arguments = (object(), *schema.arguments[1:])
            found = written(getattr(torch.ops.c10d, name).default, arguments, {})
            assert found == ([] if name in READ_ONLY else [arguments[0]]), name
