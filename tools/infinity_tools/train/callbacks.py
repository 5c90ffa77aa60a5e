"""Trainer callback that shows and records a run, and ends it on a signal."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from infinity import PagedOptimizer
from infinity.errors import InfinityError
from infinity.integrations.transformers.unsupported_arguments import checkpoints
from infinity.ranks import Ranks
from infinity_tools.progress import StepView, View
from infinity_tools.signals import SIGNALS, StopRequest
from infinity_tools.summary import StepLog

LOG = "steps.jsonl"
"""Name of the log in the output folder."""


class RunCallback(TrainerCallback):  # type: ignore[misc]
    """Shows progress, writes `steps.jsonl`, collects the figures of the summary, and saves and ends on a signal."""

    def __init__(
        self, out: Path, ranks: Ranks, view: View, stop: StopRequest, began: Callable[[PagedOptimizer], None]
    ) -> None:
        """Initialize the callback.

        Args:
            out: Output folder.
            ranks: Ranks of the run.
            view: Display.
            stop: Signals that were received.
            began: Function to call once, when the state is on NVMe and before the first step.
        """
        self._out, self._ranks, self._view, self._stop, self._began = out, ranks, view, stop, began
        self._log: StepLog | None = None
        self._shown = 0  # last step that was shown
        self._saved = 0  # last step after which the Trainer saved
        self.paged: PagedOptimizer | None = None
        """Offloaded optimizer. None before the run has begun."""
        self.losses: list[tuple[int, float]] = []
        """Logged losses, with their steps."""
        self.eval_losses: list[tuple[int, float]] = []
        """Losses of evaluations, with the steps after which they ran."""
        self.first_step = 1
        """First step that this process trains."""
        self.checkpointed = 0
        """Step of the newest checkpoint, or 0."""
        self.best = 0
        """Step of the checkpoint whose weights are loaded at the end (`load_best_model_at_end`), or 0."""
        self.steps = 0
        """Number of steps that this process has trained."""
        self.tokens = 0.0
        """Number of tokens that this process has trained on, summed over all ranks, where the trainer counts them."""
        self.stopped_by = 0
        """Number of the signal that ended training early, or 0."""

    @property
    def logged_steps(self) -> int:
        """Number of steps that `tokens` covers."""
        return self._shown - self.first_step + 1

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Open the log, and show the run."""
        self.paged = named["optimizer"].optimizer
        self.first_step, self.checkpointed = state.global_step + 1, state.global_step
        self._shown = self._saved = state.global_step
        _set_learning_rate(named["lr_scheduler"], named["optimizer"], args.learning_rate)
        if self._ranks.rank == 0:
            self._log = StepLog(self._out / LOG, self.first_step)
        self._began(self.paged)
        self._view.begin(state.global_step, state.max_steps)
        self._stop.patient = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Agree on signals that any rank has received."""
        self.steps += 1
        wishes = self._sum([float(self._stop.received == number) for number in SIGNALS])
        self.stopped_by = next((int(number) for number, wish in zip(SIGNALS, wishes, strict=True) if wish), 0)
        if self.stopped_by:
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"
            control.should_evaluate = False
            args.load_best_model_at_end = False  # stop soon, and keep the weights from which the run resumes
        control.should_log |= self.stopped_by > 0  # with the loss of the last step

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save the last step, which early stopping may have chosen. The Trainer also calls this when it stops."""
        if self.stopped_by:
            control.should_evaluate = False
        if control.should_training_stop:
            control.should_save = args.save_strategy != "no" and self._saved != state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Record and show a step or an evaluation.

        Raises:
            InfinityError: if the loss is not finite.
        """
        step, logs = state.global_step, logs or {}
        if "eval_loss" in logs:
            self.eval_losses.append((step, logs["eval_loss"]))
            self._view.evaluated(step, logs["eval_loss"])
        elif "loss" in logs:
            if not math.isfinite(logs["loss"]):
                raise InfinityError(
                    f"the loss of step {step} is {logs['loss']}; lower --learning_rate, or set --max_grad_norm 1"
                )
            self.losses.append((step, logs["loss"]))
            logs = {**logs, **self._figures(step, logs)}
        else:  # totals at the end of training
            return
        if self._log is not None:
            self._log.write({"step": step, **logs})

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the checkpoint."""
        self._saved = state.global_step
        if checkpoints(args):
            self.checkpointed = state.global_step
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        self.best = int(best.rpartition("-")[2]) if best else 0

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start timing the next step after the evaluation."""
        if self.paged is not None:
            self.paged.run.ledger.restart_step()

    def _figures(self, step: int, logs: dict[str, Any]) -> dict[str, Any]:
        """Show a logged step, and return its figures, which are means over the steps since the previous log."""
        assert self.paged is not None
        records = self.paged.records[-(step - self._shown) :]
        seconds = sum(record.seconds for record in records)
        read, written, stalled = self._sum(
            [
                float(sum(record.read_bytes for record in records)),
                float(sum(record.written_bytes for record in records)),
                sum(record.stall_seconds for record in records) / self._ranks.world_size,
            ]
        )
        count = len(records)
        tokens = (logs.get("num_tokens", 0.0) - self.tokens) / count
        self.tokens = logs.get("num_tokens", 0.0)
        self._shown = step
        self.paged.report(tokens=round(tokens * count / self._ranks.world_size))
        view = StepView(
            step=step,
            loss=logs["loss"],
            seconds=seconds / count,
            tokens=round(tokens),
            read_bytes=read / count,
            written_bytes=written / count,
            stall_share=stalled / seconds,
        )
        self._view.stepped(view)
        return {
            "seconds": view.seconds,
            "tokens_per_second": view.tokens / view.seconds,
            "nvme_read_bytes": round(view.read_bytes),
            "nvme_written_bytes": round(view.written_bytes),
            "stall_share": view.stall_share,
            "stall_seconds": stalled / count,
        }

    def _sum(self, values: list[float]) -> list[float]:
        """Return the sums over all ranks."""
        if self._ranks.world_size == 1:
            return values
        assert self.paged is not None
        total = torch.tensor(values, dtype=torch.float64)
        with self.paged.run.ledger.part("collective"):
            dist.all_reduce(total)
        return [float(value) for value in total]


def _set_learning_rate(scheduler: Any, optimizer: Any, rate: float) -> None:
    """Let a resumed run continue with the learning rate in its arguments. The schedule itself is unchanged."""
    if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        return
    for position, group in enumerate(optimizer.param_groups):
        if group["initial_lr"] != rate:
            group["initial_lr"] = scheduler.base_lrs[position] = rate
            group["lr"] = rate * scheduler.lr_lambdas[position](scheduler.last_epoch)
            scheduler._last_lr[position] = group["lr"]  # which is logged
