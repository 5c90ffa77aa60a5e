"""Predicted events of a training step before any step has been recorded, from the FSDP modules in module order."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.schedule.trace import Event, EventKind


def expected_events(
    trained: Sequence[bool], *, root: bool, embeds: bool, passes: int = 1, components: int = 1, alone: bool
) -> tuple[Event, ...]:
    """Return the events of one step of a model that uses its FSDP modules one after another.

    The root is gathered first and stays until the end of backward. Layers are gathered in forward, and again in
    backward down to the first layer with a trained parameter.

    Args:
        trained: by FSDP module, whether it has a trained parameter.
        root: whether the first FSDP module is the root, with parameters of its own.
        embeds: whether the root computes the inputs of the layers with trained parameters.
        passes: number of forward and backward passes per step: the number of micro-batches of a loop over them, else 1.
        components: number of stored components of each gradient.
        alone: whether there is only one rank. One rank gathers a layer when it is needed; several ranks gather the next
            layer ahead.
    """
    forward = [Event(EventKind.GATHER, fsdp_module) for fsdp_module in range(len(trained))]
    backward = _backward(trained, components, root=root, embeds=embeds, ahead=not alone)
    return (*(forward + backward) * passes, Event(EventKind.STEP))


def _backward(trained: Sequence[bool], components: int, *, root: bool, embeds: bool, ahead: bool) -> list[Event]:
    top = 1 if root else 0  # the first layer
    first = (
        top
        if embeds
        else next((fsdp_module for fsdp_module in range(top, len(trained)) if trained[fsdp_module]), len(trained))
    )
    layers = list(range(len(trained) - 1, first - 1, -1))
    # FSDP2 detects the end of a layer's backward by the gradient of its input. If the input has no gradient, and for
    # the root, the gradients arrive at the end of the whole backward, beginning with the root.
    late = ([0] if root else []) + ([] if embeds else [first])
    events: list[Event] = []

    def gather(fsdp_module: int) -> None:
        events.append(Event(EventKind.GATHER, fsdp_module))

    def arrive(fsdp_module: int) -> None:
        if fsdp_module < len(trained) and trained[fsdp_module]:
            events.append(Event(EventKind.GRADIENTS, fsdp_module, components))

    # FSDP2 gathers a layer ahead even if backward never reaches this layer.
    if ahead and len(trained) > top:
        gather(len(trained) - 1)
    for fsdp_module in layers:
        if not ahead:
            gather(fsdp_module)
        elif fsdp_module > top:
            gather(fsdp_module - 1)
        if fsdp_module not in late:
            arrive(fsdp_module)
    for fsdp_module in late:
        arrive(fsdp_module)
    return events
