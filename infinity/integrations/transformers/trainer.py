"""`attach`: keep parameters and optimizer state of a Trainer on NVMe."""

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

from infinity import torch_private
from infinity.checkpoint.reader import CheckpointReader
from infinity.config import Config, check_config, load_config
from infinity.errors import CheckpointError, ConfigError, InfinityError, UnsupportedError
from infinity.formats.adapters import peft_model
from infinity.formats.companions import CONFIG, Companions
from infinity.fsdp.sharded_model import ShardedModel
from infinity.integrations.resume_points import going_on
from infinity.integrations.run_folders import make_durable
from infinity.integrations.transformers import trainer_checkpoints, unsupported_arguments
from infinity.integrations.transformers.exports import move_export
from infinity.integrations.transformers.trainer_checkpoints import Checkpoint
from infinity.optional_dependencies import needs
from infinity.ranks import Ranks
from infinity.run.offload import offload
from infinity.run.optimizer import PagedOptimizer
from infinity.sources.initialize import InitFunction

with needs("trainer", "infinity.integrations.transformers"):
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from infinity.integrations.transformers.accumulation import Accumulation, accumulation_of

_log = logging.getLogger("infinity")
_SCHEDULER = "scheduler.pt"  # names used by the Trainer
_ARGUMENTS = "training_args.bin"
_APART = "infinity-export"
"""Subfolder of an export until the export is complete."""
_HOOKS = (
    "create_optimizer", "evaluation_loop", "end", "get_batch_samples", "training_step",
    "_defer_fsdp_gradient_reduction", "_clip_grad_norm", "_get_grad_norm", "log", "_save_checkpoint", "_save",
    "_save_optimizer_and_scheduler", "train", "_load_from_checkpoint", "_load_optimizer_and_scheduler",
    "_load_best_model",
)  # fmt: skip
"""Methods of the Trainer that `OffloadedTrainer` overrides."""
_LOOKED_AT = ("in_forward", "after_backward")
"""Update schedules that allow reading gradients, because updates wait until `step()`."""


def attach(
    trainer: Trainer,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    strict: bool = True,
    init: InitFunction | None = None,
    layer_major: bool | None = None,
) -> None:
    """Let a Trainer train with parameters and optimizer state on NVMe. Call it before `trainer.train()`.

    The optimizer is the one that the Trainer would create (`optim=`) or was given (`optimizers=`). It is offloaded
    when training or an evaluation starts, and is then available as `trainer.optimizer.optimizer`. A Trainer
    checkpoint is a folder with the Trainer's own files, plus an infinity checkpoint on the NVMe paths, which copies
    no data. `trainer.save_model()` exports weights as a stream.

    Args:
        trainer: trainer of transformers, or of a subclass such as TRL's SFTTrainer. `fully_shard` must have been
            called on its model. A model on the meta device needs an ``hf_device_map``, so that the Trainer does not
            move it.
        config, weights, strict, init: as for `infinity.offload`. The Trainer sets `run.resume`
            (`train(resume_from_checkpoint=…)`) and derives `run.retained_checkpoints` from `save_total_limit`.
        layer_major: whether the micro-batches of `gradient_accumulation_steps` run layer by layer (`micro_batches`),
            so that weights are read twice per step instead of twice per micro-batch. None: if the loss is a sum over
            labels that the model computes itself.

    Raises:
        ConfigError: if a setting is invalid or reserved for the Trainer, or checkpoints are kept without a limit.
        UnsupportedError: if the Trainer uses a feature that cannot work, or the model cannot be paged. The message
            gives the reasons.
    """
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"attach needs a Trainer of transformers, got {type(trainer).__name__}")
    own: Any = trainer
    if isinstance(trainer, OffloadedTrainer):
        raise ConfigError("attach was already called on this Trainer")
    if missing := [name for name in _HOOKS if not hasattr(Trainer, name)]:
        raise UnsupportedError(
            f"the Trainer of this transformers has no {', '.join(missing)}; install transformers 5.24"
        )
    settings = load_config(config)
    check_config(settings)
    unsupported_arguments.check(trainer)
    ShardedModel.inspect(own.model)
    settings = _with_limit(settings, own.args)
    accumulation = accumulation_of(trainer, layer_major)
    kind = type(trainer)
    own.__class__ = type(kind.__name__, (OffloadedTrainer, kind), {"__module__": kind.__module__})
    own._infinity = _Offload(settings, partial(offload, weights=weights, strict=strict, init=init), accumulation)
    own.is_distributed_loading_by_transformers = True  # prevents the Trainer from moving or wrapping the model
    name = torch_private.original_class(own.model).__name__
    if own.label_smoother is not None and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        # The Trainer reads the name of the class, which fully_shard has changed.
        own.label_smoother = partial(own.label_smoother, shift_labels=True)


def _with_limit(settings: Config, args: Any) -> Config:
    """Return the settings with `retained_checkpoints` equal to the Trainer's limit. Raises `ConfigError`."""
    if settings.run.resume:
        raise ConfigError(
            f"run.resume = {settings.run.resume!r}: the Trainer decides which checkpoint to resume; remove it, and "
            "call train(resume_from_checkpoint=True)"
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
    """State of an offloaded Trainer."""

    settings: Config
    begin: Any
    """`infinity.offload`, with the source of initial values."""
    accumulation: Accumulation | None
    paged: PagedOptimizer | None = None
    """The optimizer, once the run has started."""
    resume: Checkpoint | None = None
    """Checkpoint that the run starts from."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Settings of the param groups at the start of the run."""
    saving: int | None = None
    """Limit of checkpoints while one of them is written."""


class OffloadedTrainer(Trainer):  # type: ignore[misc]
    """Mixin that `attach` inserts before the class of a Trainer."""

    _infinity: _Offload
    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any

    # The run starts at the first computation #

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Offload the optimizer that the Trainer creates, unless that has been done."""
        self._begin()
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def _begin(self) -> PagedOptimizer:
        state = self._infinity
        if state.paged is None:
            settings, resume = state.settings, state.resume
            if resume is not None:
                settings = going_on(settings, resume.run_id, resume.step)
            state.paged = state.begin(self.model, super().create_optimizer(), settings)
            state.groups = _settings_of(state.paged)
            self.optimizer = AcceleratedOptimizer(state.paged, device_placement=False)
            self.optimizer._is_accelerate_prepared = True
        return state.paged

    def evaluation_loop(self, *args: Any, **named: Any) -> Any:
        """Evaluate. Before training, the initial weights are evaluated."""
        self._begin()
        try:
            return super().evaluation_loop(*args, **named)
        # FSDP2 keeps the root's weights after a forward, which would make the next step differ from the others
        finally:
            for module in self.model.modules():
                if torch_private.is_sharded_module(module):
                    module.reshard()

    def end(self) -> None:
        """Close the run before the process group is destroyed."""
        if self._infinity.paged is not None:
            self._infinity.paged.close()
        super().end()  # type: ignore[no-untyped-call]

    # A step #

    def get_batch_samples(self, *args: Any, **named: Any) -> tuple[list[Any], Any]:
        """Return the micro-batches of a step, and the number of their labels."""
        batches, labels = super().get_batch_samples(*args, **named)
        if self._infinity.accumulation is not None:
            self._infinity.accumulation.begin(batches, labels)
        return batches, labels

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run a micro-batch; return 0 if it runs together with the last one of its step."""
        accumulation = self._infinity.accumulation
        step = super().training_step
        if accumulation is None:
            return step(model, inputs, num_items_in_batch)
        loss = accumulation.run(inputs, lambda batch: step(model, batch, num_items_in_batch))
        return torch.zeros((), device=self.args.device) if loss is None else loss

    @contextlib.contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        """Reduce the gradients of every micro-batch, because unreduced gradients of the whole model would stay in
        memory.
        """
        yield

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        return self._begin().clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the norm, or None if it is not known: reading it would rule out updates in backward."""
        paged = self._begin()
        if grad_norm is None and {self._infinity.settings.update.schedule, paged.update_schedule} & {*_LOOKED_AT}:
            return paged.clip_grad_norm_(math.inf)
        return grad_norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, and publish the loss as a metric of the run."""
        if "loss" in logs and self._infinity.paged is not None:
            self._infinity.paged.report(loss=logs["loss"])
        super().log(logs, start_time)

    # Checkpoints #

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint folder, then the infinity checkpoint that it names, then remove checkpoints beyond the
        limit.
        """
        args, state, paged = self.args, self._infinity, self._begin()
        if not unsupported_arguments.checkpoints(args):
            super()._save_checkpoint(model, trial)
            return
        state.saving, args.save_total_limit = args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)  # it would remove folders before the new checkpoint exists
        finally:
            state.saving, args.save_total_limit = None, state.saving
        ranks, run = Ranks.current(), paged.run
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")

        def flush() -> None:
            if folder.is_dir():  # ranks on another host may not see the folder
                make_durable(folder)

        ranks.together("writing the checkpoint", flush)
        paged.save_checkpoint(prefer=self._best_steps())

        def remove() -> None:
            if args.should_save:
                trainer_checkpoints.remove_others(args.output_dir, run.folder.run_id, run.store.checkpoints)

        ranks.together("removing checkpoints", remove)

    def _best_steps(self) -> list[int]:
        """Return the step of the best checkpoint as a list, empty if there is none; as seen by rank 0."""
        ranks, best = Ranks.current(), self.state.best_model_checkpoint

        def steps() -> list[int]:
            own = trainer_checkpoints.checkpoints_in(self.args.output_dir)
            return [checkpoint.step for checkpoint in own if best is not None and checkpoint.folder == Path(best)]

        return ranks.agree(ranks.together("looking for the best checkpoint", steps))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Export the weights; in a checkpoint folder, write only the reference to the infinity checkpoint."""
        folder = Path(output_dir or self.args.output_dir)
        if self._infinity.saving is None:
            self._export(folder)
        Ranks.current().together("saving the files next to the weights", partial(self._save_companions, folder))

    def _save_companions(self, folder: Path) -> None:
        """Write the files that accompany weights; in a checkpoint folder, the reference to the infinity checkpoint."""
        args, state = copy.copy(self.args), self._infinity
        if not args.should_save:
            return
        if state.saving is not None:
            paged = self._begin()
            Checkpoint(folder, paged.run.folder.run_id, paged.steps).write()
            self._write_config(folder)
            args.save_total_limit = state.saving
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(args, folder / _ARGUMENTS)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the scheduler; the optimizer's state is in the infinity checkpoint."""
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _export(self, folder: Path) -> None:
        """Export the weights into a folder that may have other files, such as checkpoints. All ranks call it
        together.
        """
        ranks, apart = Ranks.current(), folder / _APART

        def clear() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(apart, ignore_errors=True)  # left by a process that was killed

        if peft_model(self.model) is not None:  # PEFT saves the adapters, which are small
            self._begin()
            self.model.save_pretrained(folder)
            return
        ranks.on_first("creating the export folder", clear)
        self._begin().save_pretrained(apart)
        ranks.on_first("moving the export", partial(move_export, apart, folder))

    def _write_config(self, folder: Path) -> None:
        config = Companions.of_run(self._begin().run.folder.checkpoints).config
        if config is not None:
            (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    # Resuming #

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **named: Any) -> Any:
        """Train; with `resume_from_checkpoint=True`, resume from the last checkpoint folder whose infinity checkpoint
        exists.

        Raises:
            ConfigError, UnsupportedError: if the arguments were changed to a combination that cannot work.
            CheckpointError: if the named folder has no infinity checkpoint.
        """
        unsupported_arguments.check(self)
        if _with_limit(self._infinity.settings, self.args) != self._infinity.settings:
            raise ConfigError("save_strategy or save_total_limit was changed after attach(), which reserves the space")
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._last_checkpoint()
        return super().train(resume_from_checkpoint, *args, **named)

    def _last_checkpoint(self) -> str:
        folder, paths = self.args.output_dir, self._infinity.settings.storage.paths
        last, behind = trainer_checkpoints.newest(folder, paths, Ranks.current())
        for other in behind:
            _log.warning("%s is ignored: the checkpoint that it names is not in %s", other, ", ".join(paths))
        if last is None:
            raise CheckpointError(
                f"no checkpoint folder in {folder!r} names a checkpoint in {', '.join(paths)}: nothing to resume from"
            )
        return str(last.folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Record the checkpoint that the run starts from.

        Raises:
            CheckpointError: if the folder names no infinity checkpoint.
            InfinityError: if the run has already started from another state.
        """
        ranks = Ranks.current()
        read = partial(Checkpoint.read, resume_from_checkpoint)
        wanted = ranks.agree(ranks.together("reading the checkpoint", read))
        paged = self._infinity.paged
        if paged is not None and (paged.run.folder.run_id, paged.steps) != (wanted.run_id, wanted.step):
            raise InfinityError(
                f"{resume_from_checkpoint!r} cannot be resumed: this Trainer has already trained or evaluated, "
                "and its run is active; call train(resume_from_checkpoint=…) first, or in a new process"
            )
        self._infinity.resume = wanted
        if paged is not None:
            self._infinity.groups = _settings_of(paged)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the scheduler, and undo the changes that its creation made to the param groups of the optimizer."""
        if checkpoint is not None:
            self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True))
            for group, settings in zip(self.optimizer.param_groups, self._infinity.groups, strict=True):
                group.update(settings)

    def _load_best_model(self) -> None:
        """Read the weights of the best checkpoint, one parameter at a time; the optimizer's state stays."""
        folder, best = self._begin().run.folder, Checkpoint.read(self.state.best_model_checkpoint)
        if best.run_id != folder.run_id:
            _log.warning(
                "%s is of run %s, before the number of ranks or the pages changed: the last weights stay; "
                "`infinity export --run %s --step %d` has the best", best.folder, best.run_id, best.run_id, best.step,
            )  # fmt: skip
            return
        _log.info("loaded the best weights, from %s (%s)", best.folder, self.state.best_metric)
        Ranks.current().together("reading the best weights", partial(self._take_over, best.step))

    @torch.no_grad()
    def _take_over(self, step: int) -> None:
        """Copy trained parameters and buffers from a checkpoint; frozen parameters are identical and not written."""
        run = self._begin().run
        reader, layout = CheckpointReader(run.folder, step), run.layout
        for index, spec in enumerate(reader.manifest(Ranks.current().rank).description.tensors):
            if layout.shards[index].spec.trainable:
                local = self.model.get_parameter(spec.names[0]).to_local()
                local.copy_(reader.read(index, rows=spec.slice_of(spec.shard_rank)).view(local.shape))
        for name, value in reader.buffers():
            self.model.get_buffer(name).copy_(value)


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of the param groups, such as the learning rate."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
