"""Logging to TensorBoard and Weights & Biases, of rank 0."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from infinity.errors import ConfigError
from infinity.optional_dependencies import needs

_log = logging.getLogger("infinity")
TRACKERS = ("tensorboard", "wandb")
"""What `--log` may name."""

_PROJECT = "infinity"


class Tracker(Protocol):
    """Takes the figures of steps."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Take those of a step."""

    def close(self) -> None:
        """Write what is not written yet."""


def check_trackers(names: Sequence[str]) -> None:
    """Check that `--log` names what there is and what is installed. Raises `ConfigError`, `MissingPackageError`."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"--log {name!r} is not one of {', '.join(TRACKERS)}")
        with needs(name, f"--log {name}"):
            if name == "tensorboard":
                import tensorboard  # noqa: F401
            else:
                import wandb  # noqa: F401


class Trackers:
    """All that a run logs to. A context manager: it closes them."""

    def __init__(self, names: Sequence[str], out: Path, run_id: str, first_step: int, facts: Mapping[str, Any]) -> None:
        """Open them.

        Args:
            names: of `TRACKERS`.
            out: the run's folder of results; what is logged goes there.
            run_id: of the run, which the log of a run that goes on belongs to.
            first_step: the first step that will be logged; what is there of it or of later ones is replaced.
            facts: of the run: what it trains and how.

        Raises:
            ConfigError: one cannot be opened.
        """
        self._stack = ExitStack()
        self._open: dict[str, Tracker] = {}
        """By name. One that takes no more, because the drive is full, does not end the training: it is left out."""
        for name in names:
            make = _TensorBoard if name == "tensorboard" else _WeightsAndBiases
            tracker: Tracker = make(out, run_id, first_step, facts)
            self._stack.callback(_close, name, tracker)
            self._open[name] = tracker

    def log(self, row: Mapping[str, Any]) -> None:
        """Log a line of steps.jsonl: all of its numbers."""
        figures = {_name(key): float(value) for key, value in row.items() if key != "step"}
        for name, tracker in [*self._open.items()]:
            try:
                tracker.log(int(row["step"]), figures)
            except Exception as error:  # OSError, and what wandb makes of one
                del self._open[name]
                _log.warning("--log %s has nothing from step %s on: %s", name, row["step"], _reason(error))

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _close(name: str, tracker: Tracker) -> None:
    try:
        tracker.close()
    except Exception as error:
        _log.warning("--log %s may lack its last steps: %s", name, _reason(error))


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())


def _name(key: str) -> str:
    return f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"


class _TensorBoard:
    def __init__(self, out: Path, run_id: str, first_step: int, facts: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer: Any = SummaryWriter(str(out / "tensorboard" / run_id), purge_step=first_step)  # type: ignore
        except OSError as error:
            raise ConfigError(f"--log tensorboard: {out} cannot be written: {error.strerror}") from error

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, out: Path, run_id: str, first_step: int, facts: Mapping[str, Any]) -> None:
        import wandb

        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                id=run_id,
                resume="allow",
                dir=str(out),
                config=dict(facts),
                settings=wandb.Settings(silent=True),
            )
        except (wandb.Error, OSError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"--log wandb: {reason}; WANDB_MODE=offline in the environment needs no account"
            ) from error

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()
