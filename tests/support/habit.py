"""Habits of training loops: one loop that is run in memory and paged, and what of it must be the same bits."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import infinity
from support import models
from support.rows import EQUAL, UNSUPPORTED, Row
from support.train import OPTIMIZERS, Paging, batch, host_bytes, settings, state_in_memory, state_on_nvme

STEPS = 5
EARLY = ("in_backward",)
LATE = ("auto", "in_forward", "after_backward")
EVERYWHERE = ("auto", *EARLY, "in_forward", "after_backward")
UPDATE_SCHEDULE = r"update\.schedule"
"""What a refusal says where updates in backward are in the way."""


class Loop:
    """What a habit is written against: makes model and optimizer, and writes down what the habit has seen."""

    def __init__(self, paging: Paging | None, folder: Path, undo: ExitStack) -> None:
        """Begin; `paging` is None in memory."""
        self.paging, self._folder, self._undo = paging, folder, undo
        self.seen: list[tuple[str, Any]] = []
        self.trained: list[tuple[nn.Module, torch.optim.Optimizer]] = []
        self.left: dict[str, torch.Tensor] = {}

    def begin(
        self, model: str | nn.Module = "toy", optimizer: str = "adamw", **how: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a sharded model and the optimizer to train it with."""
        built = models.build(model, **how) if isinstance(model, str) else models.shard(model, **how)
        return built, self.offload(built, OPTIMIZERS[optimizer]([p for p in built.parameters() if p.requires_grad]))

    def offload(self, model: nn.Module, optimizer: torch.optim.Optimizer, **sections: Any) -> torch.optim.Optimizer:
        """Return the optimizer to train with: the one that is given, or the paged one."""
        if self.paging is not None:
            folder = self._folder / str(len(self.trained))
            folder.mkdir(exist_ok=True)
            host = host_bytes(self.paging, model, optimizer, folder)
            config = settings(folder, self.paging, host, **sections)
            optimizer = self._undo.enter_context(infinity.offload(model, optimizer, config))
        self.trained.append((model, optimizer))
        return optimizer

    def save_checkpoint(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the state durable where it is paged."""
        if isinstance(optimizer, infinity.PagedOptimizer):
            optimizer.save_checkpoint()

    def see(self, what: str, value: Any) -> None:
        """Write down a tensor, a number or text that the loop has looked at."""
        if isinstance(value, DTensor):
            value = value.full_tensor()
        self.seen.append((what, value.detach().clone() if isinstance(value, torch.Tensor) else value))

    def loss(self, model: nn.Module, step: int, sequences: int = 2) -> torch.Tensor:
        """Return the loss of the batch of a step, which is seen."""
        loss = models.loss_of(model, batch(model, step, sequences))
        self.see("loss", loss)
        return loss

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Train one step as the README does."""
        self.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    def look(self, model: nn.Module) -> None:
        """See weights and buffers."""
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            self.see(name, value)

    def finish(self) -> None:
        """Note the weights, buffers and states that training has left."""
        for number, (model, optimizer) in enumerate(self.trained):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # a pass without gradients leaves the root gathered
            paged = isinstance(optimizer, infinity.PagedOptimizer)
            states = state_on_nvme(model, optimizer) if paged else state_in_memory(model, optimizer)
            for name, kinds in states.items():
                for kind, value in kinds.items():
                    self.left[f"{number} {name} {kind}"] = value.reshape(-1).clone()
            for name, buffer in model.named_buffers():
                self.left[f"{number} {name}"] = buffer.clone()


@dataclass(frozen=True)
class Habit:
    """A row of the table with its function, and where it is tried."""

    row: Row
    function: Callable[[Loop], None]
    update_schedules: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass
class Outcome:
    """What a loop has seen and left, and the error that it ended with."""

    seen: list[tuple[str, Any]] = field(default_factory=list)
    left: dict[str, torch.Tensor] = field(default_factory=dict)
    error: BaseException | None = None


HABITS: dict[str, Habit] = {}
"""All by name; the modules `habits_*` add theirs."""


def habit(
    name: str,
    outcome: str = EQUAL,
    words: str = "",
    *,
    early: str = "",
    note: str = "",
    update_schedules: tuple[str, ...] = EVERYWHERE,
    ranks: tuple[int, ...] = (1, 2),
    slow: bool = False,
) -> Callable[[Callable[[Loop], None]], Callable[[Loop], None]]:
    """Return a decorator that adds a loop to the table.

    Args:
        name: of the row.
        outcome: `EQUAL` or `UNSUPPORTED`, the latter with an error that `words` matches.
        early: expression that the error matches with which the loop is refused where updates run in backward by
            `update.schedule`; empty where it ends there as elsewhere. It makes a second row.
        note: for the reader of the table.
        update schedules: settings of `update.schedule` with which it is tried.
        ranks: numbers of ranks.
        slow: left out of ``make test``.
    """

    def add(function: Callable[[Loop], None]) -> Callable[[Loop], None]:
        where = tuple(p for p in update_schedules if not (early and p in EARLY))
        HABITS[name] = Habit(Row(name=name, outcome=outcome, words=words, note=note, slow=slow), function, where, ranks)
        if early:
            row = Row(
                name=f"{name}; in_backward is asked for",
                outcome=UNSUPPORTED,
                words=early,
                note="`auto`, `in_forward` or `after_backward`: equal",
                slow=True,
            )
            HABITS[row.name] = Habit(row, function, EARLY, ranks)
        return function

    return add


def run(function: Callable[[Loop], None], paging: Paging | None) -> Outcome:
    """Run a habit in memory, or paged."""
    outcome = Outcome()
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
            loop = Loop(paging, Path(folder), undo)
            outcome.seen, outcome.left = loop.seen, loop.left
            torch.manual_seed(7)
            function(loop)
            loop.finish()
    except Exception as error:
        outcome.error = error
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
    return outcome


@functools.cache
def in_memory(name: str) -> Outcome:
    """Return what a habit sees in memory.

    Raises:
        AssertionError: it does not work there, and is not to be refused either.
    """
    outcome = run(HABITS[name].function, None)
    if outcome.error is not None and HABITS[name].row.outcome == EQUAL:
        raise AssertionError(f"{name} fails in memory") from outcome.error
    return outcome


def problems(name: str, update_schedule: str) -> list[str]:
    """Run a habit both ways on this rank; return in which points it is not as its row says."""
    row = HABITS[name].row
    expected = in_memory(name)
    found = run(HABITS[name].function, Paging(host_cache="least", update_schedule=update_schedule))
    listed = unequal(expected.seen, found.seen, whole=row.outcome == EQUAL)
    if row.outcome == EQUAL:
        if found.error is not None:
            return [*listed, f"{type(found.error).__name__}: {found.error}"]
        listed += left_otherwise(expected.left, found.left)
    if row.outcome == UNSUPPORTED:
        if found.error is None:
            listed.append("not refused")
        elif not re.search(row.words, str(found.error)):
            listed.append(f"refused with other words: {type(found.error).__name__}: {found.error}")
    return listed


def unequal(expected: list[tuple[str, Any]], found: list[tuple[str, Any]], *, whole: bool) -> list[str]:
    """Return what differs, in words; what was seen before an error must be the same too."""
    listed = []
    for position, ((what, a), (also, b)) in enumerate(zip(expected, found, strict=False)):
        if what != also:
            return [*listed, f"{position}: {what} in memory, {also} paged"]
        if not same(a, b):
            listed.append(f"{position}: {what} is {shown(a)} in memory, {shown(b)} paged")
            if len(listed) == 4:
                return [*listed, "…"]
    if whole and len(expected) != len(found):
        listed.append(f"{len(expected)} things seen in memory, {len(found)} paged")
    return listed


def left_otherwise(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    """Return what is left with other bits; where memory has no state yet, pages hold zeros."""
    listed = [f"{name} is missing" for name in expected.keys() - found.keys()]
    listed += [f"{name} is not zero" for name in found.keys() - expected.keys() if found[name].any()]
    differ = [name for name, value in expected.items() if name in found and not same(value, found[name])]
    return listed + [
        f"left {name}: {shown(expected[name])} in memory, {shown(found[name])} paged" for name in differ[:4]
    ]


def same(a: Any, b: Any) -> bool:
    """Whether two things that were seen are the same bits; NaN is NaN."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(3e3), b.nan_to_num(3e3)))


def shown(value: Any) -> str:
    """Return a short text for a value."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} of mean {value.double().mean().item():.9g}"
    return repr(value)
