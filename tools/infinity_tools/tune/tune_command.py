"""Command `infinity tune`: its options and its output."""

from __future__ import annotations

import json as json_format
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from infinity.cli_errors import Version, finite
from infinity.config import load_config
from infinity_tools.preset_list import list_presets
from infinity_tools.shared_options import setting_option, shared_option

if TYPE_CHECKING:
    from infinity_tools.tune.trial import Workload

_MODEL, _STATE, _SEARCH = "Model and batch", "State on NVMe", "Search"


def tune(
    out: Annotated[
        Path, typer.Option(help="Output folder for infinity.toml, tune.json and tune.png.")
    ] = Path("tuned"),
    model: Annotated[
        str,
        typer.Option(
            help="A preset (`--model list` lists them), a transformers config.json, or a folder of weights, as in "
            "`infinity train`.",
            rich_help_panel=_MODEL,
        ),
    ] = "llama-100m",
    dtype: Annotated[
        str,
        typer.Option(help="Compute dtype: bf16, fp32 or auto (bf16 if the processor supports it).",
                     rich_help_panel=_MODEL),
    ] = "auto",
    activation_checkpointing: Annotated[bool, shared_option("activation_checkpointing", _MODEL)] = False,
    batch_tokens: Annotated[int, shared_option("batch_tokens", _MODEL)] = 512,
    micro_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per micro-batch. [default: the whole batch]", rich_help_panel=_MODEL),
    ] = None,
    loss_tokens: Annotated[int | None, shared_option("loss_tokens", _MODEL)] = None,
    seq: Annotated[int, typer.Option(min=2, help="Tokens per sequence.", rich_help_panel=_MODEL)] = 256,
    max_grad_norm: Annotated[float | None, shared_option("max_grad_norm", _MODEL)] = None,
    threads: Annotated[
        int, typer.Option(min=0, max=4096, help="CPU threads. 0: PyTorch's default.", rich_help_panel=_MODEL)
    ] = 0,
    nvme: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder for the state, on the drive that the training run will use; can be repeated. [default: from "
            "--config]",
            rich_help_panel=_STATE,
        ),
    ] = None,
    host_memory: Annotated[str | None, setting_option("memory.host_bytes", _STATE)] = None,
    activations: Annotated[str | None, setting_option("activations.tier", _STATE)] = None,
    config: Annotated[Path | None, shared_option("config", _STATE)] = None,
    allow_format: Annotated[
        str,
        typer.Option(
            help="Values of state.format to try: same (no change), split (also split, which is bitwise equal) or any "
            "(also formats that round optimizer state).",
            rich_help_panel=_STATE,
        ),
    ] = "same",
    minutes: Annotated[
        float,
        typer.Option(min=0.05, max=1440, callback=finite, help="Total time limit in minutes.",
                     rich_help_panel=_SEARCH),
    ] = 5.0,
    repeats: Annotated[
        int,
        typer.Option(min=1, max=100, help="Number of final comparisons between the initial settings and the winner.",
                     rich_help_panel=_SEARCH),
    ] = 3,
    json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
    version: Version = False,
) -> None:  # fmt: skip
    """Find the fastest settings for a model on this machine with short training trials.

    For example: `infinity tune --model llama-100m --nvme /nvme0/run --host-memory 2GiB --minutes 5 --out tuned`, then
    `infinity train --config tuned/infinity.toml …`. Trials train on random tokens in temporary folders under --nvme,
    which are removed at the end. A search that is stopped by a signal writes the best settings so far, if a candidate
    was faster than the initial settings. The exit status is 0 if the search completes, even without a gain; 2 if an
    option or a setting must be changed; and 1 for other errors.
    """
    if model == "list":
        list_presets(json=json)
        return
    # Imported late so that --help stays fast.
    from infinity_tools.tune.trial import Workload
    from infinity_tools.tune.tune_report import result_lines
    from infinity_tools.tune.tuning import Tuning, make_plan

    workload = Workload(
        model=model,
        dtype=dtype,
        activation_checkpointing=activation_checkpointing,
        batch_tokens=batch_tokens,
        micro_tokens=micro_tokens,
        loss_tokens=loss_tokens,
        seq=seq,
        max_grad_norm=max_grad_norm,
        threads=threads,
    )
    changes: dict[str, Any] = {
        "storage.paths": [str(path) for path in nvme] if nvme else None,
        "memory.host_bytes": host_memory,
        "activations.tier": activations,
    }
    settings = load_config(config).with_values(**{name: value for name, value in changes.items() if value is not None})
    plan = make_plan(workload, settings, allow_format, minutes=minutes, repeats=repeats)
    summary = Tuning(plan, out, Console(stderr=True), json=json).run()
    if json:
        typer.echo(json_format.dumps(summary))
        return
    console = Console()
    for line in ("", *result_lines(summary, out), *_next_lines(out, workload)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _next_lines(out: Path, workload: Workload) -> list[str]:
    from infinity_tools.batch import batch_words, why_not_sliced
    from infinity_tools.tune.tuning import FILES, SETTINGS

    wrote = f"wrote {', '.join(str(out / name) for name in FILES)}"
    if why := why_not_sliced(workload.loss_tokens):
        return ["", wrote, f"`infinity train` cannot run this workload: {why}"]
    words = ["infinity", "train", "--config", str(out / SETTINGS), "--model", workload.model]
    words += batch_words(workload, checkpointing=workload.activation_checkpointing)
    words += ["--max_grad_norm", f"{workload.max_grad_norm or 0:g}"]
    if workload.dtype != "auto":
        words += ["--bf16", str(workload.dtype == "bf16").lower()]
    threads = f"OMP_NUM_THREADS={workload.threads} " if workload.threads else ""
    return ["", wrote, threads + shlex.join(words)]
