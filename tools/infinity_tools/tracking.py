"""Logging to TensorBoard and Weights & Biases on rank 0."""

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
"""Values of `--log`."""

_PROJECT = "infinity"


class Tracker(Protocol):
    """Destination for the figures of steps."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step."""

    def close(self) -> None:
        """Flush pending data and close."""


def check_trackers(names: Sequence[str]) -> None:
    """Check that the trackers are known and installed. Raises `ConfigError`, `MissingPackageError`."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"--log {name!r} is not one of {', '.join(TRACKERS)}")
        with needs(name, f"--log {name}"):
            if name == "tensorboard":
                import tensorboard  # noqa: F401
            else:
                import wandb  # noqa: F401


class Trackers:
    """All trackers of a run. A context manager that closes them on exit."""

    def __init__(
        self, names: Sequence[str], out: Path, run_id: str, name: str, first_step: int, facts: Mapping[str, Any]
    ) -> None:
        """Open the trackers.

        Args:
            names: Names from `TRACKERS`.
            out: Output folder of the run, which also receives the logs.
            name: Name of the run (`run.name`).
            run_id: Id of the run. A resumed run continues the log with the same id.
            first_step: First step to be logged. Existing entries from this step on are replaced.
            facts: Description of the run: model, data and options.

        Raises:
            ConfigError: If a tracker cannot be opened.
        """
        self._stack = ExitStack()
        self._open: dict[str, Tracker] = {}
        """Trackers by name. A tracker that fails, for example because the drive is full, is dropped and training
        continues.
        """
        for kind in names:
            make = _TensorBoard if kind == "tensorboard" else _WeightsAndBiases
            tracker: Tracker = make(out, run_id, name, first_step, facts)
            self._stack.callback(_close, kind, tracker)
            self._open[kind] = tracker

    def log(self, row: Mapping[str, Any]) -> None:
        """Log all numeric values in a line of steps.jsonl."""
        figures = {_name(key): float(value) for key, value in row.items() if key != "step"}
        for name, tracker in [*self._open.items()]:
            try:
                tracker.log(int(row["step"]), figures)
            except Exception as error:  # OSError, or a wandb exception that wraps it
                del self._open[name]
                _log.warning("--log %s is missing steps from %s on: %s", name, row["step"], _reason(error))

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _close(name: str, tracker: Tracker) -> None:
    try:
        tracker.close()
    except Exception as error:
        _log.warning("--log %s may be missing the last steps: %s", name, _reason(error))


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())


def _name(key: str) -> str:
    return f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"


class _TensorBoard:
    def __init__(self, out: Path, run_id: str, name: str, first_step: int, facts: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer: Any = SummaryWriter(str(out / "tensorboard" / run_id), purge_step=first_step)  # type: ignore
            self._writer.add_text("run/name", name, first_step)
        except OSError as error:
            raise ConfigError(f"--log tensorboard: {out} cannot be written: {error.strerror}") from error

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, out: Path, run_id: str, name: str, first_step: int, facts: Mapping[str, Any]) -> None:
        import wandb

        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                id=run_id,
                name=os.environ.get("WANDB_NAME") or name,
                resume="allow",
                dir=str(out),
                config=dict(facts),
                settings=wandb.Settings(silent=True),
            )
        except (wandb.Error, OSError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"--log wandb: {reason}; to log without an account, set WANDB_MODE=offline in the environment"
            ) from error

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()
