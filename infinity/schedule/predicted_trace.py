"""What a training step will look like to the pager, before one has been seen:

from FSDP modules in the order of modules.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.schedule.trace import Event, EventKind


def expected_events(
    trained: Sequence[bool], *, root: bool, embeds: bool, passes: int = 1, components: int = 1, alone: bool
) -> tuple[Event, ...]:
    """Return the events of one step of a model that uses its FSDP modules one after the other.

    The root is gathered first and stays until the end of backward; layers are gathered in forward and again in
    backward, as far back as anything is trained.

    Args:
        trained: by FSDP module, whether it has a parameter that is trained.
        root: whether the first FSDP module is the root, with parameters of its own.
        embeds: whether that computes the inputs of the layers with parameters that are trained.
        passes: forwards and backwards in the step: the micro-batches of a loop over them, else 1.
        components: in how many each gradient is stored.
        alone: whether there is one rank. It gathers a layer when that is due, several gather the next one ahead.
    """
    forward = [Event(EventKind.GATHER, fsdp_module) for fsdp_module in range(len(trained))]
    backward = _backward(trained, components, root=root, embeds=embeds, ahead=not alone)
    return (*(forward + backward) * passes, Event(EventKind.STEP))


def _backward(trained: Sequence[bool], components: int, *, root: bool, embeds: bool, ahead: bool) -> list[Event]:
    """Return the events of one backward."""
    top = 1 if root else 0  # the first layer
    first = (
        top
        if embeds
        else next((fsdp_module for fsdp_module in range(top, len(trained)) if trained[fsdp_module]), len(trained))
    )
    layers = list(range(len(trained) - 1, first - 1, -1))
    # FSDP2 notices the end of a layer's backward by the gradient of its input. Where that has none, and for the root,
    # it comes at the end of the whole backward, the root first.
    late = ([0] if root else []) + ([] if embeds else [first])
    events: list[Event] = []

    def gather(fsdp_module: int) -> None:
        events.append(Event(EventKind.GATHER, fsdp_module))

    def arrive(fsdp_module: int) -> None:
        if fsdp_module < len(trained) and trained[fsdp_module]:
            events.append(Event(EventKind.GRADIENTS, fsdp_module, components))

    # A layer that is gathered ahead is so also where backward does not come to it.
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
