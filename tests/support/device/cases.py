"""Trainings on a simulated device, against memory: they run on every rank."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from support import models
from support.device.simulation import Simulation, simulation
from support.session import Session
from support.train import Outcome, Paging, Recipe, compare, in_memory, offloaded, train


def compare_on_device(kind: str, recipe: Recipe, paging: Paging, folder: str) -> list[str]:
    """Train a recipe in memory and paged to a device; return what differs, and what was not ordered."""
    in_memory(recipe)  # on the CPU; from here on it is known
    with simulation(kind, recipe.seed) as device:
        return compare(recipe, paging, folder) + problems_of(device)


def problems_of(device: Simulation) -> list[str]:
    """Return what was not ordered, and why it means nothing that all was, if it does not."""
    listed = [message for message, _ in device.races.found.most_common(5)]
    if not device.copies:
        listed.append("nothing was copied")
    if device.late is not (device.delayed > 0):
        listed.append(f"{device.delayed} copies were late")
    return listed


STEPS = 6


def interrupt_and_resume(kind: str, where: str, folder: str, device_bytes: int = 0) -> tuple[list[float], list[str]]:
    """Train with checkpoints, end it in the middle of a step, and resume; return the losses, and what was not ordered.

    Args:
        kind: of the device.
        where: in the step: ``forward``, ``backward``, ``step`` or ``between``.
        device_bytes: memory of the device for weights and whole FSDP modules; 0: what it has free, which is nothing.
    """
    with simulation(kind) as device:
        session = Session(Path(folder), memory={"device_bytes": device_bytes})
        losses = session.run(until=4, every=2)[:4]
        _end(session, where)
        with Session(Path(folder), memory={"device_bytes": device_bytes}, run={"resume": "latest"}) as session:
            assert session.optimizer.steps == 4
            losses += session.run(until=STEPS, every=2)
            gpu_resident = len(session.optimizer.run.planner.update_schedule.gpu_resident)
    listed = problems_of(device)
    if (gpu_resident > 0) is not (device.updates and device_bytes > 0):
        listed.append(f"{gpu_resident} FSDP modules lived on the device")
    return losses, listed


class _EndError(Exception):
    """What ends a session."""


def _end(session: Session, where: str) -> None:
    block = session.model.blocks[1]
    try:
        with session:
            if where == "forward":
                block.register_forward_hook(_stop)
            elif where == "backward":
                block.register_full_backward_hook(_stop)
            elif where == "step":
                session.optimizer.register_step_pre_hook(_stop)
            else:
                session.step()
                _stop()
            session.step()
    except _EndError:
        return
    raise AssertionError(f"nothing ended the session in {where}")


def stop_in_forward(recipe: Recipe, paging: Paging, folder: Path) -> None:
    """End a training in a forward, while copies to the device may be under way."""
    with suppress(_EndError), offloaded(recipe, paging, folder) as (model, optimizer):
        train(replace(recipe, steps=1), model, optimizer, Outcome())
        models.layers_of(model)[-1].register_forward_hook(_stop)
        train(recipe, model, optimizer, Outcome(), first=1)


def _stop(*_: object) -> None:
    raise _EndError
