"""Registry of this process's open runs, which are closed at exit or when another run needs their folder.

[Note: dropped runs] A run stays open and keeps its lock and memory even if no variable refers to its model any more,
because the model's tensors refer to the run in a way that Python's garbage collector cannot see. Therefore, when
another run needs the folder, the registry checks whether the run is still in use, which means that a variable leads to
its model. References from an optimizer, a scheduler, a loss with its graph, parameters, the traceback of the last
exception or a notebook's output history do not count.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from infinity.cleanup import end_all
from infinity.errors import FolderBusyError
from infinity.fsdp import forks
from infinity.referrers import variables_of
from infinity.run.optimizer import PagedOptimizer
from infinity.run.run import Run

_log = logging.getLogger("infinity")
_live: dict[Run, tuple[PagedOptimizer, nn.Module]] = {}


def add(optimizer: PagedOptimizer, model: nn.Module) -> None:
    """Keep an open run registered until it is closed."""
    run = optimizer.run
    _live[run] = optimizer, model
    run.undo.push(lambda: _live.pop(run, None))


def close_all() -> None:
    """Close every open run of this process, as if by calling `close()` on each optimizer that `offload` returned.

    Use it in notebooks, where a run may still be open although no variable refers to it any more. A forked child
    process has no open runs.

    Raises:
        Exception: the first error, after all runs have been closed.
    """
    end_all(*(optimizer.close for optimizer, _ in list(_live.values())))


def make_way(paths: Sequence[str]) -> None:
    """Close this process's unused runs that hold one of `paths`. [Note: dropped runs]

    Raises:
        FolderBusyError: if a run is in use. The message lists the variables that refer to its model.
        Exception: if a run cannot be closed.
    """
    wanted = {Path(path).resolve() for path in paths}
    for run, (optimizer, model) in list(_live.items()):
        held = [root.parent for root in run.folder.roots if root.parent.resolve() in wanted]
        if not held:
            continue
        if variables := variables_of(model, apart=(torch.Tensor,)):
            closing = [f"close() of {name}, or " for name in variables_of(optimizer, apart=(object,))]
            raise FolderBusyError(
                f"{held[0]} is in use by run {run.folder.run_id} of this process, whose model is still referenced by "
                f"{', '.join(variables)}. Call {''.join(closing)}infinity.close_all() before starting another run "
                "there."
            )
        _log.info("closing run %s, which is no longer referenced", run.folder.run_id)
        optimizer.close()


@atexit.register
def _close_at_exit() -> None:
    error = getattr(sys, "last_value", None)  # the exception that ended the interpreter, if any
    left = [optimizer for optimizer, _ in _live.values()]
    for optimizer in left:
        if reason := optimizer.run.peers.explain(error):
            _log.error("%s", reason)
    end_all(*(partial(optimizer.close, error) for optimizer in left), cause=error)


def _leave_to_parent() -> None:
    """Disable the runs in a forked child process, because their threads, locks and folders belong to the parent."""
    for run in _live:
        run.leave_to_parent()
    _live.clear()


forks.keep_process_groups()
os.register_at_fork(after_in_child=_leave_to_parent)
