"""`PagedOptimizer`, the optimizer that `infinity.offload` returns: a `torch.optim.Optimizer` with paged state."""

from __future__ import annotations

import inspect
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from infinity import interrupts, torch_private
from infinity.checkpoint.full_state import FullState
from infinity.checkpoint.model_state import ResumedState
from infinity.errors import ConfigError, InfinityError, UnsupportedError
from infinity.formats.safetensors import FILE_BYTES, export_safetensors, file_size
from infinity.fsdp.passes import Passes
from infinity.optim.base_optimizer import NO_ENTRIES, BaseOptimizer, reject_add_param_group
from infinity.optim.kernel import MODES
from infinity.optim.optimizer_clone import in_place_of
from infinity.optim.states import NotCopied, PagedStates, StateReader
from infinity.optim.step import StepRunner
from infinity.optim.update_thread import telling
from infinity.run.checkpointing import Checkpointer
from infinity.run.live_state import LiveSaves
from infinity.run.run import Run
from infinity.schedule.planner import Simulation
from infinity.telemetry.ledger import StepRecord

_KEPT_RECORDS = 10_000
_log = logging.getLogger("infinity")


class PagedOptimizer(NotCopied, torch.optim.Optimizer):
    """An optimizer that trains a model whose parameters and optimizer state are stored on NVMe.

    `infinity.offload` creates it from a base optimizer, with which it shares `param_groups`. A training step consists
    of a forward pass, one or more backward passes (gradients accumulate), an optional `clip_grad_norm_`, `step` and
    `zero_grad`. `save_checkpoint` durably saves the state after the last step.

    When used as a context manager, the optimizer closes the run at the end of the block.

    Example::

        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        >>> with infinity.offload(model, optimizer, "infinity.toml") as optimizer:
        ...     for batch in loader:
        ...         model(batch).loss.backward()
        ...         optimizer.clip_grad_norm_(1.0)
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     optimizer.save_checkpoint()
    """

    def __init__(
        self,
        base_optimizer: BaseOptimizer,
        run: Run,
        runner: StepRunner,
        passes: Passes,
        states: StateReader,
        checkpointer: Checkpointer,
        saves: LiveSaves,
        resumed: ResumedState | None,
    ) -> None:
        self._made = False  # set at the end of this constructor
        self._closed = False
        self._own, self._run, self._runner, self._passes = base_optimizer, run, runner, passes
        self._base_optimizer = base_optimizer.optimizer  # attributes are looked up there
        self._reader, self._checkpointer, self._saves = states, checkpointer, saves
        self._states = PagedStates(states)  # the value of `state`
        self._extra = resumed.extra if resumed else {}  # user data of the resumed checkpoint
        # Step of the newest checkpoint; None without a checkpoint.
        self._checkpointed = resumed.step if resumed is not None and run.directory.found is not None else None
        self.records: list[StepRecord] = []
        """Measurements of the most recent steps, with the newest last. At most 10,000 are kept."""
        super().__init__(self._base_optimizer.param_groups, self._base_optimizer.defaults)
        del vars(self)["defaults"]  # looked up on the base optimizer, like its other attributes
        base_optimizer.hand_over(self, self._states)
        self._made = True

    # The torch.optim.Optimizer interface #

    @property  # type: ignore[override]
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Param groups, shared with the base optimizer so that schedulers created for it keep working."""
        return self._base_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._made:
            self._base_optimizer.param_groups = groups

    @property  # type: ignore[override]
    def state(self) -> PagedStates:  # type: ignore[override]
        """Optimizer state by parameter. State tensors are read from NVMe on access and written back on assignment.

        Assigning to `state` itself raises `UnsupportedError`.
        """
        return self._states

    @state.setter
    def state(self, value: Any) -> None:
        if self._made:
            raise UnsupportedError(NO_ENTRIES)

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **named: Any) -> Any:  # type: ignore[override]
        """Perform a single optimization step with the gradients accumulated since the last step.

        Args:
            closure (optional): function that reevaluates the model and returns the loss. It is not supported for
                optimizers whose update depends on the loss.

        Returns:
            The loss that `closure` returned, or None.

        Raises:
            StorageError, CorruptPageError, StallError: if a page cannot be transferred. The last checkpoint remains
                intact.
            LostRankError: if another rank failed. The message contains the reason.
            InfinityError: if optimizer settings were changed or gradients were dropped after updates had already run in
                backward, or if the gradients belong to the previous step.
            UnsupportedError: if a param group contains new parameters, the state was replaced, a gradient is not a
                DTensor, arguments other than `closure` were passed, or the update depends on the loss that `closure`
                returns.
        """
        runner = self._runner
        runner.check_open()
        self._own.check()
        if changed := self._own.changed_since_resuming(self):
            _log.warning(
                "%s by a scheduler that was created after the run had resumed. Create schedulers before "
                "infinity.offload, for the optimizer that you pass to it.",
                changed,
            )
        if args or named or (closure is not None and self._own.kernel.uses_closure):
            what = "a closure" if not (args or named) else "an argument other than a closure"
            raise UnsupportedError(
                f"step() of {self._own.name} with {what} is not supported by paged updates. Call step() without it."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._passes.check()
        self._own.called()
        runner.reconcile()
        runner.check_new()
        self._own.kernel.check_steps()
        self._unscale()
        rate = self._base_optimizer.param_groups[0].get("lr")
        skips, in_memory = runner.skips, self._own.in_memory
        with interrupts.held():  # an interrupt between the updates would leave some parameters one step ahead
            in_memory.prepare()
            record = runner.step(others=in_memory.have_gradients)
            if not skips:
                with telling(self._run.pager.fail):
                    in_memory.step()
        if record is not None:
            if rate is not None:
                self._run.ledger.learned_at(float(rate))
            self.records.append(record)
            del self.records[:-_KEPT_RECORDS]
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients accumulated since the last step.

        Args:
            set_to_none: whether to set gradients to None instead of zero.

        Raises:
            InfinityError: if updates with these gradients have already run in backward, or backward was interrupted on
                one of several ranks.
        """
        self._runner.check_open()
        if self._passes.interrupted:
            self._runner.check_repeat()
        self._runner.check_drop()
        repeated = self._passes.drop()
        super().zero_grad(set_to_none)
        self._runner.reconcile()
        if repeated:
            self._runner.restart()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the total norm of the gradients across all parameters and ranks.

        Equivalent to `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`, except that the next `step`
        updates no parameters if the norm is not finite, as with `torch.amp.GradScaler`, and that parameters may be on
        several device meshes, for example with tensor or expert parallelism. Then the norm is computed for each mesh,
        as in transformers' `Trainer`.

        Args:
            max_norm: maximum norm of the gradients.
            norm_type: type of the p-norm; ``inf`` for the infinity norm.
            error_if_nonfinite: whether to raise an error if the norm is not finite.

        Returns:
            Norm of the gradients before clipping, as a scalar tensor.

        Raises:
            InfinityError: if updates run in backward, so the gradients are no longer available. Choose a different
                ``update.schedule``.
            RuntimeError: if the norm is not finite and `error_if_nonfinite` is set.
        """
        self._runner.check_open()
        ledger, parameters = self._run.ledger, self._reader.parameters
        with ledger.phase("update", "norm"), record_function("infinity::clip"):
            self._runner.close_arrivals()
            of_mesh: dict[Any, list[nn.Parameter]] = {}
            for param in parameters:
                if isinstance(grad := param.grad, DTensor):
                    of_mesh.setdefault(grad.device_mesh, []).append(param)
            with ledger.part("collective" if self._run.ranks.world_size > 1 else "update"):
                total, norm = _total_norm(of_mesh.values(), norm_type, error_if_nonfinite)
                ignored = list(self._own.in_memory.ignored.values())
                if ignored:
                    total = norm = self._with_norm_of(ignored, norm, norm_type)
                    if error_if_nonfinite and not norm.isfinite():
                        raise RuntimeError(f"the total norm of order {norm_type} of the gradients is not finite")
                for params in (ignored, *of_mesh.values()):
                    torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)
        ledger.clipped(value := norm.item())
        if not math.isfinite(value):
            self._runner.skips = True
        return norm

    def _with_norm_of(self, ignored: list[nn.Parameter], norm: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Return the total norm of all gradients, where `norm` is the norm of the sharded ones.

        FSDP2 does not reduce the gradients of ignored parameters. If they differ between ranks, their largest norm
        counts, so that all ranks scale the sharded gradients by the same factor.
        """
        grads = [param.grad for param in ignored if param.grad is not None]
        own = torch.nn.utils.get_total_norm(grads, norm_type).to(norm)
        own = torch.stack([own.new_tensor(value) for value in self._run.ranks.collect(own.item())]).max()
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm, own]), norm_type)
        return total

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise an error, because the page layout is fixed after `infinity.offload`.

        Raises:
            UnsupportedError: always.
        """
        if self._made:  # the constructor of the base class adds the existing groups
            reject_add_param_group()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer in the format of `torch.optim.Optimizer.state_dict`.

        Its tensors are sharded like the parameters and stored on NVMe. They are read when they are used, so
        `torch.distributed.checkpoint` saves them, and loads into them, one tensor at a time. `torch.save` would need
        memory for the complete state; it raises `UnsupportedError` if this exceeds the limit for unplanned reads.

        Parameters that were never updated have the state that their first update will create, so that a plain FSDP2
        run can load the state dict.

        Example::

            >>> model_state, optimizer_state = get_state_dict(model, optimizer)
            >>> dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder)

        Raises:
            InfinityError: if gradients are pending (call it after `step`).
        """
        self.check_between("state_dict")
        found = super().state_dict()
        # Plain dictionaries, in which torch.distributed.checkpoint can replace scalars
        state = {key: dict(states) for key, states in found["state"].items()}
        for group, saved in zip(self.param_groups, found["param_groups"], strict=True):
            for param, key in zip(group["params"], saved["params"], strict=True):
                if key not in state and (initial := self._reader.state_of(param, initial=True)):
                    state[key] = dict(initial)
        return {**found, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer: settings of the param groups, and the states of all parameters.

        A tensor that `torch.distributed.checkpoint` has already loaded in place is not written again. `steps` is not
        changed.

        Args:
            state_dict: return value of `state_dict`, or the state dict of the same optimizer in a plain FSDP2 run.

        Raises:
            ValueError: if the state dict does not match the param groups, parameters or states of this optimizer.
                Nothing is changed.
            InfinityError: if gradients are pending (call it after `step`).
        """
        self.check_between("load_state_dict")
        before, after = torch_private.load_state_dict_hooks(self)
        for hook in before:
            state_dict = hook(self, state_dict) or state_dict
        saved = state_dict["param_groups"]
        self._reader.load_state_dict(saved, state_dict["state"])
        for group, settings in zip(self._base_optimizer.param_groups, saved, strict=True):
            group.update(
                {key: in_place_of(group.get(key), value) for key, value in settings.items() if key != "params"}
            )
        for hook in after:
            hook(self)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the base optimizer that `torch.optim.Optimizer` does not define.

        Methods of the base optimizer raise `UnsupportedError` when they are called, because they would have to change
        weights and optimizer state on NVMe. The exceptions are `train` and `eval` of schedule-free optimizers, which
        process all pages; all ranks must call them together.
        """
        base_optimizer = vars(self).get("_base_optimizer")
        if base_optimizer is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = getattr(base_optimizer, name)
        return partial(self._call, name) if inspect.ismethod(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. An attribute of the base optimizer is set there and takes effect in the next step.

        Raises:
            UnsupportedError: if updates would not use the new value.
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
            self._own.in_memory.prepare()
            self._runner.switch(name)
            self._own.in_memory.switch(name)

    # Methods specific to paging #

    def save_checkpoint(self, extra: dict[str, Any] | None = None, *, prefer: Collection[int] = ()) -> None:
        """Save a checkpoint of the state after the last step: weights, optimizer state, random state and `extra`.

        Pages that are already on NVMe are not copied: only modified pages in the host cache are written, and then a
        manifest is published. All ranks must call it together.

        Args:
            extra: user data such as the `state_dict` of a scheduler or the position in the dataset. Numbers (including
                NaN and infinities), strings, None, and lists, tuples and dicts of these are supported. After resuming,
                `resumed_extra` returns an equal value.
            prefer: steps of earlier checkpoints, such as the best one so far, to retain in preference to newer ones
                within the limit set by `run.retained_checkpoints`. The new checkpoint is always retained.

        Raises:
            ConfigError: if `run.retained_checkpoints` is 0.
            CheckpointError: if `extra` contains an unsupported value. The message gives its position, and nothing is
                written.
            InfinityError: if gradients are pending (call it after `step`), or another rank failed.
            UnsupportedError: if a param group contains new parameters, or the state was replaced.
            StorageError: if a write fails. The previous checkpoint remains intact.
        """
        self._runner.check_open()
        if not self._run.settings.run.retained_checkpoints:
            raise ConfigError("run.retained_checkpoints = 0 reserves no space for checkpoints. Set it to 1 or more.")
        self.check_between("save_checkpoint")
        started = time.perf_counter()
        self._checkpointer.save_checkpoint({} if extra is None else extra, prefer)
        self._checkpointed = self.steps
        self._run.ledger.checkpointed(time.perf_counter() - started)
        self._run.ledger.restart_step()

    def check_between(self, what: str) -> None:
        """Check that no gradients are pending and that the optimizer can be saved.

        Args:
            what: name of the calling method, for the error message.

        Raises:
            InfinityError: if gradients are pending, or the optimizer is closed.
            UnsupportedError: if a param group contains new parameters, or the state was replaced.
        """
        self._runner.check_open()
        self._own.check()
        self._runner.reconcile()
        if self._runner.has_gradients:
            raise InfinityError(f"{what}() was called between backward and step(); call it after step()")

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        file_bytes: int | str = FILE_BYTES,
        config: Mapping[str, Any] | None = None,
    ) -> list[Path]:
        """Save the weights after the last step to a folder that `from_pretrained` can load.

        The files are bit for bit equal to the output of `infinity export` for a checkpoint of the same step: the
        weights, with the names and shapes that the model's own `save_pretrained` uses, config.json, and the files next
        to the weights that the run started from. The folder appears only once it is complete. Peak memory is the size
        of one file. All ranks must call it together, between two steps; rank 0 writes the files. Training is not
        affected.

        Args:
            folder: destination; a new or empty folder.
            dtype: dtype in which floating-point weights are saved. By default, the dtype in which they are trained.
            file_bytes: maximum size of the weights per file, in bytes or as a string such as ``"1GiB"``.
            config: contents of config.json. By default, the model's config, if it is a transformers model.

        Returns:
            Paths of the files, on every rank.

        Raises:
            ConfigError: if the folder is not empty or not writable, there is not enough space, the files contain
                different values when they are read back, or an argument is invalid.
            InfinityError: if gradients are pending (call it after `step`), or another rank failed.
            StorageError, CorruptPageError: if a page cannot be read.
        """
        most = file_size(file_bytes)

        def write(state: FullState) -> list[Path]:
            return export_safetensors(state, Path(folder), config=config, dtype=dtype, file_bytes=most)

        return self._saves.write("save_pretrained", self.check_between, write)

    def report(
        self, *, loss: float | torch.Tensor | None = None, tokens: int = 0, total_steps: int | None = None
    ) -> None:
        """Publish, as metrics of this rank, values that only the training loop knows.

        The learning rate, gradient norm, step count and timings are published automatically. Call it once per step.

        Args:
            loss: loss of the step. Passing a tensor synchronizes with its device.
            tokens: number of tokens that this rank has processed since the last call.
            total_steps: number of steps (`steps`) at which training will end, to show the remaining time.

        Raises:
            ConfigError: if `tokens` is negative or not finite, or `total_steps` is negative.
        """
        if not 0 <= tokens < math.inf:
            raise ConfigError(
                f"tokens = {tokens} is out of range. Pass the number of tokens since the last report, 0 or more."
            )
        if total_steps is not None and total_steps < 0:
            raise ConfigError(f"total_steps = {total_steps} is out of range. Pass the step at which training will end.")
        target = None if total_steps is None else max(0, total_steps - self._runner.began)
        self._run.ledger.reported(loss.item() if isinstance(loss, torch.Tensor) else loss, tokens, target)

    @property
    def steps(self) -> int:
        """Number of optimizer steps taken, including the steps before the resumed checkpoint."""
        return self._runner.updates.step

    @property
    def resumed_extra(self) -> dict[str, Any]:
        """User data (`extra`) of the checkpoint that this run resumed from; empty for a new run."""
        return self._extra

    @property
    def update_schedule(self) -> str:
        """Update schedule: ``in_backward``, ``in_forward`` or ``after_backward``; ``recording`` in the first step."""
        return self._runner.planner.schedule

    @property
    def update_device(self) -> str:
        """Type of the device on which updates run: ``cpu``, or the type of the compute device."""
        return self._run.update_device

    def predict_seconds(self, bandwidth: float, computation: float) -> float:
        """Return the predicted duration of a step, in seconds.

        Args:
            bandwidth: total drive bandwidth available to this rank for reads and writes, in bytes per second.
            computation: time per step that is not spent waiting for I/O, in seconds.

        Raises:
            InfinityError: if no step has been taken yet, because there is no plan before the first step.
        """
        plan, moved = self.run.plan, self.run.activation_traffic
        if plan is None:
            raise InfinityError("step time cannot be predicted before the first step; complete a step first")
        return Simulation.of(plan, self.run.layout, threaded=self.run.worker.threaded).seconds(
            bandwidth=bandwidth, computation=computation, activations=moved.read + moved.written
        )

    @property
    def run(self) -> Run:
        """The run of this optimizer: its folder, page layout, plan and counters. Read-only."""
        return self._run

    def read_state(self, name: str) -> dict[str, torch.Tensor]:
        """Return this rank's master weights and optimizer state for one parameter.

        Args:
            name: fully qualified name of the parameter.

        Returns:
            Tensors of shape (local elements,), by state name. Scalar state such as a step count is returned unchanged,
            as are the tensors of a parameter that `fully_shard` ignores.

        Raises:
            InfinityError: if the model has no trainable parameter with that name.
        """
        return self._reader.read(name)

    def drain(self) -> None:
        """Wait for all pending I/O so that the byte counters are final. After that, only `close` may be called.

        Raises:
            InfinityError: if the optimizer is closed.
        """
        self._runner.check_open()
        self._runner.drain()
        self._runner.end("after drain(), only close() is allowed. Call drain() when training has ended.")

    def close(self, error: BaseException | None = None) -> None:
        """Wait for pending I/O and release files, memory and the folder lock. Idempotent.

        Args:
            error: reason why the run ends early. By default, the exception that is being handled. It also ends the
                other ranks, and any further errors during closing are logged instead of raised.

        Raises:
            StallError: if a device does not respond. The folder stays locked until this process exits.
            Exception: the first error, raised after all other resources have been released.
        """
        self._close(error or sys.exception())

    def suspend(self) -> None:
        """Close the run without removing files or reporting steps that no checkpoint contains.

        The caller then offloads the same model again, resuming from a checkpoint of this run.
        """
        self._close(None, suspend=True)

    @property
    def closed(self) -> bool:
        """Whether the run was closed."""
        return self._closed

    def _close(self, cause: BaseException | None, *, suspend: bool = False) -> None:
        if not self._closed and self._run.is_here:
            self._closed = True
            self._runner.end("this optimizer was closed", early=cause is not None)
            if not suspend:
                self._tell_lost_steps()
            try:
                if not suspend and cause is None:
                    self._checkpointer.finish()
            finally:
                self._run.close(cause, checkpointed=self._checkpointed is not None, suspend=suspend)

    def _tell_lost_steps(self) -> None:
        """Warn about steps that no checkpoint contains, unless the settings ask for them to be discarded."""
        first, steps, run = max(self._runner.began, self._checkpointed or 0) + 1, self.steps, self._run
        wanted = run.settings.run.keep != "never" and run.settings.run.retained_checkpoints > 0
        if steps >= first and run.ranks.rank == 0 and wanted:
            which = f"step {first} is" if first == steps else f"steps {first} to {steps} are"
            kept = "the run has no checkpoint" if self._checkpointed is None else "the last checkpoint is older"
            _log.warning(
                '%s discarded: %s; call optimizer.save_checkpoint() before close(), or set run.keep = "never"',
                which,
                kept,
            )

    def __enter__(self) -> PagedOptimizer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close the run.

        Raises:
            LostRankError: if a collective failed because another rank failed. It replaces the error from torch.
        """
        reason = self._run.peers.explain(error) if not self._closed else None
        self._close(error)  # not `close`, which would pick up an exception that the caller is handling
        if reason is not None and reason is not error:
            raise reason from error

    def _unscale(self) -> None:
        """Divide the gradients by the loss scale or skip the step, as `torch.amp.GradScaler` expects of fused
        optimizers.
        """
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is not None and bool(found):
            self._runner.skips = True
        elif scale is not None:
            for param in (*self._reader.parameters, *self._own.in_memory.ignored.values()):
                if param.grad is not None:
                    param.grad.div_(scale)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """``True`` if `torch.amp.GradScaler` leaves unscaling to `step`, as it does for the base optimizer."""
        return bool(getattr(self._base_optimizer, "_step_supports_amp_scaling", False))


def _total_norm(
    meshes: Collection[Sequence[nn.Parameter]], norm_type: float, error_if_nonfinite: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the total norm of gradients, as `torch.nn.utils.get_total_norm` returns it, and as a plain tensor.

    Args:
        meshes: Parameters of each device mesh, all of which have gradients.
    """
    grads = [[param.grad for param in params if param.grad is not None] for params in meshes] or [[]]
    totals = [torch.nn.utils.get_total_norm(of_mesh, norm_type, error_if_nonfinite) for of_mesh in grads]
    norms = [total.full_tensor() if isinstance(total, DTensor) else total for total in totals]
    if len(norms) == 1:
        return totals[0], norms[0]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm, norm


def _is_left_by_torch(name: str, value: Any) -> bool:
    """Return whether torch's schedulers or `torch.amp.GradScaler` set this attribute on optimizers."""
    return torch_private.is_bookkeeping(name, value) or name in ("found_inf", "grad_scale")
