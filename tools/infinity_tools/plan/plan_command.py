"""`infinity plan`: estimate memory, NVMe traffic, step time and SSD wear before a run."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from infinity.cli_errors import Version, finite
from infinity_tools.output import check_out, write_out
from infinity_tools.shared_options import Panel, settings_in
from infinity_tools.signals import StopRequest

_MODEL, _RUN, _MACHINE, _OUTPUT = map(Panel, ("Model", "Training", "Machine", "Output"))


def plan(
    model: Annotated[
        str | None,
        _MODEL.option(
            help="A preset (`--model list` lists them), a transformers config.json or model folder, or the id of a "
            "model in the local Hub cache."
        ),
    ] = None,
    parameters: Annotated[
        float | None,
        _MODEL.number(
            1e3,
            1e15,
            "Instead of --model: number of parameters of a decoder, such as 70e9; requires --layers, --hidden and "
            "--vocabulary.",
        ),
    ] = None,
    layers: Annotated[int | None, _MODEL.number(1, 100_000, "Number of layers.")] = None,
    hidden: Annotated[int | None, _MODEL.number(8, 10**6, "Hidden size.")] = None,
    vocabulary: Annotated[int | None, _MODEL.number(2, 10**8, "Vocabulary size.")] = None,
    tied: Annotated[bool, _MODEL.option("--tied", help="Tie the head to the embedding.")] = False,
    lora: Annotated[
        str | None,
        _MODEL.option(
            metavar="r=16[,targets=q_proj+v_proj]", help="Freeze the model and train LoRA adapters of rank r."
        ),
    ] = None,
    trainable: Annotated[
        float | None,
        _MODEL.option(
            min=0.0,
            max=1.0,
            callback=finite,
            help="Train only this fraction of the parameters, in the last layers, such as 0.1.",
        ),
    ] = None,
    dtype: Annotated[str, _MODEL.option(help="Compute dtype: bf16 or fp32.")] = "bf16",
    batch_tokens: Annotated[int, _RUN.shared("batch_tokens")] = 8192,
    seq: Annotated[
        int | None, _RUN.number(2, 10**8, "Tokens per sequence. [default: 4096, or the batch if it is smaller]")
    ] = None,
    micro_batches: Annotated[
        int | None,
        _RUN.number(
            1, 10**6, "Micro-batches per rank per step. [default: the fewest that fit the accelerator's memory]"
        ),
    ] = None,
    loss_tokens: Annotated[int | None, _RUN.shared("loss_tokens")] = None,
    loop: Annotated[
        bool,
        _RUN.option(
            "--loop",
            help="Run each micro-batch through the whole model, instead of all micro-batches through each layer.",
        ),
    ] = False,
    activation_checkpointing: Annotated[bool, _RUN.shared("activation_checkpointing")] = True,
    clip: Annotated[bool, _RUN.option("--clip", help="Clip gradients by their global norm.")] = False,
    optimizer: Annotated[
        str, _RUN.option(help="Optimizer: adamw, adam, amsgrad, adagrad, rmsprop, lion, momentum or sgd.")
    ] = "adamw",
    ranks: Annotated[int, _MACHINE.number(1, 100_000, "Ranks per node.")] = 1,
    nodes: Annotated[int, _MACHINE.number(1, 100_000, "Number of nodes.")] = 1,
    gpu: Annotated[
        str | None,
        _MACHINE.option(
            help="Name of each rank's accelerator (`--gpu list` lists them). [default: the CPU of this machine, on "
            "which layers are timed]"
        ),
    ] = None,
    tflops: Annotated[
        float | None,
        _MACHINE.number(
            1e-3, 1e6, "TFLOP/s that training achieves on the accelerator. [default: 40 % of its bf16 peak]"
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None, _MACHINE.option(help="Memory of the accelerator, such as 80GiB. [default: from --gpu]")
    ] = None,
    link: Annotated[
        str | None,
        _MACHINE.option(
            help="Host-to-device bandwidth, in bytes per second each way, such as 55e9. [default: from --gpu]"
        ),
    ] = None,
    update_cores: Annotated[int | None, _RUN.setting("update.cores")] = None,
    cores: Annotated[
        int | None,
        _MACHINE.option(
            min=1,
            max=4096,
            help="CPU cores per rank, for updates and checksums. [default: with --gpu, the cores per accelerator of a "
            "common node (`--gpu list`); with --tflops, the cores of this machine, divided among the ranks]",
        ),
    ] = None,
    interconnect: Annotated[
        str | None,
        _MACHINE.option(
            help="With --nodes: bandwidth of each node's network in each direction, such as 10GbE, 100Gbit/s or "
            "1GiB/s. With one node: bandwidth between its ranks. Or a file that `infinity probe --interconnect` "
            "has written. [default: with --gpu, the bandwidth of the links between accelerators (`--gpu list`); "
            "otherwise, communication takes no time]"
        ),
    ] = None,
    host_memory: Annotated[str | None, _MACHINE.setting("memory.host_bytes")] = None,
    nvme: Annotated[
        list[Path] | None,
        _MACHINE.option(
            help="Folder on a drive of this machine; can be repeated. The bandwidth comes from infinityd, or is "
            "measured now. [default: the folders of --config if they exist, otherwise the current folder]"
        ),
    ] = None,
    nvme_bandwidth: Annotated[
        str | None,
        _MACHINE.option(
            help="Instead of --nvme: read and write bandwidth of one drive in bytes per second, such as 7e9/5e9, or "
            "7e9/5e9/6e9 with the combined bandwidth of simultaneous reads and writes."
        ),
    ] = None,
    nvme_count: Annotated[
        int | None,
        _MACHINE.option(min=1, max=1024, help="With --nvme-bandwidth: number of drives per node. [default: 1]"),
    ] = None,
    nvme_size: Annotated[
        str | None,
        _MACHINE.option(help="With --nvme-bandwidth: free space per drive, such as 2TB. [default: not checked]"),
    ] = None,
    nvme_endurance: Annotated[
        str | None, _MACHINE.option(help="Rated write endurance per drive, such as 1200TB.")
    ] = None,
    runtime_dir: Annotated[str | None, _MACHINE.setting("telemetry.runtime_dir")] = None,
    page_bytes: Annotated[str | None, _RUN.setting("memory.page_bytes")] = None,
    state_format: Annotated[str | None, _RUN.setting("state.format")] = None,
    update: Annotated[str | None, _RUN.setting("update.schedule")] = None,
    activations: Annotated[str | None, _RUN.setting("activations.tier")] = None,
    retained_checkpoints: Annotated[int | None, _RUN.setting("run.retained_checkpoints")] = None,
    config: Annotated[Path | None, _RUN.shared("config")] = None,
    changes: Annotated[bool, _OUTPUT.option(help="Also list the changes that would help most.")] = True,
    out: Annotated[
        Path | None,
        _OUTPUT.option(help="Folder for plan.json, plan.png and infinity.toml. [default: no files are written]"),
    ] = None,
    json: Annotated[bool, _OUTPUT.option("--json", help="Print only JSON.")] = False,
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
        from infinity_tools.presets import list_presets

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
