"""Prediction of the events of a training step from its FSDP modules, used before any step has been recorded."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.schedule.trace import Event, EventKind


def expected_events(
    trained: Sequence[bool], *, root: bool, embeds: bool, passes: int = 1, components: int = 1, alone: bool
) -> tuple[Event, ...]:
    """Return the events of one step of a model that uses its FSDP modules in sequence.

    The root is gathered first and stays gathered until the end of backward. The other FSDP modules (layers) are
    gathered in forward and again in backward, which goes back to the first layer that has a trained parameter or whose
    inputs require gradients.

    Args:
        trained: for each FSDP module in module order, whether it has a trained parameter.
        root: whether the first FSDP module is the root module with its own parameters.
        embeds: whether the root uses trained parameters to compute the inputs of the layers.
        passes: number of forward and backward passes per step. It is the number of micro-batches if the step loops over
            them, and otherwise 1.
        components: number of components in which each gradient is stored.
        alone: whether there is only one rank. A single rank gathers a layer when the layer is needed; with several
            ranks, FSDP2 gathers the next layer in advance.
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
    # FSDP2 detects the end of a layer's backward by the gradient of the layer's input. The gradients of the root, and
    # of a layer whose input has no gradient, arrive at the end of the entire backward pass, starting with the root.
    late = ([0] if root else []) + ([] if embeds else [first])
    events: list[Event] = []

    def gather(fsdp_module: int) -> None:
        events.append(Event(EventKind.GATHER, fsdp_module))

    def arrive(fsdp_module: int) -> None:
        if fsdp_module < len(trained) and trained[fsdp_module]:
            events.append(Event(EventKind.GRADIENTS, fsdp_module, components))

    # FSDP2 gathers the last layer in advance even if backward never reaches it.
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
