"""Training a model that exceeds GPU memory: infinity compared with resident state and with its own plan.

All variants are alive at the same time, each in its own process, and take turns on one GPU. Every variant except the
first has a cap on device memory (`torch.cuda.set_per_process_memory_fraction`), which the model exceeds several times:

- `fsdp_memory`: FSDP2 and the optimizer of torch, with all state in device memory and no cap.
- `fsdp_cpu_offload`: FSDP2's CPUOffloadPolicy, with parameters and optimizer in host memory and updates on the CPU.
- `infinity_host`: infinity with a host cache that holds the complete state.
- `infinity_nvme`: infinity with a host cache of `--host-memory`. The rest of the state is on NVMe.

A turn consists of `--steps` steps without a pause, of which the first is not timed: it starts with an idle device and
leaves work in flight that the following steps overlap. Losses are read at the end of a turn. The results are medians,
and medians of the differences and ratios by round:

- `tokens_per_second`, and `tflops` from the operation count of infinity/estimate, including recomputation.
- `exposed`: seconds of a step that are not overlapped, next to the plan before the run, which assumes the speed of
  computation of `fsdp_memory`. `between_variants`: `drives` is `infinity_nvme` minus `infinity_host`.
  `links_and_updates`, copies between host and device and updates, is `infinity_host` minus `fsdp_memory`.
  `by_resource`: time of the training thread by resource (from the ledger), and how much shorter the planned step would
  be if the resource took no time. On a GPU, computation of the thread is kernel launches and waiting for kernels.
- `bytes` per step over the drives and over the link, and bytes of all-gathered weights, measured and planned.
- `losses`: all losses, and whether they are bitwise equal in every step among variants whose updates run on the same
  kind of device. If they differ, the exit status is 1. `--variants fsdp_memory,fsdp_memory_again,…` includes the first
  variant twice. If these two differ, the device does not compute reproducibly, and other differences are not
  meaningful.

The exit status is 2 without a GPU, unless `--device cpu` is given to try the benchmark.

Under torchrun, each variant runs one process per rank, and each process has its own GPU and its own batch. Rank 0
reports its own results: tokens, operations and bytes are not summed over the ranks.

    python benchmarks/bench_gpu.py --nvme DIR [--model llama-1b --layers 16] [--tokens 16384 --cap-fraction 0.1]
    torchrun --standalone --nproc-per-node 2 benchmarks/bench_gpu.py --nvme DIR
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench_step import RESULTS, ROOT, machine, publish, spread

VARIANTS = ("fsdp_memory", "fsdp_cpu_offload", "infinity_host", "infinity_nvme")
PAGED = VARIANTS[2:]
AGAIN = "fsdp_memory_again"
"""Second instance of the first variant, to compare its losses."""
RESIDENT = (VARIANTS[0], AGAIN)
"""Variants without a cap, whose state is on the device."""
SHAPE = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "inner": "intermediate_size",
    "heads": "num_attention_heads", "vocabulary": "vocab_size",
}  # fmt: skip
"""Names of options, and of the corresponding fields of LlamaConfig."""
WARM = 2
"""Warm-up steps of each variant. infinity records its trace in the first and fills its host cache in the second."""
LINK = ("to_device", "from_device")
RESOURCES = {
    "computation": (("computation",), ("compute",)),
    "collectives": (("collectives",), ("collective",)),
    "links": (("weights", "gradients"), ("copy",)),
    "updates": (("updates",), ("update",)),
    "drives": (("drives", "hashing"), ("read_stall", "write_stall", "host_cache_stall")),
    "Python": (("interpreter", "fixed"), ("python",)),
}
"""Names of each resource in infinity/estimate and in the ledger. Its busy time is the largest of its parts."""
PARTS = [part for _, parts in RESOURCES.values() for part in parts]
COPIED = 256 << 20
"""Size of the copies that measure the speed of the link, in bytes."""


def source_of(options: argparse.Namespace) -> Any:
    """Return the model source: the preset, with the shape options applied."""
    from transformers import LlamaConfig

    from infinity_tools.presets import PRESETS, ModelSource

    values = dict(PRESETS[options.model].values)
    values |= {key: getattr(options, name) for name, key in SHAPE.items() if getattr(options, name)}
    values["num_key_value_heads"] = values["num_attention_heads"]
    values["max_position_embeddings"] = max(values["max_position_embeddings"], options.seq)
    return ModelSource(name=options.model, config=LlamaConfig(**values))


def first_values(module: Any) -> None:
    """Initialize a module's own matrices with a seed that depends only on its name.

    The values are therefore the same for every variant and in every order of initialization.
    """
    import torch

    generator = torch.Generator().manual_seed(module.first_seed)
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:
                parameter.normal_(std=0.02, generator=generator)


def build(options: argparse.Namespace, variant: str, folder: str, device_bytes: int) -> tuple[Any, Any]:
    """Return the model and the optimizer of a variant."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    import infinity
    from infinity.models.sharding import layers_of
    from infinity_tools.presets import on_meta

    model = on_meta(source_of(options))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for name, module in model.named_modules():
        module.first_seed = zlib.crc32(name.encode())
    if variant not in PAGED:
        model.to_empty(device="cpu")
        model.init_weights()
        model.apply(first_values)
    mesh, policy = infinity.mesh(options.device), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if "offload" in variant else OffloadPolicy()
    for layer in (*layers_of(model), model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if variant in PAGED:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        config = settings_of(options, variant, parameters, device_bytes)
        config |= {"storage": {"paths": [folder]}, "run": {"keep": "never"}}
        optimizer = infinity.offload(model, optimizer, config, init=first_values)
    return model, optimizer


def settings_of(options: argparse.Namespace, variant: str, parameters: int, device_bytes: int) -> dict[str, Any]:
    """Return the settings that determine the plan of a variant."""
    # State, gradients, and padding of pages.
    host_cache = 20 * parameters // options.ranks + (1 << 30) if variant == "infinity_host" else options.host_memory
    return {
        "memory": {"host_bytes": host_cache, "page_bytes": options.page_bytes, "device_bytes": device_bytes},
        "update": {"schedule": options.update, "cores": options.update_cores, "device": options.update_device},
    }


def link_speed(device: Any) -> float:
    """Return the bandwidth between pinned host memory and a device in bytes per second.

    This is the slower of both directions, and 0 for the CPU.
    """
    import torch

    if device.type == "cpu":
        return 0.0
    here = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPIED, dtype=torch.uint8, device=device)
    slower = float("inf")
    for target, source in ((there, here), (here, there)):
        rates = []
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            rates.append(COPIED / (time.perf_counter() - began))
        slower = min(slower, statistics.median(rates))
    del there
    torch.cuda.empty_cache()
    return slower


def prepare(options: argparse.Namespace, variant: str) -> tuple[dict[str, Any], int]:
    """Configure this process for a variant; return device properties and the size of the GPU prefetch buffer."""
    import torch

    if options.deterministic:
        torch.use_deterministic_algorithms(
            True
        )  # an error, not a warning, so that flash attention uses its deterministic backward
        torch.utils.deterministic.fill_uninitialized_memory = False  # avoids filling every allocation
        torch.backends.cuda.enable_cudnn_sdp(False)  # the backward of these two sums in arbitrary order
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    if options.device == "cpu":
        if options.threads:
            torch.set_num_threads(options.threads)
        return {"name": "this processor", "memory_bytes": 0, "cap_bytes": 0}, 0
    index = options.local_rank
    if index:
        torch.cuda.set_device(index)
    properties = torch.cuda.get_device_properties(index)
    cap = int(options.cap_fraction * properties.total_memory)
    if variant not in RESIDENT:
        torch.cuda.set_per_process_memory_fraction(options.cap_fraction, index)
    facts = {"name": properties.name, "memory_bytes": properties.total_memory, "cap_bytes": cap}
    # Free memory of the device does not reflect the cap of the process.
    return facts, options.device_bytes or cap // 4


def worker(pipe: Connection, variant: str, options: argparse.Namespace, folder: str) -> None:
    """Hold one variant; take as many steps as each message asks for and answer with figures.

    The last answer, after the message 0, contains the figures of all steps.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required for deterministic matrix products
    warnings.simplefilter("ignore")
    from infinity.errors import InfinityError

    try:
        serve(pipe, variant, options, folder)
    except InfinityError as error:  # the message contains the fix
        pipe.send({"error": str(error)})
    except Exception:
        pipe.send({"error": traceback.format_exc()})


def serve(pipe: Connection, variant: str, options: argparse.Namespace, folder: str) -> None:
    """Run the loop of `worker`."""
    import torch

    from infinity_tools.plan.shapes import shape_of

    device, device_bytes = prepare(options, variant)
    if options.ranks > 1:
        connect(options, variant)
    if variant == "fsdp_memory":
        device["link"] = link_speed(torch.device(options.device))
    model, optimizer = build(options, variant, folder, device_bytes)
    facts: dict[str, Any] = {"device": device, "update_device": "cpu"}
    if variant in RESIDENT:
        facts |= {"update_device": options.device, "shape": shape_of(source_of(options))}
    elif variant in PAGED:
        run = optimizer.run
        facts |= {"host_bytes": run.host_bytes, "state_bytes": run.layout.state_bytes}
        facts |= {"update_cores": run.update_cores, "device_bytes": device_bytes}
        facts["update_device"] = optimizer.update_device
    pipe.send(facts)
    number = 0
    while count := pipe.recv():
        pipe.send(turn(options, variant, model, optimizer, number, count))
        number += count
    found = {"peak_device_bytes": 0 if options.device == "cpu" else torch.cuda.max_memory_allocated()}
    if variant in PAGED:
        found |= foretold(optimizer)
        optimizer.close()
    pipe.send(found)


def connect(options: argparse.Namespace, variant: str) -> None:
    """Join the process group of a variant. Without it, all variants would use the same keys of torchrun's store."""
    import torch.distributed as dist

    backend = "gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl"
    store = dist.PrefixStore(variant, store_of_launcher())
    dist.init_process_group(backend, store=store, rank=options.rank, world_size=options.ranks)


def store_of_launcher() -> Any:
    """Return the key-value store that torchrun provides for its ranks."""
    import torch.distributed as dist

    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def turn(
    options: argparse.Namespace, variant: str, model: Any, optimizer: Any, number: int, count: int
) -> dict[str, Any]:
    """Take `count` steps, the first with seed `number`; return all losses, and figures of the steps after the first."""
    import torch

    losses, began, before = [], 0.0, {}
    vocabulary = min(256, model.config.vocab_size)  # byte-sized tokens
    for step in range(count):
        torch.manual_seed((number + step) * options.ranks + options.rank)
        tokens = torch.randint(0, vocabulary, (options.tokens // options.seq, options.seq)).to(options.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if not step:
            synchronize(options)
            began, before = time.perf_counter(), copied_bytes(optimizer, variant)
    synchronize(options)
    counted = count - 1
    answer: dict[str, Any] = {"seconds": (time.perf_counter() - began) / counted}
    answer["losses"] = [float(loss) for loss in losses]
    if variant in PAGED:
        records = optimizer.records[-counted:]
        answer["parts"] = {p: statistics.mean(getattr(r, f"{p}_seconds") for r in records) for p in PARTS}
        answer |= {
            "read": statistics.mean(record.read_bytes for record in records),
            "write": statistics.mean(record.written_bytes for record in records),
            **{name: (value - before[name]) / counted for name, value in copied_bytes(optimizer, variant).items()},
        }
        while any(optimizer.run.pager.in_flight().values()):  # so that transfers do not slow down the next variant
            time.sleep(0.01)
    return answer


def synchronize(options: argparse.Namespace) -> None:
    """Wait for the GPU."""
    import torch

    if options.device != "cpu":
        torch.cuda.synchronize()


def copied_bytes(optimizer: Any, variant: str) -> dict[str, float]:
    """Return the bytes of weights that were gathered, and that crossed the link by direction, until now."""
    if variant not in PAGED:
        return {}
    page = optimizer.run.stats.snapshot()
    link = {way: page.value("link_bytes_total", direction=way) for way in LINK}
    return {"gathered": page.value("gather_copied_bytes_total"), **link}


def foretold(optimizer: Any) -> dict[str, Any]:
    """Return the update schedule, and the prediction of the executed plan for the rates of the run."""
    records, traffic = optimizer.records[WARM:], optimizer.run.plan.traffic
    page = optimizer.run.stats.snapshot()
    link = {way: page.value("plan_predicted_link_bytes_per_step", direction=way) for way in LINK}
    moving = [r for r in records if r.transfer_seconds]
    rate = max(((r.read_bytes + r.written_bytes) / r.transfer_seconds for r in moving), default=0.0)
    busy = statistics.median(record.seconds - record.stall_seconds for record in records)
    return {
        "schedule": optimizer.update_schedule,
        "plan_bytes": {"read": traffic.read_bytes, "write": traffic.written_bytes, **link},
        "clock_seconds": optimizer.predict_seconds(rate, busy) if rate else None,
    }


def planned(
    options: argparse.Namespace, variant: str, facts: Mapping[str, Any], flops: float, drives: Any
) -> dict[str, Any]:
    """Return the estimate of infinity/estimate for a variant.

    Args:
        options: Options of the command.
        variant: One of `PAGED`.
        facts: First answer of each process, by variant.
        flops: Operations per second with all state resident.
        drives: Drives of this machine.
    """
    from infinity.config import load_config
    from infinity.estimate.estimate import STORAGE, estimate
    from infinity.estimate.machine import CALL_SECONDS, HASH_RATE, UPDATE_SECONDS, Accelerator, Machine

    shape, device, cores = facts["fsdp_memory"]["shape"], facts["fsdp_memory"]["device"], facts[variant]["update_cores"]
    on_device = facts[variant]["update_device"] != "cpu"
    computing = 1 if cores else len(os.sched_getaffinity(0))
    update_seconds = {name: each / computing for name, each in UPDATE_SECONDS.items()}
    machine = Machine(
        drives=drives,
        device=Accelerator(name=device["name"], flops=flops, memory_bytes=device["cap_bytes"], link=device["link"]),
        update_seconds=update_seconds,
        update_cores=cores,
        ranks_per_node=options.ranks,
        hash_rate=HASH_RATE if device["link"] else 0.0,
        call_seconds=CALL_SECONDS if device["link"] else 0.0,
    )
    settings = load_config(settings_of(options, variant, shape.parameters, facts[variant]["device_bytes"]))
    settings = settings.with_values(**{"update.device": "cuda" if on_device else "cpu"})
    found = estimate(shape, workload(options), machine, settings)
    loads, step = found.seconds.loads, found.seconds.step

    def without(*names: str) -> float:
        return found.step_seconds(options.tokens * options.ranks, *names)

    crossing = found.link_traffic
    link = (crossing.to_device, crossing.from_device) if device["link"] else (None, None)
    moved = {"read": found.traffic.read_bytes, "write": found.traffic.written_bytes, "gathered": found.gathered_bytes}
    return {
        "step_seconds": step,
        "between_variants": {
            "drives": max(0.0, step - without(*STORAGE)),
            "links_and_updates": max(0.0, without(*STORAGE) - loads["computation"].busy),
        },
        "by_resource": {
            name: {
                "planned_busy": max(loads[own].busy for own in names),
                "planned": max(0.0, step - without(*names)),
            }
            for name, (names, _) in RESOURCES.items()
        },
        "bytes": {**moved, **dict(zip(LINK, link, strict=True))},
    }


def workload(options: argparse.Namespace) -> Any:
    """Return the workload in the terms of infinity/estimate."""
    from infinity.estimate.estimate import Workload

    return Workload(
        batch_tokens=options.tokens * options.ranks,
        sequence=options.seq,
        world_size=options.ranks,
        checkpointing=True,
    )


class Variants:
    """The processes of all variants."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        context = mp.get_context("spawn")
        self._pipes: dict[str, Connection] = {}
        self._processes = []  # in the order of the variants
        for variant in options.variants:
            ours, theirs = context.Pipe()
            (home := folder / variant).mkdir(exist_ok=True)  # all ranks share it
            process = context.Process(target=worker, args=(theirs, variant, options, str(home)), daemon=True)
            process.start()
            theirs.close()
            self._pipes[variant] = ours
            self._processes.append(process)

    def answer(self, variant: str) -> dict[str, Any]:
        """Return the next answer of a variant. If the variant has failed, print the reason and exit."""
        try:
            found: dict[str, Any] = self._pipes[variant].recv()
        except EOFError:
            sys.exit(f"bench_gpu: the process of {variant} exited unexpectedly")
        if "error" in found:
            sys.exit(f"bench_gpu: {variant} failed: {found['error']}")
        return found

    def ask(self, variant: str, steps: int) -> dict[str, Any]:
        """Request steps of a variant, or its end with 0 steps, and return the answer."""
        self._pipes[variant].send(steps)
        return self.answer(variant)

    def join(self) -> None:
        """Wait until all processes have exited."""
        for process in self._processes:
            process.join()


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all variants in turn and return the figures. Ranks other than the first only return the losses."""
    from rich.progress import Progress

    from infinity.config import TelemetryConfig, runtime_dir
    from infinity_tools.plan.plan_drives import drives_at, typed_drives

    bandwidth = options.nvme_bandwidth
    runtime = runtime_dir(TelemetryConfig())
    drives = typed_drives(bandwidth, 1, 0, 0) if bandwidth or options.rank else drives_at([folder], 0, runtime)[0]
    variants = Variants(options, folder)
    with Progress(transient=True, disable=options.json or options.rank > 0) as progress:
        task = progress.add_task("building models", total=(2 + options.rounds) * len(options.variants))

        def each(what: str, do: Callable[[str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
            found = {}
            progress.update(task, description=what)
            for variant in options.variants:
                found[variant] = do(variant)
                progress.advance(task)
            return found

        facts = each("building models", variants.answer)
        first = each("warm-up steps", lambda variant: variants.ask(variant, max(WARM, options.steps)))
        rounds = [
            each("measuring steps in turn", lambda variant: variants.ask(variant, options.steps))
            for _ in range(options.rounds)
        ]
    last = {variant: variants.ask(variant, 0) for variant in options.variants}
    variants.join()
    turns = [first, *rounds]
    return (
        {"losses": losses_of(options, facts, turns)} if options.rank else figures(options, facts, turns, last, drives)
    )


def figures(
    options: argparse.Namespace,
    facts: dict[str, dict[str, Any]],
    turns: list[dict[str, dict[str, Any]]],
    last: dict[str, dict[str, Any]],
    drives: Any,
) -> dict[str, Any]:
    """Return the figures of all variants from the answers of their processes.

    The first turn only contributes its losses.
    """
    shape = facts["fsdp_memory"]["shape"]
    flops = workload(options).flops(shape)
    seconds = {variant: [row[variant]["seconds"] for row in turns[1:]] for variant in options.variants}
    reached = flops / statistics.median(seconds["fsdp_memory"])
    plans = {variant: planned(options, variant, facts, reached, drives) for variant in PAGED if variant in facts}

    def difference(more: str, less: str) -> dict[str, float] | None:
        if more not in seconds or less not in seconds:
            return None
        return spread([a - b for a, b in zip(seconds[more], seconds[less], strict=True)])

    measured = {
        "drives": difference("infinity_nvme", "infinity_host"),
        "links_and_updates": difference("infinity_host", "fsdp_memory"),
    }
    found: dict[str, Any] = {}
    for variant, values in seconds.items():
        found[variant] = {
            "update_device": facts[variant]["update_device"],
            "step_seconds": spread(values),
            "tokens_per_second": spread([options.tokens / value for value in values]),
            "tflops": spread([flops / value / 1e12 for value in values]),
            "over_in_memory": spread([a / b for a, b in zip(values, seconds["fsdp_memory"], strict=True)]),
            "peak_device_bytes": last[variant]["peak_device_bytes"],
            "samples": values,
        }
        if variant in PAGED:
            rows, plan, end = [row[variant] for row in turns[1:]], plans[variant], last[variant]
            found[variant] |= {
                **{name: facts[variant][name] for name in ("host_bytes", "state_bytes", "update_cores")},
                "schedule": end["schedule"],
                "planned_seconds": {"before": plan["step_seconds"], "with_own_rates": end["clock_seconds"]},
                "bytes": {
                    name: {
                        "measured": statistics.median(row[name] for row in rows),
                        "planned_before": plan["bytes"].get(name),
                        "planned": end["plan_bytes"].get(name),
                    }
                    for name in ("read", "write", "gathered", *LINK)
                },
                "exposed": {
                    "between_variants": {
                        name: {"measured": measured[name], "planned": plan["between_variants"][name]}
                        for name in measured if variant == "infinity_nvme" or name != "drives"
                    },
                    "by_resource": {
                        name: {
                            "ledger": statistics.median(sum(row["parts"][part] for part in parts) for row in rows),
                            **plan["by_resource"][name],
                        }
                        for name, (_, parts) in RESOURCES.items()
                    },
                },
            }  # fmt: skip
    return {
        "device": facts["fsdp_memory"]["device"],
        "model": {"parameters": shape.parameters, "layers": len(shape.layers), "hidden": shape.hidden},
        "flops_per_step": flops,
        "drives": asdict(drives),
        "variants": found,
        "losses": losses_of(options, facts, turns),
    }


def losses_of(
    options: argparse.Namespace, facts: dict[str, dict[str, Any]], turns: list[dict[str, dict[str, Any]]]
) -> dict[str, Any]:
    """Return all losses of this rank, and their comparison."""
    losses = {variant: [loss for row in turns for loss in row[variant]["losses"]] for variant in options.variants}
    return compared(losses, {variant: facts[variant]["update_device"] for variant in losses}) | {"all": losses}


def compared(losses: Mapping[str, list[float]], devices: Mapping[str, str]) -> dict[str, Any]:
    """Return the variants by the kind of device on which updates run, and whether all of their losses are equal."""
    found: dict[str, Any] = {"steps": len(next(iter(losses.values()))), "by_update_device": {}}
    for device in sorted(set(devices.values())):
        names = [variant for variant in losses if devices[variant] == device]
        rows = zip(*(losses[name] for name in names), strict=True)
        differing = [step for step, row in enumerate(rows) if len(set(row)) > 1]
        found["by_update_device"][device] = {
            "variants": names, "equal": not differing, "first_difference": differing[0] if differing else None,
            "last": {name: losses[name][-1] for name in names},
        }  # fmt: skip
    return found


def draw(result: dict[str, Any], file: Path) -> None:
    """Plot tokens per second, and measured next to planned exposed seconds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    names = list(result["variants"])
    rates = [result["variants"][name]["tokens_per_second"]["median"] for name in names]
    bars = left.bar(range(len(names)), rates, color=["#ee6677", "#ccbb44", "#228833", "#4477aa"][: len(names)])
    left.bar_label(bars, [f"{result['variants'][name]['tflops']['median']:.3g}\nTFLOP/s" for name in names])
    left.margins(y=0.15)
    left.set_xticks(range(len(names)), [name.replace("_", "\n", 1) for name in names])
    left.set_ylabel("tokens per second")
    config = result["config"]
    left.set_title(f"{config['model']}, {result['model']['parameters'] / 1e6:.4g} M, {result['device']['name']}")
    rows = exposures(result)
    for shift, key, color in ((-0.2, 1, "#4477aa"), (0.2, 2, "#bbbbbb")):
        label = "measured" if key == 1 else "planned"
        right.bar([at + shift for at in range(len(rows))], [row[key] for row in rows], 0.4, color=color, label=label)
    right.set_xticks(range(len(rows)), [row[0] for row in rows])
    right.set_ylabel("exposed seconds per step")
    right.set_title(f"{config['tokens']} tokens per step")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3, axis="y")
    figure.savefig(file, dpi=120)


def exposures(result: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return name, measured seconds and planned seconds of each measured exposure."""
    found = {}
    for row in result["variants"].values():
        for name, value in row.get("exposed", {}).get("between_variants", {}).items():
            if value["measured"] is not None:
                found[name] = (name.replace("_", " "), value["measured"]["median"], value["planned"])
    return list(found.values())


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    from rich.console import Console
    from rich.table import Table

    from infinity.units import format_size

    console, device = Console(), result["device"]
    capped = f", capped at {format_size(device['cap_bytes'])}" if device["cap_bytes"] else ""
    title = f"{result['model']['parameters'] / 1e6:.4g} M parameters, {device['name']}{capped}"
    console.print(
        "s/step: median. /memory: relative to fsdp_memory. peak: peak device memory. plan: s/step predicted before "
        "the run. clock: s/step predicted from the rates of the run."
    )
    table = Table(title=f"\n{title}", box=None, padding=(0, 1, 0, 0))
    for name in ("variant", "s/step", "tokens/s", "TFLOP/s", "/memory", "peak", "plan", "clock"):
        table.add_column(name, justify="left" if name == "variant" else "right", no_wrap=True)
    for variant, row in result["variants"].items():
        plan = row.get("planned_seconds", {})
        table.add_row(
            variant, f"{row['step_seconds']['median']:.3g}", f"{row['tokens_per_second']['median']:.4g}",
            f"{row['tflops']['median']:.3g}", f"{row['over_in_memory']['median']:.2f}",
            format_size(row["peak_device_bytes"]) if row["peak_device_bytes"] else "",
            *(f"{plan[name]:.3g}" if plan.get(name) else "" for name in ("before", "with_own_rates")),
        )  # fmt: skip
    console.print(table)
    for name, seconds, plan in exposures(result):
        console.print(f"exposed, {name}: {seconds:.3g} s measured, {plan:.3g} s planned")
    table = Table(title="\nSeconds per step by resource", box=None, padding=(0, 1, 0, 0))
    for name in ("variant", "resource", "ledger", "planned exposed", "planned busy"):
        table.add_column(name, justify="left" if name in ("variant", "resource") else "right", no_wrap=True)
    for variant, row in result["variants"].items():
        for name, value in row.get("exposed", {}).get("by_resource", {}).items():
            table.add_row(variant, name, *(f"{value[key]:.2g}" for key in ("ledger", "planned", "planned_busy")))
    console.print(table)
    for variant, row in result["variants"].items():
        for name, value in row.get("bytes", {}).items():
            if name in LINK and not device["link"]:
                continue
            plan = value["planned_before"] if value["planned"] is None else value["planned"]
            console.print(f"{variant}, {name}: {format_size(value['measured'])}, planned {format_size(plan)}")
    for kind, row in result["losses"]["by_update_device"].items():
        equal = "bitwise equal" if row["equal"] else f"DIFFERENT from step {row['first_difference'] + 1} on"
        console.print(f"losses, updates on {kind}: {equal} ({', '.join(row['variants'])})", soft_wrap=True)


def main() -> None:
    """Run the benchmark and write results/gpu.json and its plot."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    llamas = ("tiny", "llama-100m", "llama-1b")
    parser.add_argument("--model", choices=llamas, default="llama-1b", help="preset, which the options below override")
    for name in SHAPE:
        parser.add_argument(f"--{name}", type=int, default=0, help="default: from the preset")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per step")
    parser.add_argument("--seq", type=int, default=2048, help="maximum tokens per sequence")
    parser.add_argument("--steps", type=int, default=4, help="steps per turn; the first is not timed")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one warm-up round")
    parser.add_argument("--cap-fraction", type=float, default=0.05, help="cap on device memory, as a fraction")
    parser.add_argument("--device-bytes", default="0", help="memory.device_bytes; 0: a quarter of the cap")
    parser.add_argument("--host-memory", default="2GiB", help="size of the host cache of infinity_nvme")
    parser.add_argument("--page-bytes", default="0", help="memory.page_bytes; 0: chosen automatically")
    parser.add_argument("--update", default="auto", help="update.schedule")
    parser.add_argument("--update-device", choices=("auto", "cpu", "cuda"), default="auto", help="update.device")
    parser.add_argument("--update-cores", type=int, default=-1, help="update.cores; -1: chosen automatically")
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, default=True,
                        help="use deterministic algorithms; without them, losses may differ")  # fmt: skip
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the benchmark")
    parser.add_argument(
        "--threads", type=int, default=0, help="compute threads with --device cpu; 0: the default of torch"
    )
    parser.add_argument(
        "--nvme", type=Path, default=Path(), help="folder on the drive, which needs about 66 bytes per parameter"
    )
    parser.add_argument("--nvme-bandwidth", help="read/write bandwidth of the drive, e.g. 7e9/5e9 (default: measured)")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--json", action="store_true", help="print only JSON")
    options = parser.parse_args()
    check(options, parser)
    left_out = ("nvme", "out", "json", "rank", "local_rank")
    result = {"config": {k: v for k, v in vars(options).items() if k not in left_out}, **machine()}
    with shared_folder(options) as folder:
        result |= measure(options, folder)
    if not options.rank:
        publish(result, options, draw, show)
    sys.exit(not all(row["equal"] for row in result["losses"]["by_update_device"].values()))


@contextmanager
def shared_folder(options: argparse.Namespace) -> Iterator[Path]:
    """Yield a temporary folder, which rank 0 creates, and removes when all ranks have ended."""
    if options.ranks == 1:
        with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=options.nvme) as folder:
            yield Path(folder)
        return
    store = store_of_launcher()
    if options.rank:
        yield Path(store.get("folder").decode())
        store.set(f"ended{options.rank}", "")
        return
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=options.nvme.resolve()) as folder:
        store.set("folder", folder)
        yield Path(folder)
        store.wait([f"ended{rank}" for rank in range(1, options.ranks)])


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Validate options and parse sizes; exit with one line and status 2 if an option is invalid."""
    from infinity import torchrun
    from infinity.errors import ConfigError
    from infinity.units import parse_size

    options.variants = options.variants.split(",")
    options.seq = min(options.seq, options.tokens)
    try:
        options.ranks = torchrun.number("WORLD_SIZE", 1) if torchrun.launched() else 1
        options.rank, options.local_rank = (
            torchrun.number(name, 0) if options.ranks > 1 else 0 for name in ("RANK", "LOCAL_RANK")
        )
        for name in ("device_bytes", "host_memory", "page_bytes"):
            text = getattr(options, name)
            setattr(options, name, 0 if text == "0" else parse_size(text, name=f"--{name.replace('_', '-')}"))
    except ConfigError as error:
        parser.exit(2, f"bench_gpu: {error}\n")
    problem = None
    if unknown := set(options.variants) - {*VARIANTS, AGAIN}:
        problem = f"--variants: unknown variants {', '.join(sorted(unknown))}. Choose from {', '.join(VARIANTS)}."
    elif "fsdp_memory" not in options.variants:
        problem = "--variants must include fsdp_memory, the baseline of the comparison"
    elif not options.nvme.is_dir():
        problem = f"--nvme {str(options.nvme)!r} is not a folder"
    elif options.tokens % options.seq:
        problem = f"--tokens {options.tokens} is not a multiple of --seq {options.seq}"
    elif options.steps < 2:
        problem = f"--steps {options.steps}: the first step of a turn is not timed. Pass 2 or more."
    elif not 0 < options.cap_fraction <= 1:
        problem = f"--cap-fraction {options.cap_fraction} must be above 0 and at most 1"
    elif options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            problem = f"torch {torch.__version__} sees no GPU. Pass --device cpu to try the benchmark without one."
        elif options.local_rank >= torch.cuda.device_count():
            problem = f"no GPU is left for local rank {options.local_rank}: start at most one rank per GPU"
    if problem is not None:
        parser.exit(2, f"bench_gpu: {problem}\n")


if __name__ == "__main__":
    main()
