"""Recording of the events of a training step, from which later steps are planned."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.schedule.trace import Event, EventKind


class Recording:
    """Events of the current step, in order. Only the training thread adds events."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def gather(self, fsdp_module: int) -> None:
        """Record that a training pass gathers an FSDP module."""
        self._events.append(Event(EventKind.GATHER, fsdp_module))

    def gradients(self, fsdp_module: int, components: int) -> None:
        """Record that the gradients of an FSDP module have arrived.

        Args:
            fsdp_module: index of the FSDP module.
            components: number of gradient components that are stored, unless the gradients are used immediately.
        """
        self._events.append(Event(EventKind.GRADIENTS, fsdp_module, components))

    def widen(self, fsdp_module: int, components: int) -> None:
        """Change the recorded number of components of the stored gradients of an FSDP module."""
        self._events[:] = [
            event._replace(components=components)
            if event.kind is EventKind.GRADIENTS and event.fsdp_module == fsdp_module
            else event
            for event in self._events
        ]

    @property
    def events(self) -> Sequence[Event]:
        """Events recorded so far."""
        return self._events

    @property
    def has_gradients(self) -> bool:
        """``True`` if gradients have arrived in this step, even if they were dropped afterwards."""
        return any(event.kind is EventKind.GRADIENTS for event in self._events)

    def end(self) -> tuple[Event, ...]:
        """Record `step()`, and return the events of the complete step."""
        self._events.append(Event(EventKind.STEP))
        return tuple(self._events)

    def clear(self) -> None:
        """Discard all events, before the next step or after all gradients of this one were dropped."""
        self._events.clear()
