"""What a training step of a model will look like to the pager: the events that its first step would record."""

from __future__ import annotations

from infinity.estimate.model import ModelShape
from infinity.schedule.trace import Event, EventKind


def step_events(model: ModelShape, *, passes: int = 1, alone: bool) -> tuple[Event, ...]:
    """Return the events of one step.

    The root is gathered first and stays until the end of backward; layers are gathered in forward and again in
    backward, as far back as anything is trained.

    Args:
        passes: forwards and backwards in the step: the micro-batches of a loop over them, else 1.
        alone: whether there is one rank: the first gradients that are added up are then stored in two components.
    """
    trained = [number for number, unit in enumerate(model.units) if unit.trainable]
    events: list[Event] = []
    for turn in range(passes):
        components = 2 if alone and turn else 1
        layers = range(1, len(model.units))
        events += [Event(EventKind.GATHER, unit) for unit in (0, *layers)]
        for unit in reversed(layers):
            if unit >= min(trained, default=len(model.units)):
                events.append(Event(EventKind.GATHER, unit))
            if unit in trained:
                events.append(Event(EventKind.GRADIENTS, unit, components))
        if 0 in trained:
            events.append(Event(EventKind.GRADIENTS, 0, components))
    return (*events, Event(EventKind.STEP))
