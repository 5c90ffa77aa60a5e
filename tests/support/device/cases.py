"""Training on a simulated device, compared with training in memory. Called on every rank."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from support import models
from support.device.simulation import Simulation, simulation
from support.session import Session
from support.train import Outcome, Paging, Recipe, compare, in_memory, offloaded, train


def compare_on_device(kind: str, recipe: Recipe, paging: Paging, folder: str) -> list[str]:
    """Train a recipe in memory and on a simulated device; return differences and races."""
    in_memory(recipe)  # on the CPU; cached before the simulation starts
    with simulation(kind, recipe.seed) as device:
        return compare(recipe, paging, folder) + problems_of(device)


def problems_of(device: Simulation) -> list[str]:
    """Return races, and reasons why the absence of races is meaningless."""
    listed = [message for message, _ in device.races.found.most_common(5)]
    if not device.copies:
        listed.append("no copy was made")
    if device.late is not (device.delayed > 0):
        listed.append(f"{device.delayed} copies were delayed")
    return listed


STEPS = 6


def interrupt_and_resume(kind: str, where: str, folder: str, device_bytes: int) -> tuple[list[float], list[str]]:
    """Train with checkpoints, stop in the middle of a step, and resume; return losses and problems.

    Args:
        kind: Kind of the simulated device.
        where: Point in the step: ``forward``, ``backward``, ``step`` or ``between``.
        folder: Folder of the run.
        device_bytes: Device memory for weights and GPU-resident FSDP modules. 0: free memory, of which there is none.
    """
    with simulation(kind) as device:
        session = Session(Path(folder), memory={"device_bytes": device_bytes})
        losses = session.run(until=4, every=2)[:4]
        _stop_in(session, where)
        with Session(Path(folder), memory={"device_bytes": device_bytes}, run={"resume": "latest"}) as session:
            assert session.optimizer.steps == 4
            losses += session.run(until=STEPS, every=2)
            gpu_resident = len(session.optimizer.run.planner.update_schedule.gpu_resident)
    listed = problems_of(device)
    if (gpu_resident > 0) is not (device.updates and device_bytes > 0):
        listed.append(f"{gpu_resident} FSDP modules were GPU-resident")
    return losses, listed


class _StopError(Exception):
    """Raised to stop a session."""


def _stop_in(session: Session, where: str) -> None:
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
    except _StopError:
        return
    raise AssertionError(f"the session was not stopped in {where}")


def stop_in_forward(recipe: Recipe, paging: Paging, folder: Path) -> None:
    """Stop training in forward, while copies to the device may be in flight."""
    with suppress(_StopError), offloaded(recipe, paging, folder) as (model, optimizer):
        train(replace(recipe, steps=1), model, optimizer, Outcome())
        models.layers_of(model)[-1].register_forward_hook(_stop)
        train(recipe, model, optimizer, Outcome(), first=1)


def _stop(*_: object) -> None:
    raise _StopError
