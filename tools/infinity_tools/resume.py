"""Resuming a run: options and recipe from the command line or the checkpoint, and the commands that continue from a
finished run.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from infinity import Config, PagedOptimizer
from infinity.checkpoint.manifest import (
    CheckpointName,
    Published,
    choose_checkpoint,
    complete_checkpoints,
    published_in,
    read_manifest,
)
from infinity.checkpoint.publish import choose_run
from infinity.errors import CheckpointError, ConfigError
from infinity.ranks import Ranks
from infinity.sources.reshard import folders_of
from infinity.store.folder import RunFolder
from infinity_tools.options import TrainOptions
from infinity_tools.presets import PRESETS
from infinity_tools.recipe import Recipe, resumed
from infinity_tools.samples.batches import steps_of
from infinity_tools.training_data import BatchSource, TrainingData

_log = logging.getLogger("infinity")
_NO_MODEL = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures", "use_cache"}
"""Keys of a model configuration that do not affect the model."""

_KEPT = (
    "model", "data", "split", "text_column", "loss_on", "tokenizer", "epochs", "eval_data", "eval_split", "eval_every",
    "log", "lora", "batch_tokens", "micro_tokens", "loss_tokens", "seq", "dtype", "activation_checkpointing",
)  # fmt: skip
"""Options that checkpoints store, so that they need not be repeated when the run is resumed."""

_PATHS = {"data", "eval_data", "tokenizer"}


def recorded_options(options: TrainOptions) -> dict[str, Any]:
    """Return the options that a checkpoint stores, with absolute paths so that they hold in any working directory."""

    def plain(name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(name, item) for item in value]
        if isinstance(value, Path) or (name == "model" and value not in PRESETS and os.path.exists(value)):
            return os.path.abspath(value)
        return value

    return {name: plain(name, getattr(options, name)) for name in _KEPT}


def taken_up(options: TrainOptions, settings: Config, ranks: Ranks) -> TrainOptions:
    """Return the options. Options that were not passed are taken from the checkpoint to resume from."""

    def made(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return tuple(made(name, item) for item in value)
        return Path(value) if name in _PATHS and value is not None else value

    paths = settings.run.resume_paths or settings.storage.paths
    if not all(ranks.collect(all(map(os.path.isdir, paths)))):
        return options  # no folder to resume from, which is reported later
    held = ranks.agree(_extra_of(checkpoint_of(settings, ranks))).get("options", {})
    held = held if isinstance(held, dict) else {}
    if "steps" in options.said:
        held = {**held, "epochs": None}
    if options.said and "lora" in options.said and held and held.get("lora") != options.lora:
        began = f"--lora {held['lora']}" if held.get("lora") else "all parameters, without --lora"
        raise ConfigError(f"--lora {options.lora} cannot resume a run that trains {began}; omit --lora")
    changes = {name: made(name, held[name]) for name in _KEPT if name in held and name not in options.said}
    return replace(options, **changes)


def last_step(options: TrainOptions, settings: Config, data: TrainingData, ranks: Ranks) -> int:
    """Return the last step of the run: the end of `--epochs`, or `--steps`.

    A resumed run has already drawn some of the sequences, possibly with a different batch size, so the number cannot be
    derived from its step.
    """
    if options.epochs is None:
        return options.steps
    sequences = options.batch_tokens // options.seq
    found = checkpoint_of(settings, ranks) if settings.run.resume else None
    if found is None:
        return steps_of(options.epochs, data.epoch, sequences)
    step = found[1].step
    drawn = drawn_before(step, ranks.agree(_extra_of(found)), data.facts, data.batches)
    return step + steps_of(options.epochs, data.epoch, sequences, drawn)


def drawn_before(step: int, extra: Mapping[str, Any], facts: Mapping[str, Any], batches: BatchSource) -> int:
    """Return how many sequences the steps before a checkpoint have drawn from this data, or 0 if they used different
    data.

    Args:
        step: Step of the checkpoint.
        extra: Extra entries of the checkpoint.
        facts: Description of the current data.
        batches: Source of the batches.
    """
    if extra.get("data", {}).get("content") != facts.get("content"):
        return 0
    drawn = extra.get("drawn")
    return int(drawn) if isinstance(drawn, int) else batches.drawn(step)


def _extra_of(found: tuple[RunFolder, CheckpointName] | None) -> Mapping[str, Any]:
    """Return the extra entries of the checkpoint, or {} if no checkpoint exists or it cannot be read.

    Errors in the checkpoint are reported when it is loaded.
    """
    if found is None:
        return {}
    folder, checkpoint = found
    for rank in range(checkpoint.world_size):  # manifests of other nodes are not on this one
        file = folder.checkpoints / checkpoint.of(rank).file_name
        if file.is_file():
            try:
                return read_manifest(file).extra
            except CheckpointError:
                return {}
    return {}


def checkpoint_of(settings: Config, ranks: Ranks) -> tuple[RunFolder, CheckpointName] | None:
    """Return the run to resume and its checkpoint, or None if a new run begins. No file of the run is opened or
    changed.

    Raises:
        CheckpointError: If the checkpoint does not exist.
    """
    paths = settings.run.resume_paths or settings.storage.paths
    run_id = choose_run(paths, settings.run.resume, ranks)
    if not run_id:
        return None
    folder = ranks.together("finding the run's folders", lambda: folders_of(paths, run_id, settings.storage.paths))
    published = set[Published]().union(*ranks.collect(published_in(folder.checkpoints)))
    return folder, choose_checkpoint(run_id, complete_checkpoints(published), settings.run.resume_step)


def finished(settings: Config, options: TrainOptions, ranks: Ranks) -> tuple[str, int] | None:
    """Return the id and step of the run to resume if it has no steps left to train.

    Raises:
        CheckpointError: If the checkpoint does not exist.
    """
    found = checkpoint_of(settings, ranks)
    return (found[0].run_id, found[1].step) if found is not None and found[1].step >= options.steps else None


def agreed_recipe(
    asked: Recipe, paged: PagedOptimizer, facts: dict[str, Any], options: TrainOptions, ranks: Ranks
) -> Recipe:
    """Return the recipe to train with, and warn about options that differ from the resumed run."""
    found = paged.resumed_extra
    if not paged.steps:
        return asked
    recipe, says = resumed(options.given, found.get("recipe"), options.steps, override=options.override)
    before, now = found.get("data", {}), facts["data"]
    if before.get("content", "") != now.get("content", "") and not options.override:
        raise ConfigError(_other_data(before, now))
    if other := [
        f"{name} {now[name]} (was {before[name]})"
        for name in now
        if name != "content" and now[name] != before.get(name, now[name])
    ]:
        says.append(
            f"these options replace the values in the checkpoint: {', '.join(other)}; the batches differ accordingly"
        )
    before, now = found.get("computation", {}), facts["computation"]
    if other := [f"{name} {now[name]} (was {before[name]})" for name in before if before[name] != now.get(name)]:
        says.append(f"these options replace the values in the checkpoint: {', '.join(other)}")
    before, now = found.get("model_config", {}), facts["model_config"]
    if other := [
        f"{name} {now.get(name)} (was {before[name]})"
        for name in before
        if name not in _NO_MODEL and before[name] != now.get(name)
    ]:
        says.append(f"the model differs from the one in the checkpoint: {', '.join(other)}")
    if ranks.rank == 0:
        for text in says:
            _log.warning("%s", text)
    return recipe


def _other_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if "content" not in now:
        what = "the run was trained on a dataset, but --data is not a dataset"
    elif "content" not in before:
        what = "the run was trained on plain text, but --data is a dataset"
    elif before.get("seq") != now["seq"]:
        what = f"its dataset was packed for --seq {before.get('seq')}, but --seq is {now['seq']}"
    else:
        what = "the tokens of its dataset have changed (because of different files, tokenizer, columns or --loss-on)"
    return f"cannot resume at the next sample: {what}; pass --override to restart from the first sample"


def next_commands(
    options: TrainOptions,
    settings: Config,
    ranks: Ranks,
    run: RunFolder,
    checkpointed: int,
    out: Path,
    *,
    stopped: bool,
) -> dict[str, str]:
    """Return the commands that export the run, resume it, and free its space, or {} if the run left no checkpoint.

    The commands name the run explicitly, because another run in these folders may be the newest by the time they are
    used.
    """
    if settings.run.keep == "never" or not checkpointed:
        return {}
    folders = shlex.join(str(root.parent) for root in run.roots)
    train = ["infinity", "train"]
    if ranks.world_size > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:  # set by torchrun
        train += ["--nproc", str(ranks.world_size)]
    elif ranks.world_size > 1:
        train = ["torchrun", "--nproc-per-node", str(ranks.local_world_size), "-m", "infinity_tools", "train"]
    again = [*train, *options.again]
    if options.epochs is None:
        until = ["--steps", str(options.steps if stopped else 2 * options.steps)]
    else:  # the checkpoint stores the original --epochs
        until = [] if stopped else ["--epochs", f"{2 * options.epochs:g}"]
    return {
        "export": f"infinity export {folders} --run {run.run_id} --step {checkpointed} "
        f"--out {shlex.quote(str(out / f'step{checkpointed}'))}",
        "resume": shlex.join([*again, "--out", str(out), "--resume", run.run_id, *until]),
        "free": f"infinity store rm {folders} {run.run_id}",
    }
