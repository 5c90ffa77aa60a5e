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
        alone: whether there is one rank. It gathers a layer when that is due, several gather the next one ahead; and
            gradients that it adds up are stored in two components.
    """
    components = 2 if alone and passes > 1 else 1
    forward = [Event(EventKind.GATHER, unit) for unit in range(len(model.units))]
    backward = _backward(model, components, ahead=not alone)
    return (*(forward + backward) * passes, Event(EventKind.STEP))


def _backward(model: ModelShape, components: int, *, ahead: bool) -> list[Event]:
    """Return the events of one backward."""
    trained = {number for number, unit in enumerate(model.units) if unit.trainable}
    embeds = any(parameter.looked_up and parameter.trainable for parameter in model.root.parameters)
    first = 1 if embeds else min(trained - {0}, default=len(model.units))
    layers = list(range(len(model.units) - 1, first - 1, -1))
    # FSDP2 notices the end of a layer's backward by the gradient of its input. Where that has none, and for the root,
    # it comes at the end of the whole backward, the root first.
    late = [] if embeds else [first]
    events: list[Event] = []

    def gather(unit: int) -> None:
        events.append(Event(EventKind.GATHER, unit))

    def arrive(unit: int) -> None:
        if unit in trained:
            events.append(Event(EventKind.GRADIENTS, unit, components))

    if ahead and layers:
        gather(layers[0])
    for unit, following in zip(layers, [*layers[1:], None], strict=True):
        if not ahead:
            gather(unit)
        elif following is not None:
            gather(following)
        if unit not in late:
            arrive(unit)
    for unit in (0, *late):
        arrive(unit)
    return events
