"""`infinity plan`: will it fit, where does everything lie, how long does a step take, how long do the drives live?"""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from infinity.cli_errors import Version, at_most, finite, setting
from infinity_tools.output import check_out, write_out
from infinity_tools.preset_list import list_presets

_MODEL, _RUN, _MACHINE, _OUTPUT = "Model", "Training", "Machine", "Output"


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            help="A preset (`--model list` shows them), a config.json or folder of transformers, or the id of a "
            "model in the cache of the Hub.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    parameters: Annotated[
        float | None,
        typer.Option(
            min=1e3,
            callback=at_most(1e15),
            help="Instead of --model: parameters of a decoder, such as 70e9, with --layers, --hidden, --vocabulary.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, callback=at_most(100_000), help="Its layers.", rich_help_panel=_MODEL)
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(min=8, callback=at_most(10**6), help="Its width.", rich_help_panel=_MODEL)
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=2, callback=at_most(10**8), help="Its tokens.", rich_help_panel=_MODEL)
    ] = None,
    tied: Annotated[bool, typer.Option("--tied", help="Its head is its embedding.", rich_help_panel=_MODEL)] = False,
    lora: Annotated[
        str | None,
        typer.Option(
            metavar="r=16",
            help="Freeze it and train LoRA beside its matrices, as `infinity train` takes it: a rank, or "
            "r=16,targets=q_proj+v_proj.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    trainable: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            callback=finite,
            help="Train only this share of it, the last layers, such as 0.1.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp32: what is computed in.", rich_help_panel=_MODEL)] = "bf16",
    batch_tokens: Annotated[
        int,
        typer.Option(min=1, callback=at_most(10**12), help="Tokens per step, over all ranks.", rich_help_panel=_RUN),
    ] = 8192,
    seq: Annotated[
        int | None,
        typer.Option(
            min=2,
            callback=at_most(10**8),
            help="Tokens per sequence. [default: 4096, or all of a smaller batch]",
            rich_help_panel=_RUN,
        ),
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            min=1,
            callback=at_most(10**6),
            help="Parts in which a rank computes its batch. [default: as few as the accelerator has memory for]",
            rich_help_panel=_RUN,
        ),
    ] = None,
    loss_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens whose logits are there at a time, as for `train`.", rich_help_panel=_RUN),
    ] = None,
    loop: Annotated[
        bool,
        typer.Option(
            "--loop",
            help="The micro-batches run one after the other through the whole model, not each layer all of them.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    activation_checkpointing: Annotated[
        bool, typer.Option(help="Keep only the inputs of layers; compute them twice.", rich_help_panel=_RUN)
    ] = True,
    clip: Annotated[
        bool, typer.Option("--clip", help="Gradients are clipped by their global norm.", rich_help_panel=_RUN)
    ] = False,
    optimizer: Annotated[
        str,
        typer.Option(help="adamw, adam, amsgrad, adagrad, rmsprop, lion, momentum or sgd.", rich_help_panel=_RUN),
    ] = "adamw",
    ranks: Annotated[
        int, typer.Option(min=1, callback=at_most(100_000), help="Ranks on each node.", rich_help_panel=_MACHINE)
    ] = 1,
    nodes: Annotated[int, typer.Option(min=1, callback=at_most(100_000), help="Nodes.", rich_help_panel=_MACHINE)] = 1,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Accelerator of each rank, by name (`--gpu list`). [default: the processor of this machine, on which "
            "one layer is measured]",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            callback=at_most(1e6),
            help="Tera-operations per second that training reaches on it. [default: 40 % of its peak in bf16]",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Its memory. [default: by its name]", rich_help_panel=_MACHINE)
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="Bytes per second between host and it, each way, such as 55e9.", rich_help_panel=_MACHINE),
    ] = None,
    update_cores: Annotated[
        int | None,
        typer.Option(
            callback=setting("update.cores"),
            help="Cores of a thread for updates, beside computation; 0: none. [default: with an accelerator, as many "
            "as a run on this machine takes; else 0]",
            rich_help_panel=_RUN,
        ),
    ] = None,
    interconnect: Annotated[
        str | None,
        typer.Option(
            help="Bytes per second at which a rank exchanges with the others. [default: takes no time]",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            callback=setting("memory.host_bytes"),
            help="Size of the host cache of a rank. [default: a quarter of what is free here]",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    nvme: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder on a drive of this machine; repeat it for several drives. Its bandwidth is what infinityd has "
            "measured, else it is measured now. [default: those of --config, if they are there, or this folder]",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    nvme_bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Instead of --nvme: what one drive reads and writes per second, such as 7e9/5e9, or 7e9/5e9/6e9 with "
            "what it moves when it does both.",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    nvme_count: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="How many such drives each node has. [default: 1]", rich_help_panel=_MACHINE
        ),
    ] = None,
    nvme_size: Annotated[
        str | None, typer.Option(help="What is free on each of them.", rich_help_panel=_MACHINE)
    ] = None,
    nvme_endurance: Annotated[
        str | None,
        typer.Option(help="Bytes that each may be written with, such as 1200TB.", rich_help_panel=_MACHINE),
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            "--runtime-dir",
            help="Runtime folder of the daemon that may know the drives. [default: as telemetry.runtime_dir]",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    page_bytes: Annotated[
        str | None,
        typer.Option(callback=setting("memory.page_bytes"), help="Setting of a run.", rich_help_panel=_RUN),
    ] = None,
    state_format: Annotated[
        str | None,
        typer.Option(callback=setting("state.format"), help="fp32, split, bf16-moments or 8bit.", rich_help_panel=_RUN),
    ] = None,
    update: Annotated[
        str | None,
        typer.Option(
            callback=setting("update.schedule"),
            help="auto, in_backward, in_forward or after_backward.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            callback=setting("activations.tier"),
            help="Where inputs of layers wait for backward: device, host (from a GPU) or nvme. [default: device]",
            rich_help_panel=_RUN,
        ),
    ] = None,
    retained_checkpoints: Annotated[
        int | None, typer.Option(min=0, help="Checkpoints that are kept.", rich_help_panel=_RUN)
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Settings as TOML to plan with; options override it.", rich_help_panel=_RUN),
    ] = None,
    changes: Annotated[bool, typer.Option(help="Plan what would help most, too.", rich_help_panel=_OUTPUT)] = True,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for plan.json, plan.png and infinity.toml.", rich_help_panel=_OUTPUT),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.", rich_help_panel=_OUTPUT)] = False,
    version: Version = False,
) -> None:
    """Plan a run before there is one: does it fit, where does everything lie, how long do steps take, do drives last?

    The model is not trained, and nothing of its size is allocated; without --gpu or --tflops three of its layers are
    timed. The planner and the clock are those of a run. The settings that it prints are what `infinity train --config`
    and `infinity.offload` take; with --model, it ends with the line that trains what was planned.

    For example: `infinity plan --parameters 70e9 --layers 80 --hidden 8192 --vocabulary 128256 --host-memory 256GiB
    --nvme-bandwidth 7e9/5e9 --nvme-count 4 --gpu h100 --batch-tokens 32768`.

    Ends with status 0 if it fits, 1 if it does not, 2 if it was asked for wrongly or the host cache is too small.
    """
    if gpu == "list":
        _list_accelerators(json=json)
        return
    if model == "list":
        list_presets(json=json)
        return
    if out is not None:
        check_out(out)
    # What plans is imported now: help needs none of it.
    from infinity.estimate.advice import best_changes
    from infinity_tools.plan.inputs import Asked, assumptions_of, plan_of
    from infinity_tools.plan.plan_report import document, show
    from infinity_tools.plan.train_line import train_line
    from infinity_tools.toml import settings_toml

    asked = Asked(
        model=model,
        parameters=parameters,
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        tied=tied,
        lora=lora,
        trainable=trainable,
        dtype=dtype,
        batch_tokens=batch_tokens,
        sequence=seq,
        micro_batches=micro_batches,
        loss_tokens=loss_tokens,
        loop=loop,
        checkpointing=activation_checkpointing,
        clip=clip,
        optimizer=optimizer,
        ranks=ranks,
        nodes=nodes,
        gpu=gpu,
        tflops=tflops,
        gpu_memory=gpu_memory,
        link=link,
        interconnect=interconnect,
        nvme=tuple(nvme or _paths_of(config if nvme_bandwidth is None else None)),
        nvme_bandwidth=nvme_bandwidth,
        nvme_count=nvme_count,
        nvme_size=nvme_size,
        nvme_endurance=nvme_endurance,
        config=config,
        settings={
            name: value
            for name, value in {
                "memory.host_bytes": host_memory,
                "memory.page_bytes": page_bytes,
                "state.format": state_format,
                "update.schedule": update,
                "activations.tier": activations,
                "update.cores": update_cores,
                "run.retained_checkpoints": retained_checkpoints,
                "telemetry.runtime_dir": runtime,
            }.items()
            if value is not None
        },
    )
    console = Console(stderr=True)
    with console.status("planning") as status:
        found, sources = plan_of(asked, status.update)
        assumptions = assumptions_of(found, asked, sources)
        status.update("planning what would help")
        best = best_changes(found) if changes else []
        settings = found.settings.with_values(**{"storage.paths": asked.paths})
        text = settings_toml(settings, ["Settings of infinity, from `infinity plan`."])
        answer = {**document(found, best, assumptions), "toml": text}
        shown = json_format.dumps(answer, indent=2)
        if out is not None:
            status.update("drawing")
            from infinity_tools.plan.plan_plot import figure

            write_out(out, {"plan.json": shown + "\n", "infinity.toml": text}, {"plan.png": figure(found)})
    if json:
        typer.echo(shown)
    else:
        printed = Console(highlight=False)
        show(found, best, assumptions, printed)
        printed.print()
        printed.print(text, markup=False, end="", soft_wrap=True)
        if out is not None:
            printed.print(f"wrote plan.json, plan.png and infinity.toml in {out}", markup=False)
        if line := train_line(asked, found, settings, None if out is None else out / "infinity.toml"):
            printed.print(f"\n{line}", markup=False, soft_wrap=True)
    raise typer.Exit(1 if found.problems else 0)


def _list_accelerators(*, json: bool) -> None:
    from infinity.estimate.machine import ACCELERATORS
    from infinity.units import format_size
    from infinity_tools.tables import table

    known = sorted(ACCELERATORS.values(), key=lambda one: one.name)
    if json:
        listed = [
            {"name": one.name, "flops": one.flops, "memory_bytes": one.memory_bytes, "link": one.link} for one in known
        ]
        typer.echo(json_format.dumps(listed))
        return
    rows = [
        (one.name, f"{one.flops / 1e12:.0f}", format_size(one.memory_bytes), f"{one.link / 1e9:.0f}") for one in known
    ]
    headings = ("name", ">TFLOP/s reached", ">memory", ">GB/s to the host")
    Console(highlight=False).print(table("accelerators", headings, rows))


def _paths_of(config: Path | None) -> tuple[Path, ...]:
    """Return the folders that a file of settings names, if they are all there. Raises `ConfigError`."""
    from infinity.config import load_config

    named = tuple(map(Path, load_config(config).storage.paths)) if config is not None else ()
    return named if all(path.is_dir() for path in named) else ()
