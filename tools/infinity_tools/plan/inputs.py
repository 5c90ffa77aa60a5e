"""Conversion of `infinity plan` options to the inputs of an estimate: model, workload, machine and settings."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from infinity.config import Config, load_config, runtime_dir
from infinity.errors import ConfigError
from infinity.estimate.estimate import Estimate, Workload, estimate, working_bytes
from infinity.estimate.machine import (
    ACCELERATORS,
    CALL_SECONDS,
    HASH_RATE,
    REACHED,
    REACHED_IN_COLLECTIVES,
    UPDATE_SECONDS,
    Accelerator,
    Drives,
    Machine,
)
from infinity.estimate.model import OPTIMIZERS, ModelShape, decoder, with_lora, with_trainable_share
from infinity.estimate.network import Network, network_of_rates
from infinity.memory.cgroups import cores_of_groups
from infinity.memory.limits import default_host_cache
from infinity.processor import share_of_cores
from infinity.schema import did_you_mean
from infinity.store.page_store import hash_threads
from infinity.units import MIB, align_down, format_number, format_size, parse_size
from infinity_tools.plan.plan_drives import drives_at, parse_rate, typed_drives
from infinity_tools.plan.plan_network import is_file, measured_network

if TYPE_CHECKING:
    from infinity_tools.presets import ModelSource

_SEQUENCE = 4096
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_ROOM = 0.95
"""Fraction of an accelerator's memory that computation may use."""
Report = Callable[[str], None]


class Asked(SimpleNamespace):
    """Options of `infinity plan` by parameter name, with its defaults.

    `settings` contains the settings that were passed as options, by dotted name.
    """

    def __init__(self, **options: Any) -> None:
        from infinity_tools.plan.plan_command import plan

        defaults = {name: parameter.default for name, parameter in signature(plan).parameters.items()}
        defaults["settings"] = {}
        if unknown := options.keys() - defaults.keys():
            raise TypeError(f"infinity plan has no option {', '.join(sorted(unknown))}")
        super().__init__(**{**defaults, **options})

    @property
    def world_size(self) -> int:
        """Number of ranks across all nodes."""
        return int(self.ranks * self.nodes)

    @property
    def paths(self) -> list[str]:
        """Value of ``storage.paths`` in the printed settings."""
        if self.nvme_bandwidth is not None:
            return [f"/nvme{number}/infinity" for number in range(self.nvme_count or 1)]
        return [os.path.abspath(path) for path in self.nvme or (Path(),)]


def plan_of(asked: Asked, report: Report = lambda what: None) -> tuple[Estimate, dict[str, str]]:
    """Return the estimate of a run, and a description of how each measured quantity was obtained.

    Args:
        asked: Options of the command.
        report: Callback that receives a description of the current activity.

    Raises:
        ConfigError: If an option is invalid, or two options conflict.
        BudgetError: If the host cache is too small.
    """
    _check(asked)
    settings = _settings(asked)
    work = _workload(asked)
    endurance, size = _size(asked.nvme_endurance, "--nvme-endurance"), _size(asked.nvme_size, "--nvme-size")
    drives = None
    if asked.nvme_bandwidth is not None:
        drives = typed_drives(asked.nvme_bandwidth, asked.nvme_count or 1, size, endurance)
    device = _device(asked)
    report("building the model")
    source, model = _model(asked)
    sources = {}
    if drives is None:
        report("measuring the drives")
        drives, sources["drives"] = drives_at(asked.nvme or (Path(),), endurance, runtime_dir(settings.telemetry))
    if device is None:
        source = source or _config_of(model)
        machine = _measured(asked, source, model, work, drives, settings, report)
        sources["computation"] = "three layers were measured on this processor"
    else:
        machine = _machine(asked, device, drives, settings)
        work = _fitted(asked, model, work, device, settings)
    report("planning")
    with collection_paused():
        return estimate(model, work, machine, settings), sources


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collection. A plan of a large model creates millions of objects, and hardly any cycles of them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check(asked: Asked) -> None:
    shape = {"--layers": asked.layers, "--hidden": asked.hidden, "--vocabulary": asked.vocabulary}
    if asked.model is not None and asked.parameters is not None:
        raise ConfigError("--model and --parameters both define the model; omit one of them")
    if asked.model is None and asked.parameters is None:
        raise ConfigError("no model given; pass --model, or --parameters with --layers, --hidden and --vocabulary")
    if asked.model is not None and (given := [name for name, value in shape.items() if value is not None]):
        raise ConfigError(f"{given[0]} requires --parameters; --model {asked.model!r} defines its own shape")
    if asked.parameters is not None and (missing := [name for name, value in shape.items() if value is None]):
        raise ConfigError(f"--parameters {asked.parameters:g} also requires {' and '.join(missing)}")
    if asked.lora is not None and asked.trainable is not None:
        raise ConfigError("--lora and --trainable both select the trained parameters; omit one of them")
    if asked.dtype not in _DTYPES:
        raise ConfigError(f"--dtype {asked.dtype!r} is not one of {', '.join(_DTYPES)}")
    if asked.optimizer not in OPTIMIZERS:
        hint = did_you_mean(asked.optimizer, OPTIMIZERS)
        raise ConfigError(f"--optimizer {asked.optimizer!r} is not one of {', '.join(OPTIMIZERS)}{hint}")
    if asked.loop and (asked.micro_batches or 1) < 2:
        raise ConfigError("--loop requires several micro-batches; pass --micro-batches 2 or more")
    if asked.nvme and asked.nvme_bandwidth is not None:
        raise ConfigError("--nvme and --nvme-bandwidth both define the drives; omit one of them")
    for name, value in (("--nvme-count", asked.nvme_count), ("--nvme-size", asked.nvme_size)):
        if value is not None and asked.nvme_bandwidth is None:
            raise ConfigError(
                f"{name} {value} requires --nvme-bandwidth; the drives of --nvme folders are inspected instead"
            )
    for name, option in (("--gpu-memory", asked.gpu_memory), ("--link", asked.link), ("--cores", asked.cores)):
        if option is not None and asked.gpu is None and asked.tflops is None:
            raise ConfigError(f"{name} {option} requires an accelerator; pass --gpu or --tflops")
    if asked.world_size > 1 and asked.batch_tokens < 2 * asked.world_size:
        raise ConfigError(
            f"--batch-tokens {asked.batch_tokens} is too small for {asked.world_size} ranks; each rank needs at least "
            "2 tokens"
        )


def _settings(asked: Asked) -> Config:
    settings = load_config(asked.config).with_values(**asked.settings)
    if not settings.memory.host_bytes:
        settings = settings.with_values(**{"memory.host_bytes": align_down(default_host_cache(asked.ranks), MIB)})
    return settings


def _workload(asked: Asked) -> Workload:
    tokens = asked.batch_tokens // asked.world_size
    sequence = asked.seq or min(_SEQUENCE, tokens)
    if sequence > tokens:
        each = f"of {tokens} tokens per rank" if asked.world_size > 1 else f"of {tokens} tokens"
        raise ConfigError(f"--seq {sequence} exceeds the batch {each}; reduce --seq or increase --batch-tokens")
    parts = asked.micro_batches or 1
    if parts > tokens // sequence:
        raise ConfigError(
            f"--micro-batches {parts} exceeds the {tokens // sequence} sequences per rank per step; reduce it"
        )
    return Workload(
        batch_tokens=asked.batch_tokens,
        sequence=sequence,
        world_size=asked.world_size,
        micro_batches=parts,
        loss_tokens=asked.loss_tokens,
        layer_major=not asked.loop,
        checkpointing=asked.activation_checkpointing,
        clipping=asked.clip,
        optimizer=asked.optimizer,
        computed=_DTYPES[asked.dtype],
    )


def _size(text: str | None, name: str) -> int:
    return 0 if text is None else parse_size(text, name=name)


def _device(asked: Asked) -> Accelerator | None:
    """Return the accelerator, or None if this machine's CPU must be measured."""
    if asked.gpu is None and asked.tflops is None:
        return None
    if asked.gpu is None:
        device = Accelerator(name="this processor", flops=1.0)
    elif asked.gpu.lower() in ACCELERATORS:
        device = ACCELERATORS[asked.gpu.lower()]
        if asked.dtype == "fp32" and asked.tflops is None:
            raise ConfigError(
                f"the speed of --gpu {asked.gpu} is known only for bf16; with --dtype fp32, pass --tflops"
            )
    else:
        hint = did_you_mean(asked.gpu.lower(), ACCELERATORS, 0.5)
        raise ConfigError(
            f"--gpu {asked.gpu!r} is not known (`--gpu list` lists known names){hint}; or pass --tflops, "
            "--gpu-memory and --link"
        )
    if asked.tflops is not None:
        device = replace(device, flops=asked.tflops * 1e12)
    if asked.gpu_memory is not None:
        device = replace(
            device, name=asked.gpu or "accelerator", memory_bytes=parse_size(asked.gpu_memory, name="--gpu-memory")
        )
    if asked.link is not None:
        device = replace(device, name=asked.gpu or "accelerator", link=parse_rate(asked.link, "--link"))
    return device


def _model(asked: Asked) -> tuple[ModelSource | None, ModelShape]:
    source = None
    if asked.model is not None:
        from infinity_tools.plan.shapes import shape_of
        from infinity_tools.presets import find_model

        source = find_model(asked.model)
        model = shape_of(source)
    else:
        model = decoder(
            parameters=asked.parameters or 0.0,
            layers=asked.layers or 0,
            hidden=asked.hidden or 0,
            vocabulary=asked.vocabulary or 0,
            tied=asked.tied,
        )
    kept = _DTYPES[asked.dtype]
    if asked.lora is not None:
        rank, targets = _lora(asked.lora)
        model = with_lora(model, rank, kept, targets)
    elif asked.trainable is not None:
        model = with_trainable_share(model, asked.trainable, kept)
    return source, model


def _lora(text: str) -> tuple[int, tuple[str, ...]]:
    """Parse the value of `--lora`: key=value pairs, or only the rank.

    Returns:
        Rank of the adapters, and suffixes of the names of adapted modules. No suffixes: all linear layers except the
        head.

    Raises:
        ConfigError: If the value is not valid.
    """
    pairs = [part.partition("=") for part in (f"r={text}" if text.strip().isdecimal() else text).split(",")]
    values = {name.strip(): value.strip() for name, _, value in pairs}
    rank = values.get("r", "")
    known = len(values) == len(pairs) and all(values.values()) and values.keys() <= {"r", "targets"}
    if not known or not rank.isdecimal() or int(rank) < 1:
        raise ConfigError(f"--lora {text!r} is not valid; write 16, r=16, or r=16,targets=q_proj+v_proj")
    return int(rank), tuple(filter(None, values.get("targets", "").split("+")))


def _config_of(model: ModelShape) -> ModelSource:
    """Return a Llama configuration with the shape of a decoder."""
    from transformers import LlamaConfig

    from infinity_tools.presets import ModelSource

    width = next(size for size in (128, 64, 32, 16, 8, 4, 2, 1) if model.hidden % size == 0)
    shapes = {p.name.rpartition(".")[2]: p.shape for p in model.layers[0].parameters}
    config = LlamaConfig(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden,
        intermediate_size=shapes["gate_proj"][0],
        num_hidden_layers=len(model.layers),
        num_attention_heads=model.hidden // width,
        tie_word_embeddings=len(model.root.parameters) == 2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return ModelSource(name=model.name, config=config)


def _machine(asked: Asked, device: Accelerator, drives: Drives, settings: Config) -> Machine:
    kind = "cuda" if device.memory_bytes or device.link else "cpu"
    cores, _ = _cores(asked, device)
    beside = settings.update.thread_cores(kind, cores=cores, computing=cores)
    return Machine(
        drives=drives,
        ranks_per_node=asked.ranks,
        device=device,
        update_seconds=UPDATE_SECONDS if beside else {name: each / cores for name, each in UPDATE_SECONDS.items()},
        update_cores=beside,
        hash_rate=HASH_RATE * max(1, hash_threads(cores - beside - 1)) if device.link else 0.0,
        call_seconds=CALL_SECONDS if device.link else 0.0,
        network=_network(asked, device),
    )


def _network(asked: Asked, device: Accelerator) -> Network:
    """Return the collectives between ranks, as measured by `infinity probe --interconnect` or from bandwidths.

    A bandwidth in `--interconnect` applies to the network if there are several nodes, and otherwise to the ranks of the
    node.
    """
    text = asked.interconnect
    if text is not None and is_file(text):
        return measured_network(text, asked.nodes, asked.ranks)
    given = parse_rate(text, "--interconnect") if text is not None else 0.0
    within = given if given and asked.nodes == 1 else device.interconnect
    gloo = not (device.memory_bytes or device.link)
    return network_of_rates(
        asked.nodes, asked.ranks, network=given if asked.nodes > 1 else 0.0, within=within, gloo=gloo
    )


def _cores(asked: Asked, device: Accelerator) -> tuple[int, str]:
    """Return the number of CPU cores of a rank, and its source.

    The machine on which a plan for an accelerator is made is often a different one, so its cores do not count.
    """
    if asked.cores is not None:
        return asked.cores, "from --cores"
    if device.cores:
        return device.cores, f"as in a common node with {asked.gpu}; set --cores"
    mine = os.sched_getaffinity(0)
    return max(1, share_of_cores(mine, [mine] * asked.ranks, cores_of_groups())), "this machine's; set --cores"


def _measured(
    asked: Asked,
    source: ModelSource,
    model: ModelShape,
    work: Workload,
    drives: Drives,
    settings: Config,
    report: Report,
) -> Machine:
    from infinity_tools.plan.excerpt import measure

    name = settings.state.format
    found = measure(
        source,
        work,
        share=settings.memory.host_bytes * asked.world_size / (18 * model.parameters),
        state_format=name,
        ranks=asked.ranks,
        folder=None if asked.nvme_bandwidth is not None else (asked.nvme or (Path(),))[0],
        on_progress=report,
    )
    whole = Accelerator(name="this processor", flops=1.0)
    machine = _machine(asked, whole, drives, settings)
    each = {other: found.update * seconds / UPDATE_SECONDS[name] for other, seconds in UPDATE_SECONDS.items()}
    return replace(
        machine,
        device=replace(whole, flops=work.flops(model) / found.computation),
        update_seconds=each,
        fixed_seconds=found.fixed,
    )


def _fitted(asked: Asked, model: ModelShape, work: Workload, device: Accelerator, settings: Config) -> Workload:
    """Return the workload, with the fewest micro-batches that fit the device memory unless their number was given."""
    if asked.micro_batches is not None or not device.memory_bytes:
        return work
    paged, room = settings.activations.tier != "device", _ROOM * device.memory_bytes
    fitting = (one for one in work.in_micro_batches if working_bytes(model, one, paged=paged) <= room)
    return next(fitting, work)


def assumptions_of(found: Estimate, asked: Asked, sources: Mapping[str, str]) -> list[str]:
    """Return the assumptions of an estimate, one line each."""
    machine, work = found.machine, found.workload
    drives, device, cores = machine.drives, machine.device, machine.update_cores
    mixed = f"{_giga(drives.mixed)}B/s mixed" if drives.mixed else "reads and writes alternating"
    update = f"{format_number(1e9 * machine.update(found.settings.state.format))} ns per parameter"
    update += f" on {cores} reserved core{'s' * (cores > 1)}" if cores else ""
    if not found.updates_on_device:
        updates = f"updates take {update}"
    elif found.settings.update.device == "auto":
        updates = f"updates run on the GPU, which is estimated to be faster than updates on the CPU ({update})"
    else:
        updates = "updates run on the GPU (update.device)"
    speed = "from --tflops" if asked.tflops is not None else f"{REACHED:.0%} of its peak"
    lines = [
        f"NVMe bandwidth per node: {_giga(drives.read)}B/s read, {_giga(drives.write)}B/s write, {mixed} "
        f"({sources.get('drives', 'from --nvme-bandwidth')})",
        f"computation: {format_number(device.flops / 1e12)} TFLOP/s achieved per rank on {device.name} "
        f"({sources.get('computation', speed)})",
        updates,
    ]
    if asked.gpu is not None or asked.tflops is not None:
        number, source = _cores(asked, device)
        lines.append(f"{number} CPU core{'s' * (number > 1)} per rank ({source})")
    if device.link:
        lines.append(
            f"transfers between host and GPU: {_giga(device.link)}B/s each way; checksums: "
            f"{_giga(machine.hash_rate)}B/s; Python: {1e6 * machine.call_seconds:.1f} µs per call"
        )
    if work.micro_batches > 1 and work.layer_major:
        lines.append(f"each layer processes all {work.micro_batches} micro-batches before the next layer starts")
    elif work.micro_batches > 1:
        lines.append(f"a loop runs the whole model on each of the {work.micro_batches} micro-batches")
    if work.world_size > 1:
        lines.append(_exchange(machine, asked))
        if machine.network.all_gather or machine.network.all_reduce:
            lines.append(_overlap(machine))
    if "memory.host_bytes" not in asked.settings and asked.config is None:
        lines.append(f"host cache: {format_size(found.settings.memory.host_bytes)}, a quarter of the available memory")
    return lines


def _exchange(machine: Machine, asked: Asked) -> str:
    text, device = asked.interconnect, machine.device
    if text is not None and is_file(text):
        return f"communication between ranks: as measured (from {text})"
    if device.fabric:
        source = f"{REACHED_IN_COLLECTIVES:.0%} of the links between accelerators in each direction"
    else:
        source = "half of the link to the host, because data passes through host memory"
    within = f"{_giga(device.interconnect)}B/s ({source}" if device.interconnect else ""
    given = f"{_giga(parse_rate(text, '--interconnect'))}B/s" if text is not None else ""
    if asked.nodes == 1 and given:
        return f"communication between ranks: {given} (from --interconnect)"
    if given:
        local = f"; within a node: {within})" if within and asked.ranks > 1 else ""
        return f"network: {given} per node in each direction, without latency (from --interconnect){local}"
    if not within:
        return "communication between ranks takes no time (set --interconnect)"
    network = "; the network between nodes is not included" if asked.nodes > 1 else ""
    return f"communication between ranks: {within}{network}; set --interconnect)"


def _overlap(machine: Machine) -> str:
    if machine.network.overlapped:
        return "collectives run in parallel with computation, on separate streams"
    return "computation waits for each collective, and a reduce-scatter sends as many bytes as an all-reduce (gloo)"


def _giga(value: float) -> str:
    return f"{format_number(value / 1e9)} G"
