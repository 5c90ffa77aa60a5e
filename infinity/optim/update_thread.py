"""Worker thread that runs updates in parallel with the training thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext

import torch

from infinity import interrupts
from infinity.errors import InfinityError

_CHECK_SECONDS = 0.5
"""Interval at which the training thread checks for interrupts while it waits."""


class telling:
    """Report any exception raised in the context, including interrupts, to `failed`.

    This ends the run, because a partial update must not be written to a checkpoint.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            what = f"an update was interrupted by {type(error).__name__}; resume from the last checkpoint"
            self._failed(error if isinstance(error, Exception) else InfinityError(what))


class UpdateWorker:
    """Run updates one after the other, either on a separate thread or immediately.

    Args:
        cores: number of CPU cores for the thread; 0 runs updates immediately on the calling thread.
        failed: called with each error, on the thread on which the error occurs. A partially updated FSDP module ends
            the run.
        enter_thread: called once when the thread starts, so that its copy streams belong to this rank's device.
    """

    def __init__(
        self, cores: int, failed: Callable[[Exception], None], enter_thread: Callable[[], None] = lambda: None
    ) -> None:
        self._failed = failed
        self._last: Future[None] | None = None  # most recently submitted job
        self._thread: ThreadPoolExecutor | None = None
        if cores:
            self._thread = ThreadPoolExecutor(1, "infinity-update", torch.set_num_threads, (cores,))
            self._thread.submit(enter_thread).result()
            torch.set_num_threads(torch.get_num_threads())  # resets the default that new PyTorch threads inherit

    @property
    def threaded(self) -> bool:
        """``True`` if updates run on their own thread."""
        return self._thread is not None

    def submit(self, job: Callable[[], None]) -> Future[None] | None:
        """Run `job` after all previously submitted jobs. If it runs immediately, this raises its error.

        Returns:
            A future that completes when the job has run, or ``None`` if the job has already run.
        """
        if self._thread is None:
            self._run(job)
            return None
        self._last = self._thread.submit(self._run, job)
        return self._last

    def _run(self, job: Callable[[], None]) -> None:
        # An evaluation may run pending updates in inference mode, but their tensors are used outside of it, too
        inference = torch.is_inference_mode_enabled()
        with telling(self._failed), torch.inference_mode(False) if inference else nullcontext(), torch.no_grad():
            job()

    def drain(self) -> None:
        """Wait until all jobs have run. If one has failed, the next page access raises its error."""
        while self._last is not None and not wait([self._last], _CHECK_SECONDS).done:
            interrupts.check()

    def close(self) -> None:
        """Drop jobs that have not begun, and stop the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._last = None  # `wait` would never return for a dropped job
