"""What a training step shows of itself, from which the next ones are planned."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.schedule.trace import Event, EventKind


class Recording:
    """The events of the step that is running, in order; the training thread alone adds to them."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def gather(self, fsdp_module: int) -> None:
        """Note that a training pass gathers an FSDP module."""
        self._events.append(Event(EventKind.GATHER, fsdp_module))

    def gradients(self, fsdp_module: int, components: int) -> None:
        """Note that gradients of an FSDP module have come in, of which so many `components` are stored unless used at
        once.
        """
        self._events.append(Event(EventKind.GRADIENTS, fsdp_module, components))

    def widen(self, fsdp_module: int, components: int) -> None:
        """Note that what is stored of an FSDP module's gradients has more components than was noted."""
        self._events[:] = [
            event._replace(components=components)
            if event.kind is EventKind.GRADIENTS and event.fsdp_module == fsdp_module
            else event
            for event in self._events
        ]

    @property
    def events(self) -> Sequence[Event]:
        """What was noted so far."""
        return self._events

    @property
    def has_gradients(self) -> bool:
        """Whether gradients have come in, whatever became of them."""
        return any(event.kind is EventKind.GRADIENTS for event in self._events)

    def end(self) -> tuple[Event, ...]:
        """Note `step()`, and return the events of the whole step."""
        self._events.append(Event(EventKind.STEP))
        return tuple(self._events)

    def clear(self) -> None:
        """Begin anew: with the next step, or where all gradients of this one were dropped."""
        self._events.clear()
