"""Patterns in training loops: each loop runs in memory and with offloaded state, and the recorded values are compared.

A pattern is a function with a `Loop` argument. The decorator `pattern` adds it to the table in
docs/reference/compatibility.md.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable, Iterator
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
UPDATE_SCHEDULES = ("auto", "in_backward", "in_forward", "after_backward")
EARLY = ("auto", "in_backward")
"""Schedules with updates in backward, if the first steps are ordinary."""
UPDATE_SCHEDULE = r"update\.schedule"
"""Part of the error if a pattern is not compatible with updates in backward."""
BETWEEN = r"between backward and step|" + UPDATE_SCHEDULE
"""Part of the error for access to weights that were already updated in backward."""
SECOND = r"second gradient|" + BETWEEN
"""Part of the error for a second backward after updates in backward."""


class Loop:
    """Create the model and the optimizer of a pattern, and record the values that the pattern reads."""

    def __init__(self, paging: Paging | None, folder: Path, undo: ExitStack) -> None:
        self.paging, self._folder, self._undo = paging, folder, undo  # `paging` is None in memory
        self.recorded: list[tuple[str, Any]] = []
        self.trained: list[tuple[nn.Module, torch.optim.Optimizer]] = []
        self.final_state: dict[str, torch.Tensor] = {}

    def begin(
        self, model: str | nn.Module = "toy", optimizer: str = "adamw", **options: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a sharded model and its optimizer."""
        built = models.build(model, **options) if isinstance(model, str) else models.shard(model, **options)
        return built, self.offload(built, OPTIMIZERS[optimizer]([p for p in built.parameters() if p.requires_grad]))

    def offload(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the offloaded optimizer or, in memory, `optimizer` itself."""
        if self.paging is not None:
            folder = self._folder / str(len(self.trained))
            folder.mkdir()
            config = settings(folder, self.paging, host_bytes(self.paging, model, optimizer, folder))
            optimizer = self._undo.enter_context(infinity.offload(model, optimizer, config))
        self.trained.append((model, optimizer))
        return optimizer

    def record(self, label: str, value: Any) -> None:
        """Record a tensor, a number or text."""
        if isinstance(value, DTensor):
            value = value.full_tensor()
        self.recorded.append((label, value.detach().clone() if isinstance(value, torch.Tensor) else value))

    def record_weights(self, model: nn.Module) -> None:
        """Record all parameters and buffers."""
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            self.record(name, value)

    def loss(self, model: nn.Module, step: int, sequences: int = 2) -> torch.Tensor:
        """Return the loss of the batch of a step, and record it."""
        loss = models.loss_of(model, batch(model, step, sequences))
        self.record("loss", loss)
        return loss

    def forwards(self, optimizer: torch.optim.Optimizer, count: int = STEPS) -> Iterator[int]:
        """Yield the index of each step; the body of the loop runs forward and backward."""
        for step in range(count):
            yield step
            optimizer.step()
            optimizer.zero_grad()

    def backwards(self, model: nn.Module, optimizer: torch.optim.Optimizer, count: int = STEPS) -> Iterator[int]:
        """Train, and yield the index of each step between backward and `step()`."""
        for step in self.forwards(optimizer, count):
            self.loss(model, step).backward()
            yield step

    def steps(self, model: nn.Module, optimizer: torch.optim.Optimizer, count: int = STEPS) -> Iterator[int]:
        """Train, and yield the index of each step after `zero_grad()`."""
        for step in range(count):
            self.step(model, optimizer, step)
            yield step

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Train one step."""
        self.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, count: int = STEPS) -> None:
        """Train `count` steps."""
        for _ in self.steps(model, optimizer, count):
            pass

    def record_final_state(self) -> None:
        """Record parameters, buffers and optimizer states after training."""
        for number, (model, optimizer) in enumerate(self.trained):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # after a forward without gradients, the root is still gathered
            paged = isinstance(optimizer, infinity.PagedOptimizer)
            states = state_on_nvme(model, optimizer) if paged else state_in_memory(model, optimizer)
            for name, kinds in states.items():
                for kind, value in kinds.items():
                    self.final_state[f"{number} {name} {kind}"] = value.reshape(-1).clone()
            for name, buffer in model.named_buffers():
                self.final_state[f"{number} {name}"] = buffer.clone()


@dataclass(frozen=True)
class LoopPattern:
    """A row of the table, its function, the expected error by update schedule, and the numbers of ranks to test."""

    row: Row
    function: Callable[[Loop], None]
    errors: dict[str, str]
    ranks: tuple[int, ...]
    slow: bool


@dataclass
class Outcome:
    """Recorded values, final state and error of a loop."""

    recorded: list[tuple[str, Any]] = field(default_factory=list)
    final_state: dict[str, torch.Tensor] = field(default_factory=dict)
    error: BaseException | None = None


PATTERNS: dict[str, LoopPattern] = {}
"""All patterns by name, registered by the modules `patterns_*`."""


def pattern(
    name: str,
    error: str = "",
    *,
    early_error: str = "",
    early: tuple[str, ...] = ("in_backward",),
    note: str = "",
    ranks: tuple[int, ...] = (1, 2),
    slow: bool = False,
) -> Callable[[Callable[[Loop], None]], Callable[[Loop], None]]:
    """Return a decorator that adds a loop to the table.

    Args:
        name: Name of the row.
        error: Regular expression for the error with every update schedule. Empty if the loop is supported.
        early_error: Regular expression for the error with the update schedules in `early`. Empty if all are supported.
        early: Update schedules that raise `early_error`.
        note: Note in the table. By default, the update schedules that raise an error.
        ranks: Numbers of ranks to test.
        slow: Whether ``make test`` skips the row.
    """
    errors = dict.fromkeys(UPDATE_SCHEDULES, error) if error else dict.fromkeys(early, early_error)
    if early_error:
        note = note or "not supported with " + " and ".join(f"`{value}`" for value in early)
    row = Row(name=name, outcome=UNSUPPORTED if error else EQUAL, words=error, note=note)

    def add(function: Callable[[Loop], None]) -> Callable[[Loop], None]:
        PATTERNS[name] = LoopPattern(row, function, errors if error or early_error else {}, ranks, slow)
        return function

    return add


def run(function: Callable[[Loop], None], paging: Paging | None) -> Outcome:
    """Run a pattern in memory (if `paging` is None) or offloaded."""
    outcome = Outcome()
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
            loop = Loop(paging, Path(folder), undo)
            outcome.recorded, outcome.final_state = loop.recorded, loop.final_state
            torch.manual_seed(7)
            function(loop)
            loop.record_final_state()
    except Exception as error:
        outcome.error = error
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
    return outcome


@functools.cache
def in_memory(name: str) -> Outcome:
    """Return the outcome of a pattern in memory.

    Raises:
        AssertionError: if a pattern that should be equal fails in memory.
    """
    outcome = run(PATTERNS[name].function, None)
    if outcome.error is not None and PATTERNS[name].row.outcome == EQUAL:
        raise AssertionError(f"{name} fails in memory") from outcome.error
    return outcome


def problems(name: str, update_schedule: str) -> list[str]:
    """Run a pattern in memory and offloaded on this rank; return the deviations from its row."""
    words = PATTERNS[name].errors.get(update_schedule)
    expected = in_memory(name)
    found = run(PATTERNS[name].function, Paging(host_cache="least", update_schedule=update_schedule))
    listed = unequal(expected.recorded, found.recorded, complete=words is None)
    if words is None:
        if found.error is not None:
            return [*listed, f"{type(found.error).__name__}: {found.error}"]
        return listed + unequal_states(expected.final_state, found.final_state)
    if found.error is None:
        return [*listed, "no error was raised"]
    if not re.search(words, str(found.error)):
        listed.append(f"raised an error that does not match {words!r}: {type(found.error).__name__}: {found.error}")
    return listed


def unequal(expected: list[tuple[str, Any]], found: list[tuple[str, Any]], *, complete: bool) -> list[str]:
    """Return the differences between recorded values; values recorded before an error must be equal as well."""
    listed = []
    for position, ((label, a), (other_label, b)) in enumerate(zip(expected, found, strict=False)):
        if label != other_label:
            return [*listed, f"{position}: {label} in memory, {other_label} offloaded"]
        if not same(a, b):
            listed.append(f"{position}: {label} is {shown(a)} in memory, {shown(b)} offloaded")
            if len(listed) == 4:
                return [*listed, "…"]
    if complete and len(expected) != len(found):
        listed.append(f"{len(expected)} values recorded in memory, {len(found)} offloaded")
    return listed


def unequal_states(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    """Return the differences between final states. Pages contain zeros for states that do not exist in memory."""
    listed = [f"{name} is missing" for name in expected.keys() - found.keys()]
    listed += [f"{name} is not zero" for name in found.keys() - expected.keys() if found[name].any()]
    differ = [name for name, value in expected.items() if name in found and not same(value, found[name])]
    return listed + [
        f"final {name}: {shown(expected[name])} in memory, {shown(found[name])} offloaded" for name in differ[:4]
    ]


def same(a: Any, b: Any) -> bool:
    """Return whether two values are bitwise equal, where NaN equals NaN."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(3e3), b.nan_to_num(3e3)))


def shown(value: Any) -> str:
    """Return a short description of a value."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} with mean {value.double().mean().item():.9g}"
    return repr(value)
