"""Recording of the events of a training step, which are used to plan later steps."""

from __future__ import annotations

from infinity.schedule.trace import Event, EventKind


class Recording:
    """Events of the current step, in order. Only the training thread adds events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def gather(self, fsdp_module: int) -> None:
        """Record that forward or backward gathers an FSDP module in a training step."""
        self.events.append(Event(EventKind.GATHER, fsdp_module))

    def gradients(self, fsdp_module: int, components: int) -> None:
        """Record that the gradients of an FSDP module have arrived.

        Args:
            components: number of components as which each gradient is stored, unless it is consumed immediately.
        """
        self.events.append(Event(EventKind.GRADIENTS, fsdp_module, components))

    def widen(self, fsdp_module: int, components: int) -> None:
        """Change the recorded number of components of an FSDP module's stored gradients."""
        self.events[:] = [
            event._replace(components=components)
            if event.kind is EventKind.GRADIENTS and event.fsdp_module == fsdp_module
            else event
            for event in self.events
        ]

    @property
    def has_gradients(self) -> bool:
        """``True`` if gradients have arrived in this step, even if they were dropped afterwards."""
        return any(event.kind is EventKind.GRADIENTS for event in self.events)

    def end(self) -> tuple[Event, ...]:
        """Record the call of `step()`, and return the events of the complete step."""
        self.events.append(Event(EventKind.STEP))
        return tuple(self.events)

    def clear(self) -> None:
        """Discard all events, either before the next step or because all gradients of this step were dropped."""
        self.events.clear()
