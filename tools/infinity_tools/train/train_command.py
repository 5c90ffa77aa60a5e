"""The command `infinity train`: its options, and all other keys of its recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from infinity.cli_errors import Command, Version, failures
from infinity_tools.shared_options import Panel

_MODEL, _STATE, _OUTPUT = map(Panel, ("Model and data", "State on NVMe", "Output"))


def train(
    context: typer.Context,
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE",
            help="YAML file with any of the keys below; options override it. Every run writes its own to "
            "OUT/recipe.yaml.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        _MODEL.option(
            help="A folder written by save_pretrained or a model on the Hub (its weights are streamed from disk), "
            "a transformers config.json (random weights), or a preset (`--model list` lists them). "
            "[default: llama-100m]"
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        _MODEL.option(
            help="Training data; can be repeated: a parquet, jsonl, json, csv, arrow or text file, a folder of such "
            "files or one written by Dataset.save_to_disk, or a dataset on the Hub. [default: the source code of "
            "Python's standard library, only for models without weights]"
        ),
    ] = None,
    method: Annotated[
        str | None,
        _MODEL.option(help="sft (supervised fine-tuning and pretraining) or dpo (preferences). [default: sft]"),
    ] = None,
    tokenizer: Annotated[
        str | None,
        _MODEL.option(help="Folder or Hub model with the tokenizer and chat template. [default: from --model]"),
    ] = None,
    nvme: Annotated[
        list[Path] | None,
        _STATE.option(help="Folder for the state; repeat to spread the state over several drives. [default: OUT/nvme]"),
    ] = None,
    host_memory: Annotated[str | None, _STATE.setting("memory.host_bytes")] = None,
    resume: Annotated[
        str | None,
        _STATE.option(
            "--resume",
            metavar="[auto|CHECKPOINT]",
            help="Resume the run in --out (or in output_dir of the recipe) from its newest checkpoint, or from the "
            "folder CHECKPOINT. Other options are needed only to change them. auto: start a new run if there is no "
            "checkpoint.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        _STATE.option(
            help="TOML file with settings (docs/reference/settings.md), which override RECIPE. --offload options "
            "override both."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        _OUTPUT.option(
            help="Folder for the recipe, checkpoints, summary.json, summary.png and steps.jsonl. A folder with the "
            "results of an earlier run requires --resume. [default: runs/YYYYMMDD-HHMMSS]"
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        _OUTPUT.option(
            help="Write a timeline for ui.perfetto.dev to this JSON file; ranks other than 0 append their rank"
            " to the file name."
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        _OUTPUT.option(
            min=0,
            max=65535,
            help="Serve Prometheus metrics of this node's ranks on this port. 0: any free port. [default: do "
            "not serve metrics]",
        ),
    ] = None,
    metrics_host: Annotated[
        str, _OUTPUT.option(help="Address on which metrics are served, without authentication. 0.0.0.0: all addresses.")
    ] = "127.0.0.1",
    metrics_linger: Annotated[
        float, _OUTPUT.number(0, 10**6, "Seconds to keep serving metrics after the summary has been written.")
    ] = 0.0,
    json: Annotated[bool, _OUTPUT.option("--json", help="Print only the summary, as JSON.")] = False,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks to start on this machine, as with torchrun.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Version = False,
) -> None:
    """Train a causal language model with transformers' Trainer and TRL, with its training state on NVMe.

    Further options: every field of TRL's SFTConfig (DPOConfig with --method dpo), which include
    transformers' TrainingArguments, under its own name: --learning_rate 2e-5, --num_train_epochs 3,
    --max_steps 20, --per_device_train_batch_size 8, --gradient_accumulation_steps 4 (run layer by layer), --max_length
    2048, --save_steps 100, --report_to tensorboard …

    Data: --split, --eval_data, --eval_split and --columns prompt=question,completion=answer. Settings of infinity:
    --offload.state.format 8bit (docs/reference/settings.md). LoRA: the fields of peft's LoraConfig, --peft.r 16. QLoRA:
    add --quantize nf4 or --quantize int8. Early stopping: --early_stopping_patience 3.

    To train on 8 GPUs of this machine, pass `--nproc 8`. For several nodes, use `torchrun --nnodes 2 --nproc-per-node 8
    … -m infinity_tools train …`.
    """
    options = dict(locals())
    with failures(debug=debug):
        from infinity import torchrun

        torchrun.check_slurm(nproc)
        if nproc is not None:
            from infinity_tools.launch import launch

            raise typer.Exit(launch(nproc, ["train", *_without_nproc(context.meta["words"])]))
        from infinity_tools.train import recipe as recipes
        from infinity_tools.train.run import RunOptions, run_training

        if model == "list":
            from infinity_tools.presets import list_presets

            list_presets(json=json)
            return
        typed = recipes.of_words(context.meta["extra"])
        own = {
            "model": model,
            "method": method,
            "tokenizer": tokenizer,
            "data": data or None,
            "output_dir": None if out is None else str(out),
            "offload.storage.paths": [str(path) for path in nvme] if nvme else None,
            "offload.memory.host_bytes": host_memory,
        }

        def given() -> recipes.Recipe:
            found = recipes.read(recipe) if recipe is not None else {}
            found |= recipes.of_config(config) if config is not None else {}
            chosen = {name: value for name, value in own.items() if value is not None}
            return found | recipes.replacing(typed, found) | chosen

        status = run_training(given, RunOptions(**{field.name: options[field.name] for field in fields(RunOptions)}))
    raise typer.Exit(status)


class TrainCommand(Command):
    """Separates the options of this command from the keys of its recipe, and takes `--resume` without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options, and store all other words in the context's `meta`."""
        flags = {
            name: bool(option.is_flag) for option in self.params for name in option.opts if hasattr(option, "is_flag")
        }
        flags["-h"] = flags["--help"] = True
        own: list[str] = []
        extra: list[str] = []
        words = list(args)
        ctx.meta["words"] = list(args)
        while words:
            word = words.pop(0)
            name = _own_name(word, flags)
            if name == "--resume" and "=" not in word:
                own.append(f"--resume={words.pop(0) if words and not words[0].startswith('-') else 'latest'}")
            elif name is not None:
                own.append(name + word[len(word.partition("=")[0]) :])
                if not flags[name] and "=" not in word and words:
                    own.append(words.pop(0))
            elif word.startswith("--"):
                extra.append(word)
                while words and _is_value(words[0]):
                    extra.append(words.pop(0))
            else:
                own.append(word)
        ctx.meta["extra"] = extra
        return super().parse_args(ctx, own)


def _own_name(word: str, flags: dict[str, bool]) -> str | None:
    """Return the option of this command that a word names, in any of its spellings (`--host_memory`), or None."""
    name = word.partition("=")[0]
    return next((known for known in (name, name.replace("_", "-")) if known in flags), None)


def _is_value(word: str) -> bool:
    """Return whether a word is a value rather than an option. Negative numbers are values."""
    return not word.startswith("-") or word[1:2].isdigit() or word[1:2] == "."


def _without_nproc(words: Sequence[str]) -> list[str]:
    found, words = [], list(words)
    while words:
        word = words.pop(0)
        if word == "--nproc":
            words = words[1:]
        elif not word.startswith("--nproc="):
            found.append(word)
    return found


app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command(cls=TrainCommand)(train)
