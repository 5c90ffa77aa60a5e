"""Command `infinity tune`: its options and its output."""

from __future__ import annotations

import json as json_format
import shlex
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from infinity.cli_errors import Version, finite
from infinity.config import load_config
from infinity_tools.shared_options import Json, Panel, settings_in

if TYPE_CHECKING:
    from infinity_tools.tune.trial import Workload

_MODEL, _STATE, _SEARCH = map(Panel, ("Model and batch", "State on NVMe", "Search"))


def tune(
    out: Annotated[Path, typer.Option(help="Output folder for infinity.toml, tune.json and tune.png.")] = Path("tuned"),
    model: Annotated[
        str,
        _MODEL.option(
            help="A preset (`--model list` lists them), a transformers config.json, or a folder of weights, as in "
            "`infinity train`."
        ),
    ] = "llama-100m",
    dtype: Annotated[
        str, _MODEL.option(help="Compute dtype: bf16, fp32 or auto (bf16 if the processor supports it).")
    ] = "auto",
    activation_checkpointing: Annotated[bool, _MODEL.shared("activation_checkpointing")] = False,
    batch_tokens: Annotated[int, _MODEL.shared("batch_tokens")] = 512,
    micro_tokens: Annotated[
        int | None, _MODEL.option(min=1, help="Tokens per micro-batch. [default: the whole batch]")
    ] = None,
    loss_tokens: Annotated[int | None, _MODEL.shared("loss_tokens")] = None,
    seq: Annotated[int, _MODEL.option(min=2, help="Tokens per sequence.")] = 256,
    max_grad_norm: Annotated[float | None, _MODEL.shared("max_grad_norm")] = None,
    threads: Annotated[int, _MODEL.option(min=0, max=4096, help="CPU threads. 0: PyTorch's default.")] = 0,
    nvme: Annotated[
        list[Path] | None,
        _STATE.option(
            help="Folder for the state, on the drive that the training run will use; can be repeated. [default: from "
            "--config]"
        ),
    ] = None,
    host_memory: Annotated[str | None, _STATE.setting("memory.host_bytes")] = None,
    activations: Annotated[str | None, _STATE.setting("activations.tier")] = None,
    config: Annotated[Path | None, _STATE.shared("config")] = None,
    allow_format: Annotated[
        str,
        _STATE.option(
            help="Values of state.format to try: same (no change), split (also split, which is bitwise equal) or any "
            "(also formats that round optimizer state)."
        ),
    ] = "same",
    minutes: Annotated[
        float, _SEARCH.option(min=0.05, max=1440, callback=finite, help="Total time limit in minutes.")
    ] = 5.0,
    repeats: Annotated[
        int,
        _SEARCH.option(min=1, max=100, help="Number of final comparisons between the initial settings and the winner."),
    ] = 3,
    json: Json = False,
    version: Version = False,
) -> None:
    """Find the fastest settings for a model on this machine with short training trials.

    For example: `infinity tune --model llama-100m --nvme /nvme0/run --host-memory 2GiB --minutes 5 --out tuned`, then
    `infinity train --config tuned/infinity.toml …`. Trials train on random tokens in temporary folders under --nvme,
    which are removed at the end. A search that is stopped by a signal writes the best settings so far, if a candidate
    was faster than the initial settings. The exit status is 0 if the search completes, even without a gain; 2 if an
    option or a setting must be changed; and 1 for other errors.
    """
    options = dict(locals())
    if model == "list":
        from infinity_tools.presets import list_presets

        list_presets(json=json)
        return
    # Imported late so that --help stays fast.
    from infinity_tools.tune.trial import Workload
    from infinity_tools.tune.tune_report import result_lines
    from infinity_tools.tune.tuning import Tuning, make_plan

    workload = Workload(**{field.name: options[field.name] for field in fields(Workload)})
    changes = settings_in(options) | ({"storage.paths": list(map(str, nvme))} if nvme else {})
    settings = load_config(config).with_values(**changes)
    plan = make_plan(workload, settings, allow_format, minutes=minutes, repeats=repeats)
    summary = Tuning(plan, out, Console(stderr=True), json=json).run()
    if json:
        typer.echo(json_format.dumps(summary))
        return
    console = Console()
    for line in ("", *result_lines(summary, out), *_next_lines(out, workload)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _next_lines(out: Path, workload: Workload) -> list[str]:
    """Return the lines that name the written files and the command that trains with them."""
    from infinity_tools.tune.tuning import FILES, SETTINGS

    wrote = f"wrote {', '.join(str(out / name) for name in FILES)}"
    if workload.loss_tokens is not None:
        why = "it has no counterpart of --loss-tokens; omit the option"
        return ["", wrote, f"`infinity train` cannot run this workload: {why}"]
    micro = workload.micro_tokens or workload.batch_tokens
    words = ["infinity", "train", "--config", str(out / SETTINGS), "--model", workload.model]
    words += ["--max_length", str(workload.seq), "--per_device_train_batch_size", str(micro // workload.seq)]
    if workload.batch_tokens > micro:
        words += ["--gradient_accumulation_steps", str(workload.batch_tokens // micro)]
    words += ["--gradient_checkpointing", str(workload.activation_checkpointing).lower()]
    words += ["--max_grad_norm", f"{workload.max_grad_norm or 0:g}"]
    if workload.dtype != "auto":
        words += ["--bf16", str(workload.dtype == "bf16").lower()]
    threads = f"OMP_NUM_THREADS={workload.threads} " if workload.threads else ""
    return ["", wrote, threads + shlex.join(words)]
