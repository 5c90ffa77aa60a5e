"""Copying of checkpoints to another place, one at a time, in the background of training.

[Note: the same checkpoint on all ranks] A copy is useful only if all ranks have copied the same checkpoint. Therefore
all ranks exchange their progress when they publish a checkpoint, and copy it only if no rank is still copying an
earlier one. A copy is removed only if the run does not retain the checkpoint, and all ranks are known to have copied a
newer one. When the run is closed, every rank copies the newest checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple

from infinity.checkpoint.manifest import CheckpointName, Manifest

CHECK_SECONDS = 0.5
"""Interval at which the training thread checks for interrupts while it waits, in seconds."""
_ATTEMPTS = 2
"""Number of attempts to copy the newest checkpoint when the run is closed."""


class Progress(NamedTuple):
    """Progress of a rank, or of all ranks together."""

    idle: bool
    """``True`` if no copy is running."""
    copied: str
    """Identity of the last checkpoint that was copied, or an empty string."""
    address: str = ""
    """Address at which this rank's checkpoint is served to other nodes, or an empty string."""
    stalled: bool = False
    """``True`` if a copy is running but other nodes have not sent anything for a while."""


class Copier(ABC):
    """Decides when the checkpoints of one rank are copied. Subclasses copy them.

    If a copy fails, a warning is logged. All methods are called on the training thread. [Note: the same checkpoint on
    all ranks]

    Args:
        every: copy at most every n-th checkpoint.
        before: newest checkpoint of this run that is completely copied, or ``None``.
    """

    def __init__(self, every: int, before: CheckpointName | None) -> None:
        self._every, self._since = every, every - 1  # the first checkpoint is copied
        self._complete = before  # newest checkpoint that all ranks are known to have copied
        self._copied = before  # last checkpoint that this rank has copied
        self._idle = True  # no rank is copying, according to the last exchange
        self._newest: tuple[Manifest, Collection[CheckpointName]] | None = None  # newest checkpoint, and retained ones

    @property
    def progress(self) -> Progress:
        """Progress of this rank."""
        busy = self._busy()  # may set `_copied`
        return Progress(not busy, self._copied.identity if self._copied is not None else "")

    @property
    def needed(self) -> set[CheckpointName]:
        """Checkpoints that the run must retain for its copies, in addition to ``run.retained_checkpoints``."""
        return set()

    def exchanged(self, progress: Sequence[Progress]) -> None:
        """Take note of the progress of all ranks."""
        if self._copied is not None and {each.copied for each in progress} == {self._copied.identity}:
            self._complete = self._copied
        self._idle = all(each.idle for each in progress)

    def published(self, manifest: Manifest, retained: Collection[CheckpointName]) -> None:
        """Copy a published checkpoint if it is due and no rank is still copying an earlier one.

        Args:
            manifest: this rank's manifest of the checkpoint.
            retained: checkpoints that the run retains. Their copies are kept.
        """
        self._newest = manifest, tuple(retained)
        self._since += 1
        if self._idle and self._since >= self._every:
            self._since = 0
            self._start(*self._newest)

    def finish(self) -> None:
        """Wait until the newest checkpoint has been copied, or has failed to be copied. All ranks call it together."""
        again = self._wait()
        for _ in range(_ATTEMPTS):
            if not again or self._newest is None or self._has_copied(self._newest[0].name.checkpoint):
                return
            self._start(*self._newest)
            again = self._wait()

    @abstractmethod
    def close(self) -> None:
        """Stop copying."""

    @abstractmethod
    def _busy(self) -> bool:
        """Return whether this rank is copying a checkpoint."""

    @abstractmethod
    def _has_copied(self, checkpoint: CheckpointName) -> bool:
        """Return whether a checkpoint has been copied, after `_wait`."""

    @abstractmethod
    def _start(self, manifest: Manifest, retained: Collection[CheckpointName]) -> None:
        """Start to copy a checkpoint."""

    @abstractmethod
    def _wait(self) -> bool:
        """Wait until the copy that is running has ended. Return whether another attempt may succeed."""
