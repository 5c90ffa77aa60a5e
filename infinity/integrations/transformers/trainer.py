"""Keep the parameters and optimizer state of a Trainer on NVMe. The entry point is `attach`."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from infinity import torch_private
from infinity.checkpoint.publish import list_checkpoints
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.remote_files import open_files
from infinity.config import Config, check_config, load_config
from infinity.errors import CheckpointError, ConfigError, InfinityError, UnsupportedError
from infinity.formats.adapters import peft_model
from infinity.formats.companions import CONFIG, GENERATION, Companions, keep_configs, keep_tokenizer
from infinity.fsdp.sharded_model import ShardedModel
from infinity.integrations.checkpoint_folders import (
    Checkpoints,
    Record,
    numbered_folders,
    restore_settings,
    settings_of,
)
from infinity.integrations.transformers import unsupported_arguments
from infinity.models.sharding import register_generate
from infinity.optional_dependencies import needs
from infinity.ranks import Ranks
from infinity.run.offload import offload
from infinity.run.optimizer import PagedOptimizer
from infinity.run.run_name import with_name
from infinity.sources.initialize import InitFunction

with needs("trainer", "infinity.integrations.transformers"):
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from infinity.integrations.transformers.accumulation import Accumulation, accumulation_of, why_not_layer_major

_log = logging.getLogger("infinity")
_SCHEDULER = "scheduler.pt"  # names used by the Trainer
_ARGUMENTS = "training_args.bin"
_HOOKS = (
    "create_optimizer", "evaluation_loop", "prediction_step", "end", "get_batch_samples", "training_step",
    "_defer_fsdp_gradient_reduction", "_clip_grad_norm", "_get_grad_norm", "log", "_save_checkpoint", "_save",
    "_save_optimizer_and_scheduler", "train", "_load_from_checkpoint", "_load_optimizer_and_scheduler",
    "_load_best_model",
)  # fmt: skip
"""Methods of the Trainer that `OffloadedTrainer` overrides."""
_LOOKED_AT = ("in_forward", "after_backward")
"""Update schedules that allow reading gradients, because updates do not start before `step()`."""


def attach(
    trainer: Trainer,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    strict: bool = True,
    init: InitFunction | None = None,
    layer_major: bool | None = None,
) -> None:
    """Keep the parameters and optimizer state of a Trainer on NVMe. Call this function before `trainer.train()`.

    The optimizer that the Trainer creates (`optim=`) or receives (`optimizers=`) is offloaded when training or an
    evaluation starts. It is then available as `trainer.optimizer.optimizer`. A Trainer checkpoint consists of a folder
    with the Trainer's own files and an infinity checkpoint on the NVMe paths, which is saved without copying data.
    `trainer.save_model()` exports the weights in bounded memory.

    Args:
        trainer: transformers `Trainer`, or a subclass such as TRL's `SFTTrainer`. `fully_shard` must have been called
            on its model. A model on the meta device must have an ``hf_device_map``, so that the Trainer does not move
            it.
        config, weights, strict, init: see `infinity.offload`. The Trainer sets `run.resume`
            (`train(resume_from_checkpoint=…)`) and derives `run.retained_checkpoints` from `save_total_limit`.
        layer_major: whether the micro-batches of `gradient_accumulation_steps` run layer by layer (`micro_batches`),
            so that weights are read twice per step instead of twice per micro-batch. Default: yes, if the model
            computes the loss itself, as a sum over labels.

    Raises:
        ConfigError: if a setting is invalid or reserved for the Trainer, or the number of checkpoints is not limited.
        UnsupportedError: if the Trainer uses an unsupported feature, or the model cannot be paged. The message gives
            the reasons.
    """
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"attach requires a transformers Trainer, got {type(trainer).__name__}")
    own: Any = trainer
    if isinstance(trainer, OffloadedTrainer):
        raise ConfigError("attach was already called on this Trainer")
    if missing := [name for name in _HOOKS if not hasattr(Trainer, name)]:
        raise UnsupportedError(
            f"the Trainer of the installed transformers has no {', '.join(missing)}; install transformers 5.24"
        )
    settings = load_config(config)
    resumes = bool(settings.run.resume_paths)  # `train` determines the run
    check_config(replace(settings, run=replace(settings.run, resume="latest")) if resumes else settings)
    unsupported_arguments.check(trainer)
    ShardedModel.inspect(own.model)
    register_generate(own.model)
    settings = _with_run_name(_with_limit(settings, own.args), own.args, own.model)
    accumulation = accumulation_of(trainer, layer_major)
    kind = type(trainer)
    own.__class__ = type(kind.__name__, (OffloadedTrainer, kind), {"__module__": kind.__module__})
    own._infinity = _Offload(settings, partial(offload, weights=weights, strict=strict, init=init), accumulation)
    own.is_distributed_loading_by_transformers = True  # prevents the Trainer from moving or wrapping the model
    name = torch_private.original_class(own.model).__name__
    if own.label_smoother is not None and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        # The Trainer checks the class name, which fully_shard has changed.
        own.label_smoother = partial(own.label_smoother, shift_labels=True)


def _with_run_name(settings: Config, args: Any, model: Any) -> Config:
    """Return the settings with the Trainer's run name, or by default the name of the model and the output folder."""
    if not settings.run.name and args.run_name and args.run_name != args.output_dir:
        return replace(settings, run=replace(settings.run, name=args.run_name))
    return with_name(settings, model, args.output_dir)


def _with_limit(settings: Config, args: Any) -> Config:
    """Return the settings with `retained_checkpoints` equal to the Trainer's limit. Raises `ConfigError`."""
    if settings.run.resume:
        raise ConfigError(
            f"run.resume = {settings.run.resume!r} is not supported, because the Trainer decides which checkpoint to "
            "resume from; remove it, and call train(resume_from_checkpoint=True)"
        )
    if not unsupported_arguments.checkpoints(args):
        return settings
    wanted = unsupported_arguments.retained(args)
    if settings.run.retained_checkpoints not in (1, wanted):
        raise ConfigError(
            f"run.retained_checkpoints = {settings.run.retained_checkpoints}, but the Trainer keeps {wanted} "
            f"checkpoints (save_total_limit = {args.save_total_limit}); remove run.retained_checkpoints"
        )
    return replace(settings, run=replace(settings.run, retained_checkpoints=wanted))


@dataclass
class _Offload:
    settings: Config
    begin: Any
    """`infinity.offload`, with the arguments for initial values bound."""
    accumulation: Accumulation | None
    paged: PagedOptimizer | None = None
    """Offloaded optimizer. None until the run has started."""
    checkpoints: Checkpoints | None = None
    """Checkpoint folders of the run. None until the run has started."""
    resume: Record | None = None
    """Checkpoint from which the run resumes, if any."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Settings of the param groups at the start of the run."""
    saving: int | None = None
    """Value of `save_total_limit` while a checkpoint is being written, otherwise None."""


class OffloadedTrainer(Trainer):  # type: ignore[misc]
    """Mixin that `attach` places in front of a Trainer's class."""

    _infinity: _Offload
    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any

    # The run starts at the first computation #

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Offload the optimizer that the Trainer creates, unless it is already offloaded.

        Raises:
            UnsupportedError: if `trainer.optimizer` was replaced after the run had started.
            InfinityError: if the run was closed.
        """
        paged = self._begin()
        optimizer: torch.optim.Optimizer = self.optimizer
        if getattr(optimizer, "optimizer", None) is not paged:
            raise UnsupportedError(
                f"trainer.optimizer was replaced (by {type(optimizer).__name__}) after the run had started; to train "
                "with another optimizer, call trainer.save_model(folder), and start a new run from that folder"
            )
        return optimizer

    def _begin(self) -> PagedOptimizer:
        """Return the offloaded optimizer, and start the run if it has not started. Raises `InfinityError`."""
        state = self._infinity
        if state.paged is not None and state.paged.closed:
            raise InfinityError(
                "the run of this Trainer was closed (trainer.end() closes it), so its weights and optimizer cannot be "
                "used; call trainer.end() last, or resume in a new Trainer with train(resume_from_checkpoint=…)"
            )
        if state.paged is None:
            settings = state.settings if state.resume is None else state.resume.resumed(state.settings)
            state.paged = state.begin(self.model, super().create_optimizer(), settings)
            state.checkpoints = Checkpoints(state.paged, "call trainer.train(resume_from_checkpoint={})")
            state.groups = settings_of(state.paged)
            self.optimizer = AcceleratedOptimizer(state.paged, device_placement=False)
            self.optimizer._is_accelerate_prepared = True
        return state.paged

    def evaluation_loop(self, *args: Any, **named: Any) -> Any:
        """Run an evaluation. Before training, this evaluates the initial weights."""
        self._begin()
        try:
            return super().evaluation_loop(*args, **named)
        finally:
            reshard(self.model)

    def prediction_step(self, *args: Any, **named: Any) -> Any:
        """Run an evaluation step, also outside of an evaluation."""
        self._begin()
        return super().prediction_step(*args, **named)

    def end(self) -> None:
        """Close the run before the process group is destroyed."""
        if self._infinity.paged is not None:
            self._infinity.paged.close()
        super().end()  # type: ignore[no-untyped-call]

    # A step #

    def get_batch_samples(self, *args: Any, **named: Any) -> tuple[list[Any], Any]:
        """Return the micro-batches of a step, and the total number of their labels."""
        batches, labels = super().get_batch_samples(*args, **named)
        if self._infinity.accumulation is not None:
            self._infinity.accumulation.begin(batches, labels)
        return batches, labels

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run a micro-batch. Return a loss of 0 if it is held back to run together with the last one of its step."""
        accumulation = self._infinity.accumulation
        step = super().training_step
        if accumulation is None:
            return step(model, inputs, num_items_in_batch)
        loss = accumulation.run(inputs, lambda batch: step(model, batch, num_items_in_batch))
        return torch.zeros((), device=self.args.device) if loss is None else loss

    @contextlib.contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        """Do not defer the reduction, because unreduced gradients of the whole model would stay in memory."""
        yield

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        return self._begin().clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the norm, or None if it is unknown and computing it would rule out updates in backward."""
        paged = self._begin()
        if grad_norm is None and {self._infinity.settings.update.schedule, paged.update_schedule} & {*_LOOKED_AT}:
            return paged.clip_grad_norm_(math.inf)
        return grad_norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the given values, and report the loss as a metric of the run."""
        paged = self._infinity.paged
        if "loss" in logs and paged is not None and not paged.closed:
            paged.report(loss=logs["loss"], total_steps=self.state.max_steps)
        super().log(logs, start_time)

    # Checkpoints #

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint folder, save its infinity checkpoint, and then remove folders beyond the limit."""
        args, state = self.args, self._infinity
        self._begin()
        if not unsupported_arguments.checkpoints(args):
            super()._save_checkpoint(model, trial)
            return
        place, save = self._get_output_dir(trial=trial), super()._save_checkpoint
        folder = Path(place, f"checkpoint-{self.state.global_step}")

        def write() -> Path:
            state.saving, args.save_total_limit = args.save_total_limit, None
            try:
                save(model, trial)  # with a limit, it would remove folders before the checkpoint exists
            finally:
                state.saving, args.save_total_limit = None, state.saving
            folder.mkdir(parents=True, exist_ok=True)  # ranks on another host may not see the folder of rank 0
            return folder

        assert state.checkpoints is not None
        state.checkpoints.save("save_checkpoint", folder, write, self._best_steps)
        state.checkpoints.remove_others(numbered_folders(place, "checkpoint-"))

    def _best_steps(self) -> list[int]:
        """Return a list with the step of the best checkpoint, or an empty list without one. Rank 0 decides."""
        best = self.state.best_model_checkpoint

        def steps() -> list[int]:
            with contextlib.suppress(ConfigError):  # a damaged folder must not prevent a save
                return [Record.read(Path(best)).step] if best is not None else []
            return []

        return Ranks.current().on_first("looking for the best checkpoint", steps)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Export the weights. The weights of a checkpoint folder are in the infinity checkpoint."""
        self._begin()
        folder = Path(output_dir or self.args.output_dir)
        if self._infinity.saving is None:
            self._export(folder)
        Ranks.current().together("saving the files next to the weights", partial(self._save_companions, folder))

    def _save_companions(self, folder: Path) -> None:
        """Write the files that accompany weights."""
        args, state = copy.copy(self.args), self._infinity
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        run = state.paged.run if state.paged is not None and state.saving is not None else None
        if tokenizer is not None and run is not None and run.keeps_companions:
            keep_tokenizer(run.folder.checkpoints, tokenizer)
        if not args.should_save:
            return
        if state.saving is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._write_config(folder)
            args.save_total_limit = state.saving
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        args.hub_token = None  # a secret
        torch.save(args, folder / _ARGUMENTS)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save only the scheduler, because the optimizer state is in the infinity checkpoint."""
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _export(self, folder: Path) -> None:
        """Export the weights to a folder that may contain other files, such as checkpoints. A collective call."""
        self._begin()
        if peft_model(self.model) is not None:  # PEFT saves the adapters, which are small
            self.model.save_pretrained(folder)
            return
        assert self._infinity.checkpoints is not None
        self._infinity.checkpoints.export(folder)

    def _write_config(self, folder: Path) -> None:
        checkpoints = self._begin().run.folder.checkpoints
        keep_configs(checkpoints, self.model)
        companions = Companions.of_run(checkpoints)
        if companions.config is not None:
            (folder / CONFIG).write_text(json.dumps(companions.config, indent=2) + "\n")
        if GENERATION in companions.files:
            shutil.copyfile(companions.files[GENERATION], folder / GENERATION)

    # Resuming #

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **named: Any) -> Any:
        """Train. ``resume_from_checkpoint=True`` selects the last checkpoint folder whose infinity checkpoint exists.

        Raises:
            ConfigError, UnsupportedError: if the arguments were changed to an unsupported combination after `attach`.
            ConfigError: if the folder to resume from does not refer to an infinity checkpoint.
            CheckpointError: if there is nothing to resume from, or the checkpoint was replaced.
            InfinityError: if the run has already started from a different state.
        """
        unsupported_arguments.check(self)
        _sync_from_shards(self)
        if _with_limit(self._infinity.settings, self.args) != self._infinity.settings:
            raise ConfigError(
                "save_strategy or save_total_limit was changed after attach(), which reserves the space for "
                "checkpoints; set both before attach()"
            )
        reason = why_not_layer_major(self) if self._infinity.accumulation is not None else None
        if reason is not None:
            raise ConfigError(
                f"{reason}, but attach() was called before; set it before attach(), or pass layer_major=False"
            )
        resume = self._record_to_resume(resume_from_checkpoint) if resume_from_checkpoint else None
        return super().train(str(resume) if resume else None, *args, **named)

    def _record_to_resume(self, folder: str | bool) -> Path:
        """Record the checkpoint from which the run resumes, and return its folder."""
        state, ranks = self._infinity, Ranks.current()
        if not isinstance(folder, bool):
            found = Record.of_checkpoint(Path(folder), state.settings, ranks)
        elif (newest := Record.newest(self.args.output_dir, "checkpoint-", state.settings, ranks)) is not None:
            found = newest
        else:
            raise CheckpointError(f"nothing to resume: there is no checkpoint folder in {self.args.output_dir!r}")
        place, state.resume = found
        paged = state.paged
        if paged is not None and (paged.run.folder.run_id, paged.steps) != (state.resume.run_id, state.resume.step):
            raise InfinityError(
                f"cannot resume from {str(place)!r}: this Trainer has already trained or evaluated, and its run is "
                "active; call train(resume_from_checkpoint=…) before anything else, or in a new process"
            )
        if paged is not None:
            state.groups = settings_of(paged)
        return place

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing, because the run resumes from the infinity checkpoint when it starts."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the scheduler, and undo the changes that creating it has made to the optimizer's param groups."""
        if checkpoint is not None:
            self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True))
            restore_settings(self.optimizer, self._infinity.groups)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint, one parameter at a time. The optimizer state is unchanged."""
        folder, place = self._begin().run.folder, self.state.best_model_checkpoint
        best = Record.read(Path(place))
        if best.run_id != folder.run_id:
            _log.warning(
                "keeping the last weights: %s belongs to run %s, before the number of ranks or the pages changed; "
                "to export the best weights, run `infinity export --run %s --step %d`",
                place, best.run_id, best.run_id, best.step,
            )  # fmt: skip
            return
        _log.info("loaded the best weights, from %s (%s)", place, self.state.best_metric)
        ranks = Ranks.current()
        checkpoint = list_checkpoints(folder, ranks, best.step)[-1]
        access = open_files(folder, ranks, checkpoint)
        try:
            ranks.together(
                "reading the best weights", lambda: self._take_over(CheckpointReader(folder, checkpoint, access=access))
            )
        finally:
            access.close()

    @torch.no_grad()
    def _take_over(self, reader: CheckpointReader) -> None:
        """Copy the trained parameters and the buffers of a checkpoint. Frozen parameters are already identical."""
        layout = self._begin().run.layout
        for index, spec in enumerate(reader.manifest(Ranks.current().rank).description.tensors):
            if layout.shards[index].spec.trainable:
                local = self.model.get_parameter(spec.names[0]).to_local()
                local.copy_(reader.read(index, spans=spec.spans).view(local.shape))
        for name, value in reader.buffers():
            self.model.get_buffer(name).copy_(value)


def reshard(model: Any) -> None:
    """Reshard a model after a forward without backward.

    FSDP2 keeps the weights of the root gathered, so the next step would differ from the other steps.
    """
    for module in model.modules():
        if torch_private.is_sharded_module(module):
            module.reshard()


def _sync_from_shards(trainer: Any) -> None:
    """Let TRL's `SyncRefModelCallback` (`sync_ref_model`) read sharded weights.

    The callback itself adds a parameter of the model to one of the reference model, which fails for a DTensor.
    """
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__name__ == "SyncRefModelCallback":
            callback.sync_target_model = _mix


@torch.no_grad()
def _mix(model: nn.Module, target: nn.Module, alpha: float) -> None:
    """Move the weights of `target` towards those of `model`, one full parameter at a time, with TRL's arithmetic."""
    for other, param in zip(target.parameters(), model.parameters(), strict=True):
        own: torch.Tensor = param.detach()
        if isinstance(own, DTensor) and not isinstance(other, DTensor):
            own = own.full_tensor()
        other.data.mul_(1.0 - alpha).add_(own, alpha=alpha)
