"""Tests of Ctrl-C: it is deferred until the current operation is complete, and training can continue."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity import interrupts, torch_private
from infinity.errors import InfinityError
from infinity.optim import updates
from infinity.optim.gradients import Gradients
from infinity.schedule.cache import Cache
from support import interrupt_storm, models
from support.processes import run_program
from support.tables import WIDE, alternate
from support.train import MIB, Paging, Recipe, batch, build, make_optimizer, settings, step

RECIPE = Recipe(model="toy")
STEPS = 5
UPDATE_SCHEDULES = ("in_backward", "in_forward", "after_backward")


def ctrl_c() -> None:
    """Send SIGINT to this process."""
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_at_call(function: Callable[..., Any], at: int = 1) -> Callable[..., Any]:
    """Return a function that sends SIGINT in its `at`-th call and otherwise behaves like `function`."""
    calls = iter(range(1, 1 << 30))

    def interrupting(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == at:
            ctrl_c()
        return function(*arguments, **keywords)

    return interrupting


@pytest.fixture(autouse=True)
def _handler_is_restored() -> Iterator[None]:
    """Check that the test restores the SIGINT handler."""
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_is_deferred_to_the_end_of_the_block() -> None:
    """`KeyboardInterrupt` is raised at the end of the outermost block, and immediately outside any block."""
    done = []

    def blocks() -> None:
        with interrupts.held():
            with interrupts.held():
                ctrl_c()
                done.append("inside")
            interrupts.check()
            done.append("outside")

    with pytest.raises(KeyboardInterrupt):
        blocks()
    assert done == ["inside", "outside"]
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


def test_ctrl_c_is_raised_in_waits_and_when_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal that follows immediately is ignored, because torchrun forwards Ctrl-C from the terminal."""
    heard = []

    def waits() -> None:
        with interrupts.held(waits=False):
            ctrl_c()
            heard.append("not yet")
            interrupts.check()
            heard.append("not in the wait")

    def again() -> None:
        with interrupts.held():
            ctrl_c()
            heard.append("not yet")
            ctrl_c()
            heard.append("not the second signal")

    for block in (waits, again):
        with pytest.raises(KeyboardInterrupt):
            block()
    assert heard == ["not yet", "not yet", "not the second signal"]
    heard.clear()
    monkeypatch.setattr(interrupts, "SAME_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        again()
    assert heard == ["not yet"]


def test_user_handlers_are_called() -> None:
    """For example, the handler of `infinity train` stops after the step. Blocks in other threads defer nothing."""
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with interrupts.held():
            ctrl_c()
            assert not heard
        assert heard == [signal.SIGINT]
        other = threading.Thread(target=interrupts.begin)
        other.start()
        other.join()
        ctrl_c()
        assert len(heard) == 2
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interrupts.held():
            ctrl_c()
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(heard) == 2


def test_handlers_of_other_signals_may_raise() -> None:
    """Ctrl-C still works after a handler has raised at the beginning or end of a block."""

    def raising(number: int, frame: Any) -> None:
        raise TimeoutError

    before, caught = signal.signal(signal.SIGALRM, raising), 0
    try:
        for _ in range(200):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005)
                while True:
                    interrupts.begin()
                    interrupts.end()
            except TimeoutError:
                caught += 1
                interrupts._HELD._blocks = 0  # the signal may arrive between begin() and end()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert caught == 200
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        ctrl_c()


def test_handler_set_inside_a_block_is_kept() -> None:
    before, heard = signal.getsignal(signal.SIGINT), []
    try:
        with interrupts.held():
            signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
        ctrl_c()
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


@functools.cache
def in_memory() -> list[float]:
    model = build(RECIPE)
    optimizer = make_optimizer(RECIPE, model)
    return [step(model, optimizer, number) for number in range(STEPS)]


def train(model: torch.nn.Module, optimizer: Any, steps: int) -> list[float]:
    first = optimizer.steps
    return [step(model, optimizer, number) for number in range(first, first + steps)]


def paged(folder: Path, update_schedule: str, cores: int = 0, **sections: Any) -> tuple[torch.nn.Module, Any]:
    model = build(RECIPE)
    config = settings(
        folder, Paging(host_cache="all", update_schedule=update_schedule, cores=cores), 64 * MIB, **sections
    )
    return model, infinity.offload(model, make_optimizer(RECIPE, model), config)


@pytest.mark.parametrize(
    ("update_schedule", "at", "cores"),
    [
        ("in_forward", 3, 1),
        ("after_backward", 1, 0),
        *(pytest.param(*row, marks=WIDE) for row in (("in_forward", 1, 0), ("after_backward", 3, 1))),
    ],
)
def test_ctrl_c_does_not_split_an_update(
    update_schedule: str, at: int, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two FSDP modules is raised when the update of all modules, or of none, is complete."""
    model, optimizer = paged(tmp_path, update_schedule, cores)
    with optimizer:
        losses = [step(model, optimizer, number) for number in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(updates.Updates, "_copies", interrupt_at_call(updates.Updates._copies, at))
            if update_schedule == "in_forward":
                with pytest.raises(KeyboardInterrupt):
                    models.loss_of(model, batch(model, 2))
                losses.append(step(model, optimizer, 2))
            else:
                loss = models.loss_of(model, batch(model, 2))
                loss.backward()
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        optimizer.save_checkpoint()
        losses += [step(model, optimizer, number) for number in range(3, STEPS)]
        assert optimizer.steps == STEPS
    assert losses == in_memory()


@pytest.mark.parametrize("update_schedule", UPDATE_SCHEDULES)
def test_exception_inside_an_update_invalidates_the_run(
    update_schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some FSDP modules are one step ahead after a second Ctrl-C or an exception from another signal handler."""

    def fail(*_: Any) -> Any:
        raise KeyboardInterrupt

    model, optimizer = paged(tmp_path, update_schedule)
    train(model, optimizer, 2)
    monkeypatch.setattr(updates.Updates, "_copies", fail)
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, 2)
    monkeypatch.undo()
    with pytest.raises(InfinityError):
        optimizer.save_checkpoint()
    with pytest.raises(InfinityError, match="interrupted by KeyboardInterrupt; resume from the last checkpoint"):
        train(model, optimizer, 1)
    optimizer.close()


def test_ctrl_c_during_acquire_releases_pages_and_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next access would wait forever, or time out and report a slow drive."""
    model, optimizer = paged(tmp_path, "after_backward", storage={"timeout_seconds": 10})
    with optimizer:
        losses = [step(model, optimizer, 0), step(model, optimizer, 1)]
        for at in (1, 2, 3):
            with monkeypatch.context() as patch:
                patch.setattr(Cache, "acquire", interrupt_at_call(Cache.acquire, at))
                with pytest.raises(KeyboardInterrupt):
                    models.loss_of(model, batch(model, 2))
            pager = optimizer.run.pager
            assert not any(state.pins for state in pager._cache_slots.pages)
            assert not pager.transfers.lock._is_owned()  # type: ignore[attr-defined]
        losses += [step(model, optimizer, number) for number in range(2, STEPS)]
        optimizer.save_checkpoint()
    assert losses == in_memory()


def test_zero_grad_drops_partially_stored_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with incomplete gradients raises an error."""
    model, optimizer = paged(tmp_path, "after_backward")
    with optimizer:
        losses = [step(model, optimizer, 0)]
        models.loss_of(model, batch(model, 1)).backward()
        with monkeypatch.context() as patch:
            patch.setattr(Gradients, "_copy", _out_of_memory)
            with pytest.raises(MemoryError):
                models.loss_of(model, batch(model, 1)).backward()
        torch_private.reset_states(torch_private.fsdp_states(model), gradients=True)
        with pytest.raises(InfinityError, match=r"incomplete .*call zero_grad\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        losses += [step(model, optimizer, number) for number in range(1, STEPS)]
    assert losses == in_memory()


def test_ctrl_c_does_not_split_a_gradient_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is deferred until all pages are written; a gradient whose write failed cannot be used."""
    model, optimizer = paged(tmp_path, "after_backward")
    with optimizer:
        step(model, optimizer, 0)
        models.loss_of(model, batch(model, 1)).backward()
        param = max(model.parameters(), key=lambda param: param.to_local().numel())
        param.grad.to_local().mul_(1.0)
        with monkeypatch.context() as patch:
            patch.setattr(Cache, "acquire", interrupt_at_call(Cache.acquire))
            with pytest.raises(KeyboardInterrupt):
                param.grad.to_local().copy_(torch.full(param.to_local().shape, 7.0))
        assert (param.grad.to_local() == 7.0).all()
        with monkeypatch.context() as patch:
            patch.setattr(Gradients, "_add_components", _out_of_memory)
            with pytest.raises(MemoryError):
                param.grad.to_local().copy_(torch.full(param.to_local().shape, 8.0))
        with pytest.raises(InfinityError, match=r"incomplete .*call zero_grad\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        step(model, optimizer, 1)


def _out_of_memory(*_: Any, **__: Any) -> None:
    raise MemoryError


def test_zero_grad_drops_unapplied_gradients(tmp_path: Path) -> None:
    """Gradients can also be dropped with updates in backward; `zero_grad()` updates no parameters."""
    model, optimizer = paged(tmp_path, "in_backward")
    with optimizer:
        losses = [step(model, optimizer, 0), step(model, optimizer, 1)]
        names: list[str] = []
        handles = [
            param.register_post_accumulate_grad_hook(lambda param, name=name: names.append(name))
            for name, param in model.named_parameters()
        ]
        losses.append(step(model, optimizer, 2))
        for handle in handles:
            handle.remove()
        failing = dict(model.named_parameters())[names[1]].register_post_accumulate_grad_hook(_out_of_memory)
        with pytest.raises(MemoryError):
            models.loss_of(model, batch(model, 3)).backward()
        failing.remove()
        optimizer.zero_grad()
        losses += [step(model, optimizer, number) for number in range(3, STEPS)]
    assert losses == in_memory()


@pytest.mark.parametrize(("update_schedule", "at"), alternate(["in_forward", "after_backward"], [1, 5]))
def test_interrupted_backward_can_be_repeated_after_zero_grad(
    update_schedule: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 would ignore the gradients of all further steps, so that they would train nothing."""
    model, optimizer = paged(tmp_path, update_schedule)
    with optimizer:
        losses = [step(model, optimizer, 0), step(model, optimizer, 1)]
        interrupt_backward(model, optimizer, 2, at, monkeypatch)
        for use in (optimizer.step, lambda: models.loss_of(model, batch(model, 2))):
            with pytest.raises(InfinityError, match=r"interrupted; call optimizer\.zero_grad\(\) and repeat"):
                use()
        optimizer.zero_grad()
        losses += [step(model, optimizer, number) for number in range(2, STEPS)]
        assert optimizer.steps == STEPS
    assert losses == in_memory()


def test_backward_interrupted_after_an_update_cannot_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = paged(tmp_path, "in_backward")
    with optimizer:
        train(model, optimizer, 2)
        interrupt_backward(model, optimizer, 2, 15, monkeypatch)
        for use in (optimizer.step, optimizer.zero_grad, lambda: models.loss_of(model, batch(model, 2))):
            with pytest.raises(InfinityError, match=r"after some updates had run; .* resume from the last checkpoint"):
                use()


def test_backward_interrupted_on_several_ranks_cannot_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks may have stopped between different collectives, which would then be paired with each other."""
    model, optimizer = paged(tmp_path, "after_backward")
    with optimizer:
        monkeypatch.setattr(optimizer._passes, "_alone", False)
        step(model, optimizer, 0)
        interrupt_backward(model, optimizer, 1, 5, monkeypatch)
        with pytest.raises(InfinityError, match=r"ranks may differ .* resume from the last checkpoint"):
            optimizer.zero_grad()


def test_interrupt_in_the_first_step_does_not_change_the_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that are dropped before `step()` otherwise rule out updates in backward."""
    model, optimizer = paged(tmp_path, "in_backward")
    with optimizer:
        interrupt_backward(model, optimizer, 0, 5, monkeypatch)
        optimizer.zero_grad()
        assert train(model, optimizer, STEPS) == in_memory()
        assert optimizer.update_schedule == "in_backward"


def test_ctrl_c_during_the_preparation_of_the_first_forward_is_deferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 takes an interrupted preparation as complete."""
    model, optimizer = paged(tmp_path, "after_backward")
    state = type(model._get_fsdp_state())  # type: ignore[operator]
    with optimizer:
        with monkeypatch.context() as patch:
            patch.setattr(state, "_init_shared_state", interrupt_at_call(state._init_shared_state))
            with pytest.raises(KeyboardInterrupt):
                models.loss_of(model, batch(model, 0))
        assert train(model, optimizer, STEPS) == in_memory()


def interrupt_backward(model: Any, optimizer: Any, number: int, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the backward of a step, and interrupt it when its `at`-th gradient arrives."""
    with monkeypatch.context() as patch:
        patch.setattr(Gradients, "take", interrupt_at_call(Gradients.take, at))
        with pytest.raises(KeyboardInterrupt):
            step(model, optimizer, number)


@pytest.mark.parametrize(("storms", "seed"), [(1, 53), pytest.param(40, 0, marks=pytest.mark.wide)])
def test_interrupted_loops_end_with_the_same_state(storms: int, seed: int, tmp_path: Path) -> None:
    """A short version of the storms of `make crash-test`. Storm 53 counts calls, so it does not depend on the time."""
    numbers = ("--storms", storms, "--seed", seed)
    done = run_program(Path(interrupt_storm.__file__), *numbers, "--dir", tmp_path, folder=tmp_path, environment={})
    assert done.stdout.splitlines()[-1:] == [f"{storms} storms, 0 failures"], done.stdout + done.stderr[-4000:]
    assert "\n0 interrupts" not in done.stdout


def test_weights_can_be_read_from_another_thread(tmp_path: Path) -> None:
    """For example, a logger may read weights while updates wait for the next forward."""
    model, optimizer = paged(tmp_path, "in_forward")
    params = list(model.parameters())[::2]  # FSDP2 replaces the modules' parameters during forward
    ended, failed = threading.Event(), list[BaseException]()

    def look() -> None:
        try:
            while not ended.is_set():
                for param in params:
                    with torch.no_grad():
                        param.to_local().norm().item()
        except BaseException as error:
            failed.append(error)

    with optimizer:
        thread = threading.Thread(target=look)
        thread.start()
        try:
            losses = [step(model, optimizer, number) for number in range(STEPS)]
        finally:
            ended.set()
            thread.join()
    assert not failed
    assert losses == in_memory()
