"""The thread on which updates run, beside the training thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch

from infinity import interrupts
from infinity.errors import InfinityError

_LOOK_SECONDS = 0.5
"""After which it is looked whether the training thread is to be interrupted, while it waits."""


@contextmanager
def telling(failed: Callable[[Exception], None]) -> Iterator[None]:
    """Tell `failed` what keeps the body from its end, an interrupt too:

    what is done in part must not be checkpointed.
    """
    try:
        yield
    except BaseException as error:
        what = f"an update was interrupted by {type(error).__name__}; resume from the last checkpoint"
        failed(error if isinstance(error, Exception) else InfinityError(what))
        raise


class UpdateWorker:
    """Runs updates one after the other, on a thread that takes `cores` of the CPU, or at once where that is 0.

    The thread begins with `enter_thread`: those that it uses for copies are then of this rank's device.

    `failed` is told of errors, from that thread: an FSDP module that is updated in part is nothing to go on from.
    """

    def __init__(
        self, cores: int, failed: Callable[[Exception], None], enter_thread: Callable[[], None] = lambda: None
    ) -> None:
        self._failed = failed
        self._last: Future[None] | None = None  # the job that was submitted last
        self._thread: ThreadPoolExecutor | None = None
        if cores:
            self._thread = ThreadPoolExecutor(1, "infinity-update", torch.set_num_threads, (cores,))
            self._thread.submit(enter_thread).result()
            torch.set_num_threads(torch.get_num_threads())  # what threads of torch's own begin with, again

    @property
    def threaded(self) -> bool:
        """Whether updates run on a thread of their own."""
        return self._thread is not None

    def submit(self, job: Callable[[], None]) -> Future[None] | None:
        """Run `job`, behind those that were submitted before. Raises its error if it runs at once.

        Returns:
            What ends when it has run; None where it has.
        """
        if self._thread is None:
            self._run(job)
            return None
        self._last = self._thread.submit(self._run, job)
        return self._last

    def _run(self, job: Callable[[], None]) -> None:
        with telling(self._failed), torch.no_grad():
            job()

    def drain(self) -> None:
        """Wait until all jobs have run; a failure is raised by whoever looks at a page next."""
        while self._last is not None and not wait([self._last], _LOOK_SECONDS).done:
            interrupts.check()

    def close(self) -> None:
        """Drop what has not begun, and end the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._last = None  # for `wait` a job that was dropped would never end
