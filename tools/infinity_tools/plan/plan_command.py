"""`infinity plan`: estimate memory, NVMe traffic, step time and SSD wear before a run."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from infinity.cli_errors import Version, at_most, finite
from infinity_tools.output import check_out, write_out
from infinity_tools.preset_list import list_presets
from infinity_tools.shared_options import setting_option, settings_in, shared_option
from infinity_tools.signals import StopRequest

_MODEL, _RUN, _MACHINE, _OUTPUT = "Model", "Training", "Machine", "Output"


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            help="A preset (`--model list` lists them), a transformers config.json or model folder, or the id of a "
            "model in the local Hub cache.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    parameters: Annotated[
        float | None,
        typer.Option(
            min=1e3,
            callback=at_most(1e15),
            help="Instead of --model: number of parameters of a decoder, such as 70e9; requires --layers, --hidden and "
            "--vocabulary.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, callback=at_most(100_000), help="Number of layers.", rich_help_panel=_MODEL)
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(min=8, callback=at_most(10**6), help="Hidden size.", rich_help_panel=_MODEL)
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=2, callback=at_most(10**8), help="Vocabulary size.", rich_help_panel=_MODEL)
    ] = None,
    tied: Annotated[
        bool, typer.Option("--tied", help="Tie the head to the embedding.", rich_help_panel=_MODEL)
    ] = False,
    lora: Annotated[
        str | None,
        typer.Option(
            metavar="r=16[,targets=q_proj+v_proj]",
            help="Freeze the model and train LoRA adapters of rank r.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    trainable: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            callback=finite,
            help="Train only this fraction of the parameters, in the last layers, such as 0.1.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Compute dtype: bf16 or fp32.", rich_help_panel=_MODEL)] = "bf16",
    batch_tokens: Annotated[int, shared_option("batch_tokens", _RUN)] = 8192,
    seq: Annotated[
        int | None,
        typer.Option(
            min=2,
            callback=at_most(10**8),
            help="Tokens per sequence. [default: 4096, or the batch if it is smaller]",
            rich_help_panel=_RUN,
        ),
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            min=1,
            callback=at_most(10**6),
            help="Micro-batches per rank per step. [default: the fewest that fit the accelerator's memory]",
            rich_help_panel=_RUN,
        ),
    ] = None,
    loss_tokens: Annotated[int | None, shared_option("loss_tokens", _RUN)] = None,
    loop: Annotated[
        bool,
        typer.Option(
            "--loop",
            help="Run each micro-batch through the whole model, instead of all micro-batches through each layer.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    activation_checkpointing: Annotated[bool, shared_option("activation_checkpointing", _RUN)] = True,
    clip: Annotated[
        bool, typer.Option("--clip", help="Clip gradients by their global norm.", rich_help_panel=_RUN)
    ] = False,
    optimizer: Annotated[
        str,
        typer.Option(
            help="Optimizer: adamw, adam, amsgrad, adagrad, rmsprop, lion, momentum or sgd.", rich_help_panel=_RUN
        ),
    ] = "adamw",
    ranks: Annotated[
        int, typer.Option(min=1, callback=at_most(100_000), help="Ranks per node.", rich_help_panel=_MACHINE)
    ] = 1,
    nodes: Annotated[
        int, typer.Option(min=1, callback=at_most(100_000), help="Number of nodes.", rich_help_panel=_MACHINE)
    ] = 1,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Name of each rank's accelerator (`--gpu list` lists them). [default: the CPU of this machine, on "
            "which layers are timed]",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            callback=at_most(1e6),
            help="TFLOP/s that training achieves on the accelerator. [default: 40 % of its bf16 peak]",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="Memory of the accelerator, such as 80GiB. [default: from --gpu]", rich_help_panel=_MACHINE),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="Host-to-device bandwidth, in bytes per second each way, such as 55e9. [default: from --gpu]",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    update_cores: Annotated[int | None, setting_option("update.cores", _RUN)] = None,
    cores: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="CPU cores per rank, for updates and checksums. [default: with --gpu, the cores per accelerator of a "
            "common node (`--gpu list`); with --tflops, the cores of this machine, divided among the ranks]",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    interconnect: Annotated[
        str | None,
        typer.Option(
            help="With --nodes: bandwidth of each node's network in each direction, such as 10GbE, 100Gbit/s or "
            "1GiB/s. With one node: bandwidth between its ranks. Or a file that `infinity probe --interconnect` "
            "has written. [default: with --gpu, the bandwidth of the links between accelerators (`--gpu list`); "
            "otherwise, communication takes no time]",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    host_memory: Annotated[str | None, setting_option("memory.host_bytes", _MACHINE)] = None,
    nvme: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder on a drive of this machine; can be repeated. The bandwidth comes from infinityd, or is "
            "measured now. [default: the folders of --config if they exist, otherwise the current folder]",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    nvme_bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Instead of --nvme: read and write bandwidth of one drive in bytes per second, such as 7e9/5e9, or "
            "7e9/5e9/6e9 with the combined bandwidth of simultaneous reads and writes.",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    nvme_count: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="With --nvme-bandwidth: number of drives per node. [default: 1]",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    nvme_size: Annotated[
        str | None,
        typer.Option(
            help="With --nvme-bandwidth: free space per drive, such as 2TB. [default: not checked]",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    nvme_endurance: Annotated[
        str | None,
        typer.Option(help="Rated write endurance per drive, such as 1200TB.", rich_help_panel=_MACHINE),
    ] = None,
    runtime_dir: Annotated[str | None, setting_option("telemetry.runtime_dir", _MACHINE)] = None,
    page_bytes: Annotated[str | None, setting_option("memory.page_bytes", _RUN)] = None,
    state_format: Annotated[str | None, setting_option("state.format", _RUN)] = None,
    update: Annotated[str | None, setting_option("update.schedule", _RUN)] = None,
    activations: Annotated[str | None, setting_option("activations.tier", _RUN)] = None,
    retained_checkpoints: Annotated[int | None, setting_option("run.retained_checkpoints", _RUN)] = None,
    config: Annotated[Path | None, shared_option("config", _RUN)] = None,
    changes: Annotated[
        bool, typer.Option(help="Also list the changes that would help most.", rich_help_panel=_OUTPUT)
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for plan.json, plan.png and infinity.toml. [default: no files are written]",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print only JSON.", rich_help_panel=_OUTPUT)] = False,
    version: Version = False,
) -> None:
    """Estimate memory, NVMe traffic, step time and SSD wear before a run.

    Uses the planner and cost model of a real run. The model is neither allocated nor trained; without --gpu or
    --tflops, three of its layers are timed on this machine. Prints settings for `infinity train --config` and
    `infinity.offload`.

    For example: `infinity plan --parameters 70e9 --layers 80 --hidden 8192 --vocabulary 128256 --host-memory 256GiB
    --nvme-bandwidth 7e9/5e9 --nvme-count 4 --gpu h100 --batch-tokens 32768`.

    Exit status: 0 if the run fits, 1 if it does not, 2 if an option is invalid or the host cache is too small.
    """
    options = dict(locals())
    if gpu == "list":
        _list_accelerators(json=json)
        return
    if model == "list":
        list_presets(json=json)
        return
    if out is not None:
        check_out(out)
    # Imported here because --help does not need the planner.
    from infinity.estimate.advice import best_changes
    from infinity.estimate.shardings import shardings_of
    from infinity_tools.plan.inputs import Asked, assumptions_of, collection_paused, plan_of
    from infinity_tools.plan.plan_report import document, show
    from infinity_tools.toml import settings_toml

    options["nvme"] = tuple(nvme or _paths_of(config if nvme_bandwidth is None else None))
    asked = Asked(settings=settings_in(options), **options)
    console = Console(stderr=True)
    # A signal removes the folder of the measurement.
    with StopRequest(), console.status("planning") as status:
        found, sources = plan_of(asked, status.update)
        assumptions = assumptions_of(found, asked, sources)
        status.update("planning alternatives")
        with collection_paused():
            shardings = shardings_of(found, nodes) if nodes > 1 else None
            best = best_changes(found) if changes else []
        settings = found.settings.with_values(**{"storage.paths": asked.paths})
        text = settings_toml(settings, ["Settings for infinity, written by `infinity plan`."])
        answer = {**document(found, best, assumptions, shardings), "toml": text}
        shown = json_format.dumps(answer, indent=2)
        if out is not None:
            status.update("plotting")
            from infinity_tools.plan.plan_plot import figure

            write_out(out, {"plan.json": shown + "\n", "infinity.toml": text}, {"plan.png": figure(found)})
    if json:
        typer.echo(shown)
    else:
        printed = Console(highlight=False)
        show(found, best, assumptions, printed, shardings)
        printed.print()
        printed.print(text, markup=False, end="", soft_wrap=True)
        if out is not None:
            printed.print(f"wrote plan.json, plan.png and infinity.toml to {out}", markup=False)
    raise typer.Exit(1 if found.problems else 0)


def _list_accelerators(*, json: bool) -> None:
    from infinity.estimate.machine import ACCELERATORS
    from infinity.units import format_size
    from infinity_tools.tables import table

    known = sorted(ACCELERATORS.values(), key=lambda one: one.name)
    if json:
        fields = ("name", "flops", "memory_bytes", "link", "interconnect", "cores")
        typer.echo(json_format.dumps([{name: getattr(one, name) for name in fields} for one in known]))
        return
    rows = [
        (
            one.name,
            f"{one.flops / 1e12:.0f}",
            format_size(one.memory_bytes),
            f"{one.link / 1e9:.0f}",
            f"{one.interconnect / 1e9:.0f}",
            str(one.cores),
        )
        for one in known
    ]
    headings = ("name", ">TFLOP/s", ">memory", ">to host", ">to ranks", ">cores")
    title = "accelerators: achieved TFLOP/s, GB/s to host and between ranks, CPU cores"
    Console(highlight=False).print(table(title, headings, rows))


def _paths_of(config: Path | None) -> tuple[Path, ...]:
    """Return `storage.paths` of a settings file, or an empty tuple if a folder does not exist. Raises `ConfigError`."""
    from infinity.config import load_config

    named = tuple(map(Path, load_config(config).storage.paths)) if config is not None else ()
    return named if all(path.is_dir() for path in named) else ()
