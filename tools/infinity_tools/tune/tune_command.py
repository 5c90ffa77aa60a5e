"""`infinity tune`: its options, and what it prints."""

from __future__ import annotations

import json as json_format
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from infinity.cli_errors import Version, finite, setting
from infinity.config import load_config
from infinity_tools.preset_list import list_presets

if TYPE_CHECKING:
    from infinity_tools.tune.trial import Workload

_MODEL, _STATE, _SEARCH = "What is trained", "State on NVMe", "Search"


def tune(
    out: Annotated[
        Path, typer.Option(help="Folder of infinity.toml, tune.json, tune.png and trials.jsonl.")
    ] = Path("tuned"),
    model: Annotated[
        str,
        typer.Option(
            help="As of `infinity train`: a preset (`--model list` shows them), a config.json, or a folder of weights.",
            rich_help_panel=_MODEL,
        ),
    ] = "llama-100m",
    dtype: Annotated[str, typer.Option(help="bf16, fp32 or auto.", rich_help_panel=_MODEL)] = "auto",
    activation_checkpointing: Annotated[
        bool, typer.Option(help="Keep only the inputs of layers; compute them twice.", rich_help_panel=_MODEL)
    ] = False,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens per step.", rich_help_panel=_MODEL)] = 512,
    micro_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that are computed at a time. [default: all]", rich_help_panel=_MODEL),
    ] = None,
    loss_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens whose logits are there at a time, as for `train`. [default: as many as layers compute]",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    seq: Annotated[int, typer.Option(min=2, help="Tokens per sequence.", rich_help_panel=_MODEL)] = 256,
    max_grad_norm: Annotated[
        float | None,
        typer.Option(
            help="Clip the norm of the gradients, as the training will; updates then wait for the end of backward. "
            "[default: off]",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option(min=0, max=4096, help="Threads that compute. 0: torch decides.", rich_help_panel=_MODEL)
    ] = 0,
    nvme: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder for the state, on the drive that will be trained on; repeatable. [default: those of --config]",
            rich_help_panel=_STATE,
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            callback=setting("memory.host_bytes"),
            help="Largest host cache, such as 2GiB; more is never tried. [default: that of --config, else a quarter of "
            "what is free]",
            rich_help_panel=_STATE,
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            callback=setting("activations.tier"),
            help="Where inputs of layers wait for backward: device, host (from a GPU) or nvme. [default: that of "
            "--config, else device]",
            rich_help_panel=_STATE,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Settings to start from, as TOML. [default: infinity's]", rich_help_panel=_STATE),
    ] = None,
    allow_format: Annotated[
        str,
        typer.Option(
            help="What state.format may become. same: what it is; split: that too, which changes no bit; any: also "
            "formats that round the optimizer's states.",
            rich_help_panel=_STATE,
        ),
    ] = "same",
    minutes: Annotated[
        float, typer.Option(min=0.05, max=1440, callback=finite, help="Time for all.", rich_help_panel=_SEARCH)
    ] = 5.0,
    repeats: Annotated[
        int,
        typer.Option(min=1, max=100, help="Comparisons of start and winner at the end.", rich_help_panel=_SEARCH),
    ] = 3,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from OUT/trials.jsonl; --minutes then counts from its beginning.",
                     rich_help_panel=_SEARCH),
    ] = False,
    seed: Annotated[
        int,
        typer.Option(callback=setting("run.seed"), help="Of first values, and of what is drawn.",
                     rich_help_panel=_SEARCH),
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    version: Version = False,
) -> None:  # fmt: skip
    """Find the settings with which this model trains fastest here, by short training with each.

    `infinity tune --model llama-100m --nvme /nvme0/run --host-memory 2GiB --minutes 5 --out tuned`, then
    `infinity train --config tuned/infinity.toml …`. Trials train on random tokens in temporary folders below --nvme
    and leave nothing there. Ends with 0 also where nothing is faster than the start; with 2 where something has to be
    asked for differently, with 1 where something broke.
    """
    if model == "list":
        list_presets(json=json)
        return
    # What tunes is imported now: help needs none of it.
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
        seed=seed,
    )
    changes: dict[str, Any] = {
        "storage.paths": [str(path) for path in nvme] if nvme else None,
        "memory.host_bytes": host_memory,
        "activations.tier": activations,
    }
    settings = load_config(config).with_values(**{name: value for name, value in changes.items() if value is not None})
    plan = make_plan(workload, settings, allow_format, minutes=minutes, repeats=repeats)
    summary = Tuning(plan, out, Console(stderr=True), json=json).run(resume=resume)
    if json:
        typer.echo(json_format.dumps(summary))
        return
    console = Console()
    for line in ("", *result_lines(summary, out), *_next_lines(out, workload)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _next_lines(out: Path, workload: Workload) -> list[str]:
    """Return how to train with what was found."""
    from infinity_tools.options import batch_words
    from infinity_tools.tune.tuning import FILES, SETTINGS

    words = ["infinity", "train", "--config", str(out / SETTINGS), "--model", workload.model]
    words += batch_words(
        workload.batch_tokens, workload.seq, workload.micro_tokens, workload.loss_tokens,
        checkpointing=workload.activation_checkpointing,
    )  # fmt: skip
    if workload.max_grad_norm is not None:
        words += ["--max-grad-norm", f"{workload.max_grad_norm:g}"]
    if workload.dtype != "auto":
        words += ["--dtype", workload.dtype]
    if workload.threads:
        words += ["--threads", str(workload.threads)]
    return ["", f"wrote {', '.join(str(out / name) for name in FILES)}", shlex.join(words)]
