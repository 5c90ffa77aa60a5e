"""The open runs of this process: closed when it ends, or when their folder is wanted and nobody uses them any more.

[Note: dropped runs] A run whose model nobody can name any more lives on, with its lock and its memory: its tensors
refer to it, where Python's collector does not look. So whether it is in use is found out when its folder is wanted: by
whether a variable leads to its model. What its optimizer or a scheduler still refers to, a loss with its graph,
parameters, the traceback of the last exception or a notebook's history of outputs is no use of it.
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
    """Note a run that has begun, until it ends."""
    run = optimizer.run
    _live[run] = optimizer, model
    run.undo.push(lambda: _live.pop(run, None))


def close_all() -> None:
    """Close every open run of this process, as `close()` of the optimizers that `offload` has returned does.

    For notebooks, where a run may be open that no variable leads to any more. A child that was forked has none.

    Raises:
        Exception: the first thing that could not be closed or removed; the rest is closed all the same.
    """
    end_all(*(optimizer.close for optimizer, _ in list(_live.values())))


def make_way(paths: Sequence[str]) -> None:
    """Close the runs of this process that hold one of `paths` and that nobody uses. [Note: dropped runs]

    Raises:
        FolderBusyError: one is in use; the message names the variables.
        Exception: one could not be closed.
    """
    wanted = {Path(path).resolve() for path in paths}
    for run, (optimizer, model) in list(_live.items()):
        held = [root.parent for root in run.folder.roots if root.parent.resolve() in wanted]
        if not held:
            continue
        if variables := variables_of(model, apart=(torch.Tensor,)):
            closing = [f"close() of {name}, or " for name in variables_of(optimizer, apart=(object,))]
            raise FolderBusyError(
                f"{held[0]} is in use by run {run.folder.run_id} of this process, to whose model "
                f"{', '.join(variables)} still leads; call {''.join(closing)}infinity.close_all() before another run "
                "begins there"
            )
        _log.info("run %s, which no variable leads to any more, is closed", run.folder.run_id)
        optimizer.close()


@atexit.register
def _close_at_exit() -> None:
    error = getattr(sys, "last_value", None)  # what ended the program, if that was an exception
    left = [optimizer for optimizer, _ in _live.values()]
    for optimizer in left:
        if reason := optimizer.run.peers.explain(error):
            _log.error("%s", reason)
    end_all(*(partial(optimizer.close, error) for optimizer in left), cause=error)


def _leave_to_parent() -> None:
    """In a child that was forked: runs, with their threads, locks and folders, are those of the parent."""
    for run in _live:
        run.leave_to_parent()
    _live.clear()


forks.keep_process_groups()
os.register_at_fork(after_in_child=_leave_to_parent)
