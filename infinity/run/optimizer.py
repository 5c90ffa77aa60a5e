"""The optimizer that users hold: a real `torch.optim.Optimizer` whose state is paged."""

from __future__ import annotations

import inspect
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from infinity import torch_private
from infinity.checkpoint.full_state import FullState
from infinity.checkpoint.model_state import ResumedState
from infinity.errors import ConfigError, InfinityError, UnsupportedError
from infinity.formats.dcp import DcpExport
from infinity.formats.safetensors import FILE_BYTES, export_safetensors, file_size
from infinity.optim.base_optimizer import NO_ENTRIES, BaseOptimizer, refuse_group, refuse_loading
from infinity.optim.kernel import MODES
from infinity.optim.states import NO_COPIES, PagedStates, StateReader
from infinity.optim.step import StepRunner
from infinity.run.checkpointing import Checkpointer
from infinity.run.live_state import LiveSaves
from infinity.run.run import Run
from infinity.telemetry.ledger import StepRecord

_KEPT_RECORDS = 10_000
_log = logging.getLogger("infinity")


class PagedOptimizer(torch.optim.Optimizer):
    """Shares `param_groups` with the optimizer it was made from; made by `infinity.offload`.

    A training step is forward, backward, optionally `clip_grad_norm_`, `step`, `zero_grad`. Several backward
    passes before a step accumulate. `checkpoint` makes the state after the last step durable.
    """

    def __init__(
        self,
        base_optimizer: BaseOptimizer,
        run: Run,
        runner: StepRunner,
        states: StateReader,
        checkpointer: Checkpointer,
        saves: LiveSaves,
        resumed: ResumedState | None,
    ) -> None:
        self._made = False  # whether this constructor has come to its end
        self._closed = False  # whether `close` was called
        self._own, self._run, self._runner = base_optimizer, run, runner
        self._base_optimizer = base_optimizer.optimizer  # where torch looks for everything that is asked of this one
        self._reader, self._checkpointer, self._saves = states, checkpointer, saves
        self._states = PagedStates(states)  # what `state` is
        self._extra = resumed.extra if resumed else {}  # of the checkpoint that the run resumed from
        self._began = resumed.step if resumed is not None else 0  # steps that were taken before this object
        # The step of the newest checkpoint; None where there is none.
        self._checkpointed = resumed.step if resumed is not None and run.directory.found is not None else None
        self.records: list[StepRecord] = []
        """What the last steps took, the newest last; bounded."""
        super().__init__(self._base_optimizer.param_groups, self._base_optimizer.defaults)
        del vars(self)["defaults"]  # those of the given optimizer, as its other attributes
        base_optimizer.hand_over(self, self._states)
        self._made = True

    # The torch.optim.Optimizer interface #

    @property  # type: ignore[override]
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The param groups of the given optimizer, so that schedulers made before still work."""
        return self._base_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._made:
            self._base_optimizer.param_groups = groups

    @property  # type: ignore[override]
    def state(self) -> PagedStates:  # type: ignore[override]
        """The states by parameter, read when they are asked for, kept when they are written to.

        Setting another mapping raises `UnsupportedError`.
        """
        return self._states

    @state.setter
    def state(self, value: Any) -> None:
        if self._made:
            raise UnsupportedError(NO_ENTRIES)

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **named: Any) -> Any:  # type: ignore[override]
        """Apply the gradients that have arrived since the last step.

        Raises:
            StorageError, CorruptPageError, StallError: a page could not be moved; the last checkpoint is intact.
            LostRankError: another rank failed; its reason is named.
            InfinityError: settings changed, or gradients were dropped, after updates had already run in backward; or
                gradients are those of the step before.
            UnsupportedError: parameters were added to a param group, the state was replaced, a gradient was assigned
                that is no DTensor, further arguments were given, or a closure whose loss the updates would depend on.
        """
        runner = self._runner
        runner.check_open()
        self._own.check()
        if args or named or (closure is not None and self._own.kernel.uses_closure):
            what = "a closure" if not (args or named) else "arguments besides a closure"
            raise UnsupportedError(f"step() of {self._own.name} with {what}: updates of pages run without; call step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._own.called()
        runner.reconcile()
        runner.check_new()
        self._own.kernel.check_steps()
        self._unscale()
        rate = self._base_optimizer.param_groups[0].get("lr")
        record = runner.step()
        if record is not None:
            if rate is not None:
                self._run.ledger.learned_at(float(rate))
            self.records.append(record)
            del self.records[:-_KEPT_RECORDS]
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that have arrived and were not used by a step, or set them to zeros.

        Raises:
            InfinityError: updates with them have already run in backward.
        """
        self._runner.check_open()
        self._runner.check_drop()
        super().zero_grad(set_to_none)
        self._runner.reconcile()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the global norm of all gradients over all ranks; return the norm before, a scalar tensor.

        `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`, but that the step will update nothing where the
        norm is not finite, as under `torch.amp.GradScaler`.

        Raises:
            InfinityError: updates run in backward, so the gradients are gone (set ``update.schedule``).
            RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
        """
        self._runner.check_open()
        ledger, parameters = self._run.ledger, self._reader.parameters
        with ledger.phase("update", "norm"), record_function("infinity::clip"):
            self._runner.close_arrivals()
            grads = [param.grad for param in parameters if param.grad is not None]
            with ledger.part("collective" if self._run.ranks.world_size > 1 else "update"):
                total = torch.nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite)
                torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
                norm = total.full_tensor() if isinstance(total, DTensor) else total
        ledger.clipped(value := norm.item())
        if not math.isfinite(value):
            self._runner.skip()
        return norm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after `infinity.offload`: there is no room for more.

        Raises:
            UnsupportedError: always.
        """
        if self._made:  # before, the constructor of the base class asks for those that are there already
            refuse_group()

    def state_dict(self) -> dict[str, Any]:
        """Refused: the state lies on NVMe.

        Raises:
            UnsupportedError: always; `checkpoint` saves the state, `read_state` reads that of one parameter.
        """
        raise UnsupportedError(
            "the optimizer's state is on NVMe and would not fit in memory: optimizer.save_checkpoint() saves it for run.resume, "
            "optimizer.save_dcp(folder) for torch.distributed.checkpoint; optimizer.read_state(name) reads one "
            "parameter's"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused; see `state_dict`.

        Raises:
            UnsupportedError: always.
        """
        refuse_loading()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refused. Raises `UnsupportedError`."""
        raise UnsupportedError(NO_COPIES)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused: neither `copy.copy` nor `pickle`. Raises `UnsupportedError`."""
        raise UnsupportedError(NO_COPIES)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the optimizer that was passed in, of those that torch's optimizers do not have.

        Its methods are refused when they are called: they would have to change weights and states on NVMe. Only `train`
        and `eval` of schedule-free optimizers may be called, which go through all pages; by all ranks together.
        """
        base_optimizer = vars(self).get("_base_optimizer")
        if base_optimizer is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = getattr(base_optimizer, name)
        return partial(self._call, name) if inspect.ismethod(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the optimizer that was passed in, where it has it: updates from the next step on use it.

        Raises:
            UnsupportedError: updates would not know of it.
        """
        there = vars(self)
        if not there.get("_made") or name in there or hasattr(type(self), name) or _is_left_by_torch(name, value):
            super().__setattr__(name, value)
        else:
            self._own.set_attribute(name, value)

    def _call(self, name: str, *args: Any, **named: Any) -> None:
        self._runner.check_open()
        kernel = self._own.kernel
        if name not in MODES or args or named or not kernel.modes:
            self._own.check_method(name, *args, **named)
        elif kernel.would_change(name):
            self._own.check()
            self._runner.switch(name)

    # What paging adds #

    def save_checkpoint(self, extra: dict[str, Any] | None = None, *, prefer: Collection[int] = ()) -> None:
        """Make the state after the last step durable: weights, moments, step counts, random state, `extra`.

        Nothing is copied: modified pages that are still in the host cache are written, then a manifest is
        published. All ranks call it together.

        Args:
            extra: plain data of your own, such as a scheduler's `state_dict` or the data position: numbers (NaN and
                infinities too), texts, None, and lists, tuples and dicts of them. A resumed run finds it in
                `resumed_extra`, equal. What would come back as something else is refused.
            prefer: steps of earlier checkpoints, such as the best one, that are to be among `run.retained_checkpoints`
                before
                newer ones. The new checkpoint always is.

        Raises:
            ConfigError: `run.retained_checkpoints` is 0.
            CheckpointError: `extra` is not such data; the place is named. Nothing is written.
            InfinityError: gradients are pending (call it after `step`), or another rank failed.
            UnsupportedError: parameters were added to a param group, or the state was replaced.
            StorageError: a device or the folder refused; the checkpoint before is intact.
        """
        self._runner.check_open()
        if not self._run.settings.run.retained_checkpoints:
            raise ConfigError(
                "run.retained_checkpoints = 0: there is no room for a checkpoint on the drives; set 1 or more"
            )
        self.check_between("checkpoint")
        started = time.perf_counter()
        self._checkpointer.save_checkpoint({} if extra is None else extra, prefer)
        self._checkpointed = self.steps
        self._run.ledger.checkpointed(time.perf_counter() - started)
        self._run.ledger.restart_step()

    def check_between(self, what: str) -> None:
        """Check that this is between two steps, and that the optimizer can be saved.

        Args:
            what: names the call in the message.

        Raises:
            InfinityError: gradients are pending, or it was closed.
            UnsupportedError: parameters were added to a param group, or the state was replaced.
        """
        self._runner.check_open()
        self._own.check()
        self._runner.reconcile()
        if self._runner.has_gradients:
            raise InfinityError(f"{what}() between backward and step(): call it after step()")

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        file_bytes: int | str = FILE_BYTES,
        config: Mapping[str, Any] | None = None,
        companions: str | os.PathLike[str] | None = None,
    ) -> list[Path]:
        """Write the weights after the last step as a folder that `from_pretrained` loads; training goes on unchanged.

        What `infinity export` writes of a checkpoint, to the bit: names and shapes as `save_pretrained` of the model
        has
        them, config.json, generation config and tokenizer. It is there as a whole, or not at all. Memory is that of one
        file. All ranks call it together, between two steps; rank 0 writes.

        Args:
            folder: new, or empty.
            dtype: of floating-point weights; by default as they are trained.
            file_bytes: most bytes of weights per file, as an integer or as ``"1GiB"``.
            config: content of config.json; by default that of the model, if it is of transformers.
            companions: folder whose tokenizer, generation_config.json and the like are copied along; by default that
                of the `weights` that the run began with.

        Returns:
            The files, on every rank.

        Raises:
            ConfigError: the folder is not empty or cannot be written to, there is no room, or what is read back is
                something else; or an argument is wrong.
            InfinityError: gradients are pending (call it after `step`), or another rank failed.
            StorageError, CorruptPageError: a page cannot be read.
        """
        most = file_size(file_bytes)
        beside = Path(companions) if companions is not None else None

        def write(state: FullState) -> list[Path]:
            return export_safetensors(
                state, Path(folder), config=config, companions=beside, dtype=dtype, file_bytes=most
            )

        return self._saves.write("save_pretrained", self.check_between, {}, write)

    def save_dcp(
        self,
        folder: str | os.PathLike[str],
        *,
        extra: dict[str, Any] | None = None,
        file_bytes: int | str = FILE_BYTES,
    ) -> list[Path]:
        """Write weights and optimizer state after the last step for `torch.distributed.checkpoint`.

        `dcp.load` and `set_state_dict` of a plain FSDP2 run go on from it bit for bit, and so does
        `infinity.offload(…, weights=folder)`. Otherwise as `save_pretrained`.

        Args:
            folder: new, or empty.
            extra: plain data of your own, as for `checkpoint`.
            file_bytes: most bytes of tensors per file, as an integer or as ``"1GiB"``.

        Returns:
            The files, on every rank.

        Raises:
            ConfigError, InfinityError, StorageError, CorruptPageError: as `save_pretrained`.
            CheckpointError: `extra` is not plain data.
        """
        most = file_size(file_bytes)

        def write(state: FullState) -> list[Path]:
            return DcpExport(state).write(Path(folder), file_bytes=most)

        return self._saves.write("save_dcp", self.check_between, {} if extra is None else extra, write)

    def report(self, *, loss: float | torch.Tensor | None = None, tokens: int = 0) -> None:
        """Publish what only the training loop knows, as the metrics of this rank.

        Learning rate, norm of the gradients, steps and times are published without it. Call it once per step.

        Args:
            loss: of the step; a tensor is read, which waits for its device.
            tokens: that this rank has trained on since the last call.

        Raises:
            ConfigError: `tokens` is not a number from 0 on.
        """
        if not 0 <= tokens < math.inf:
            raise ConfigError(f"tokens = {tokens} must be a number from 0 on: those since the last report")
        self._run.ledger.reported(loss.item() if isinstance(loss, torch.Tensor) else loss, tokens)

    @property
    def steps(self) -> int:
        """How many steps were taken, those before a resumed checkpoint too."""
        return self._runner.updates.step

    @property
    def resumed_extra(self) -> dict[str, Any]:
        """The `extra` of the checkpoint that this run resumed from; empty for a new run."""
        return self._extra

    @property
    def update_schedule(self) -> str:
        """``in_backward``, ``in_forward`` or ``after_backward``; ``recording`` in the first step."""
        return self._runner.planner.placed

    @property
    def update_device(self) -> str:
        """``cpu``, or the type of the device that computes: where updates run."""
        return self._run.update_device

    def predict_seconds(self, bandwidth: float, computation: float) -> float:
        """Return how many seconds the plan predicts for a step.

        Args:
            bandwidth: of the drives, for this rank, bytes per second of reads and writes together.
            computation: seconds per step that are no stalls.

        Raises:
            InfinityError: there is no plan before the first step has been taken.
        """
        moved = self.run.activation_traffic
        return self._runner.planner.predict_seconds(bandwidth, computation, moved.read + moved.written)

    @property
    def run(self) -> Run:
        """The run that this optimizer belongs to: its folder, layout of pages, plan and counters, to be looked at."""
        return self._run

    def read_state(self, name: str) -> dict[str, torch.Tensor]:
        """Return this rank's master and optimizer states of one parameter.

        Tensors have shape (local elements,); states that are one number, such as a step count, come as they are.

        Raises:
            InfinityError: there is no trained parameter of that name.
        """
        return self._reader.read(name)

    def drain(self) -> None:
        """Wait until nothing is in flight, so that the byte counters stand still. Training cannot go on then: `close`.

        Raises:
            InfinityError: it was closed.
        """
        self._runner.check_open()
        self._runner.drain()
        self._runner.end("drain() was called, after which there is only close(): call it when training has ended")

    def close(self, error: BaseException | None = None) -> None:
        """Wait for what is in flight and release files, memory and the folder lock. Idempotent.

        Args:
            error: why the run ends early; by default the exception that is being handled. It ends the other ranks, and
                what fails while this one closes is only logged then.

        Raises:
            StallError: a device does not answer; the folder stays locked until this process ends.
            Exception: the first thing that could not be closed or removed; the rest is released all the same.
        """
        self._close(error or sys.exception())

    def _close(self, cause: BaseException | None) -> None:
        if not self._closed and self._run.is_here:
            self._closed = True
            self._runner.end("this optimizer was closed", early=cause is not None)
            self._tell_lost_steps()
            self._run.close(cause, checkpointed=self._checkpointed is not None)

    def _tell_lost_steps(self) -> None:
        """Say which steps end with this object, where that was not asked for; before it is too late to see it."""
        first, steps, run = max(self._began, self._checkpointed or 0) + 1, self.steps, self._run
        wanted = run.settings.run.keep != "never" and run.settings.run.retained_checkpoints > 0
        if steps >= first and run.ranks.rank == 0 and wanted:
            which = f"step {first} is" if first == steps else f"steps {first} to {steps} are"
            kept = "the run was never checkpointed" if self._checkpointed is None else "it is in no checkpoint"
            _log.warning(
                '%s thrown away: %s; call optimizer.save_checkpoint() before it is closed, or set run.keep = "never"',
                which,
                kept,
            )

    def __enter__(self) -> PagedOptimizer:
        """Close at the end of a `with` block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close.

        Raises:
            LostRankError: a collective failed because another rank did; in place of torch's error.
        """
        reason = self._run.peers.explain(error) if not self._closed else None
        self._close(error)  # not `close`: the block may stand inside of somebody's `except`
        if reason is not None and reason is not error:
            raise reason from error

    def _unscale(self) -> None:
        """Do what `torch.amp.GradScaler` leaves to optimizers that are fused: divide gradients, or skip the step."""
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is not None and bool(found):
            self._runner.skip()
        elif scale is not None:
            for param in self._reader.parameters:
                if param.grad is not None:
                    param.grad.div_(scale)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `torch.amp.GradScaler` leaves unscaling to `step`, as it does for the optimizer in memory."""
        return bool(getattr(self._base_optimizer, "_step_supports_amp_scaling", False))


def _is_left_by_torch(name: str, value: Any) -> bool:
    """Whether an attribute is one that torch's schedulers or `torch.amp.GradScaler` leave on an optimizer."""
    return torch_private.is_bookkeeping(name, value) or name in ("found_inf", "grad_scale")
