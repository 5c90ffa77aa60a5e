"""Resuming a run: its recipe, the checkpoint to start from, and the commands that use a checkpoint."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

from infinity import Config, torchrun
from infinity.checkpoint.durable import write_durably
from infinity.checkpoint.held import held, seen_in
from infinity.errors import CheckpointError, ConfigError
from infinity.integrations.checkpoint_folders import Record
from infinity.ranks import Ranks
from infinity.store.folder import RunFolder
from infinity_tools.train import recipe as recipes
from infinity_tools.train.recipe import Recipe

_DATA = "data.json"
"""File in the output folder with the checksum of the prepared training data."""
_DEFAULTS: Recipe = {"model": "llama-100m", "method": "sft"}


def stored_recipe(out: str | None, resume: str | None) -> Recipe:
    """Return the recipe of the run to resume, or {} for a new run.

    Args:
        out: Output folder, or None if none was given.
        resume: Value of `--resume`.

    Raises:
        ConfigError: if there is no run to resume.
    """
    if not resume:
        return {}
    named = resume not in ("latest", "auto")
    if not named and out is None:
        raise ConfigError("--resume requires the folder of the run: pass --out, or the OUT/recipe.yaml of the run")
    folder = Path(resume).parent if out is None else Path(out)
    file = folder / recipes.FILE
    if not file.is_file():
        if resume == "auto":
            return {}
        raise ConfigError(f"nothing to resume: {str(file)!r} does not exist; omit --resume, or pass --resume auto")
    return recipes.read(file) | {"output_dir": str(folder.absolute())}


def merged(given: Recipe, stored: Recipe) -> tuple[Recipe, Recipe]:
    """Return the recipe of a run and, if it is resumed, the previous values of the keys that change.

    Args:
        given: Checked values of the recipe and the command line.
        stored: Recipe of the run to resume, or {}.

    Raises:
        ConfigError: if a given value conflicts with the run to resume.
    """
    if not stored:
        return {**_DEFAULTS, **given}, {}
    fixed, changed = recipes.conflicts(recipes.replacing(given, stored), stored)
    if fixed:
        raise ConfigError(
            f"the run in {stored['output_dir']!r} cannot continue with {recipes.shown(fixed, stored)}; omit what "
            "differs, or start a new run with another --out"
        )
    return {**stored, **changed}, {key: stored.get(key) for key in changed}


def find_start(out: Path, resume: str | None, settings: Config, ranks: Ranks) -> Path | None:
    """Return the Trainer's checkpoint folder to start from, or None to start a new run.

    Raises:
        CheckpointError: if no checkpoint can be used. With ``auto``, there may be none at all, or only a first one that
            was interrupted.
    """
    if not resume:
        return None
    if resume not in ("latest", "auto"):
        return Record.of_checkpoint(Path(resume), settings, ranks)[0]
    found = Record.newest(out, "checkpoint-", settings, ranks, optional=resume == "auto")
    if found is None and resume != "auto":
        raise CheckpointError(f"nothing to resume: there is no checkpoint folder in {str(out)!r}")
    return found and found[0]


def finished(start: Path, args: Any) -> tuple[str, int] | None:
    """Return the id and last step of a run that has no steps left to train, or None."""
    state = json.loads((start / "trainer_state.json").read_text())
    step, epoch = int(state["global_step"]), float(state.get("epoch") or 0)
    ended = step >= args.max_steps if args.max_steps > 0 else epoch >= args.num_train_epochs
    return (Record.read(start).run_id, step) if ended else None


def batch_on(ranks: Ranks, out: Path, args: Any) -> dict[str, int]:
    """Return the batch per rank with which a step draws as many examples as in the run to resume.

    Micro-batches do not become larger, because larger ones may exceed the memory.

    Returns:
        Arguments of the trainer to change. Empty if they are the same, or if the examples of a step cannot be divided
        equally among the ranks.
    """
    file = out / _DATA
    if not file.is_file():
        return {}
    each, rest = divmod(json.loads(file.read_text())["batch"], ranks.world_size)
    size = args.per_device_train_batch_size
    if rest or each == size * args.gradient_accumulation_steps:
        return {}
    size = next(smaller for smaller in range(min(size, each), 0, -1) if each % smaller == 0)
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": each // size}


def check_data(out: Path, checksum: str, args: Any, start: Path | None, ranks: Ranks) -> dict[str, Any]:
    """Return the checksum of the prepared training data and the batch, after comparing them with the run to resume.

    The Trainer finds its position in the data by counting steps, so a step must draw as many examples as before.

    Raises:
        ConfigError: if the data or the batch of a resumed run has changed.
    """
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks.world_size

    def check() -> None:
        file = out / _DATA
        if start is None or not file.is_file():
            return
        before = json.loads(file.read_text())
        if before["checksum"] != checksum:
            raise ConfigError(
                f"the prepared data differs from the data of the run in {str(out)!r} (checksum {checksum}, not "
                f"{before['checksum']}); restore the data and tokenizer, or start a new run with another --out"
            )
        if before["batch"] % ranks.world_size:
            raise ConfigError(
                f"a step of the run to resume draws {before['batch']} examples, which cannot be divided equally among "
                f"{ranks.world_size} ranks; choose another number of ranks"
            )
        if before["batch"] != batch:
            raise ConfigError(
                f"a step draws {batch} examples, but {before['batch']} in the run to resume; choose "
                "--per_device_train_batch_size and --gradient_accumulation_steps so that their product with the "
                f"number of ranks ({ranks.world_size}) is {before['batch']}, or omit them"
            )

    ranks.on_first("checking the prepared data", check)
    return {"checksum": checksum, "batch": batch}


def write(recipe: Recipe, data: dict[str, Any]) -> None:
    """Write what is needed to resume a run to its output folder. Raises `OSError`."""
    out = Path(recipe["output_dir"])
    write_durably(out / _DATA, (json.dumps(data) + "\n").encode(), mode=0o666)
    recipes.write(out / recipes.FILE, recipe)


def next_commands(recipe: Recipe, run: RunFolder, step: int, ranks: Ranks, *, stopped: bool) -> dict[str, str]:
    """Return the commands that export the run, resume it, and free its space.

    The commands name the run explicitly, because another run in these folders may be the newest by the time they are
    used.
    """
    out = Path(recipe["output_dir"])
    folders = shlex.join(str(root.parent) for root in run.roots)
    nodes = ranks.world_size // ranks.local_world_size
    infinity, more = ["infinity"], []
    if nodes > 1:
        start, everywhere = torchrun.several_nodes(nodes, ranks.local_world_size)
        infinity = [*start, "-m", "infinity_tools"]
    elif ranks.world_size > 1 and "TORCHELASTIC_RUN_ID" in os.environ:  # set by torchrun
        infinity = ["torchrun", "--nproc-per-node", str(ranks.local_world_size), "-m", "infinity_tools"]
    elif ranks.world_size > 1:
        more = ["--nproc", str(ranks.world_size)]
    if not stopped and recipe.get("max_steps", -1) > 0:
        more += ["--max_steps", str(2 * recipe["max_steps"])]
    elif not stopped:
        more += ["--num_train_epochs", f"{2 * recipe['num_train_epochs']:g}"]
    resume = shlex.join([*infinity, "train", str(out / recipes.FILE), "--resume", *more])
    export = shlex.join(["export", *(str(root.parent) for root in run.roots), "--run", run.run_id, "--step", str(step)])
    export += f" --out {shlex.quote(str(out / f'step{step}'))}"
    free = f"infinity store rm {folders} {run.run_id}"
    if nodes == 1:
        return {"export": f"infinity {export}", "resume": resume, "free": free}
    apart = any(checkpoint.absent for checkpoint in held([seen_in(run)]) if checkpoint.name.step == step)
    return {
        # Without shared drives, no node has the files of all ranks. `--` keeps torchrun from reading `--run` as its own
        # `--run-path`.
        "export": f"{shlex.join([*start, '-m', '--', 'infinity_tools'])} {export}  {everywhere}"
        if apart
        else f"infinity {export}",
        "resume": f"{resume}  {everywhere}",
        "free": f"{free}  # on each of {nodes} nodes" if apart else free,
    }
