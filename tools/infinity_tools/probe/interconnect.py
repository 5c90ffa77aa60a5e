"""Measurement of the collectives that FSDP2 uses, on all ranks of a torchrun launch: progress, table and file."""

from __future__ import annotations

import json as json_format
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.text import Text
from torch.distributed.device_mesh import init_device_mesh

import infinity
from infinity import torchrun
from infinity.errors import ConfigError
from infinity.estimate.network import COLLECTIVES, Network, seconds_of
from infinity.ranks import Ranks, naming_loss
from infinity.torch_private.imports import DefaultAllGather, DefaultReduceScatter
from infinity.units import KIB, MIB, format_size
from infinity_tools.output import check_out, write_out
from infinity_tools.tables import table

SIZES = (64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
"""Sizes of the complete tensor, in bytes. Each is measured only if it is expected to take at most the duration of a
measurement, except for the first two.
"""
_LEAST, _MOST = 5, 50
"""Number of repetitions of a measurement."""
EXAMPLE = (
    "torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr node0 -m -- infinity_tools probe --interconnect"
)
_ALONE = f"--interconnect requires several ranks; start it on each node, for example with\n{EXAMPLE}"


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """Measured collectives."""

    backend: str
    """``gloo`` or ``nccl``."""
    network: Network
    """Times by collective and size of the complete tensor."""

    def document(self) -> dict[str, Any]:
        """Return the results as an object that can be serialized as JSON."""
        network, sent = self.network, self.network.sent
        return {
            "backend": self.backend,
            "nodes": network.nodes,
            "ranks_per_node": network.ranks_per_node,
            "collectives": {
                name: [
                    {
                        "bytes": nbytes,
                        "seconds": seconds,
                        "bytes_per_second": round(nbytes / seconds),
                        "sent_bytes_per_second": round(sent[name] * nbytes / seconds),
                    }
                    for nbytes, seconds in getattr(network, name)
                ]
                for name in COLLECTIVES
                if getattr(network, name)
            },
        }


def measure(
    seconds: float,
    on_progress: Callable[[str], None] = lambda what: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Interconnect | None:
    """Measure the collectives of all ranks, of the ranks of each node, and between nodes. Called on every rank.

    Args:
        seconds: Duration of each measurement, in seconds. Each collective is repeated at least five times.
        on_progress: Callback that receives a description of the next measurement.
        clock: Function that returns the time in seconds.

    Returns:
        The results on rank 0, and ``None`` on the other ranks.

    Raises:
        ConfigError: If there is only one rank, or the nodes have different numbers of ranks.
        LostRankError: If another rank exits.
    """
    if not (dist.is_initialized() and dist.get_world_size() > 1) and not torchrun.launched():
        raise ConfigError(_ALONE)
    device = infinity.mesh().device_type
    ranks = Ranks.current()
    nodes, per_node = _shape(ranks)
    found: dict[str, tuple[tuple[float, float], ...]] = {}
    with naming_loss(), torch.inference_mode():
        for name, collective in _collectives(device, nodes, per_node):
            points: list[tuple[float, float]] = []
            for size in SIZES:
                if len(points) > 1 and seconds_of(tuple(points), size) > seconds:
                    break
                on_progress(f"{name} of {size} bytes")
                points.append((float(size), _timed(collective(size), device, ranks, seconds, clock)))
            found[name] = tuple(points)
    backend = dist.get_backend(dist.group.WORLD) if device == "cpu" else "nccl"
    network = Network(
        nodes=nodes, ranks_per_node=per_node, reduces_all=device == "cpu", overlapped=device != "cpu", **found
    )
    return Interconnect(backend=backend, network=network) if ranks.rank == 0 else None


def _shape(ranks: Ranks) -> tuple[int, int]:
    """Return the number of nodes and of ranks per node. Raises `ConfigError` if it differs between nodes."""
    per_node = ranks.local_world_size
    regular = ranks.rank % per_node == ranks.local_rank and ranks.world_size % per_node == 0
    if ranks.world_size == 1:
        raise ConfigError(_ALONE)
    if len(set(ranks.collect((per_node, regular)))) > 1 or not regular:
        raise ConfigError(
            "--interconnect requires the same number of consecutive ranks on each node; pass the same "
            "--nproc-per-node on every node"
        )
    return ranks.world_size // per_node, per_node


Collective = Callable[[int], Callable[[], object]]
"""Function that returns a collective on a complete tensor of the given size."""


def _collectives(device: str, nodes: int, per_node: int) -> Iterator[tuple[str, Collective]]:
    """Yield the name and function of each collective, in the dtypes of mixed precision: bf16 and fp32."""
    average = dist.ReduceOp.AVG
    mesh = init_device_mesh(device, (nodes, per_node), mesh_dim_names=("replicate", "shard"))

    def ones(nbytes: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(-(-nbytes // dtype.itemsize // size), dtype=dtype, device=device)

    def gathers(group: Any, nbytes: int) -> Callable[[], object]:
        shard = ones(nbytes, group.size(), torch.bfloat16)
        full = shard.new_empty(shard.numel() * group.size())
        return lambda: DefaultAllGather()(full, shard, group)

    def reduces(group: Any, nbytes: int) -> Callable[[], object]:
        shard = ones(nbytes, group.size())
        full = shard.new_ones(shard.numel() * group.size())
        return lambda: DefaultReduceScatter()(shard, full, group, average)

    def all_reduces(group: Any, nbytes: int) -> Callable[[], object]:
        shard = ones(nbytes, per_node)
        return lambda: dist.all_reduce(shard, average, group)

    everyone = dist.group.WORLD
    yield "all_gather", partial(gathers, everyone)
    yield "reduce_scatter", partial(reduces, everyone)
    if nodes > 1 and per_node > 1:
        yield "node_all_gather", partial(gathers, mesh.get_group("shard"))
        yield "node_reduce_scatter", partial(reduces, mesh.get_group("shard"))
    if nodes > 1:
        yield "all_reduce", partial(all_reduces, mesh.get_group("replicate"))


def _timed(
    collective: Callable[[], object], device: str, ranks: Ranks, seconds: float, clock: Callable[[], float]
) -> float:
    """Return the median time of a collective on the slowest rank, in seconds."""

    def once() -> float:
        began = clock()
        collective()
        if device != "cpu":
            torch.cuda.synchronize()
        return clock() - began

    once()  # connects the ranks
    first: float = max(ranks.collect(once()))
    number = max(_LEAST, min(_MOST, int(seconds / first) if first > 0 else _MOST))
    took = ranks.collect([once() for _ in range(number)])
    return float(median(max(times) for times in zip(*took, strict=True)))


LABELS: Mapping[str, str] = {
    "all_gather": "all-gather, all ranks",
    "reduce_scatter": "reduce-scatter, all ranks",
    "node_all_gather": "all-gather in each node",
    "node_reduce_scatter": "reduce-scatter in each node",
    "all_reduce": "all-reduce between nodes",
}
"""Description of each collective."""

FILE = "interconnect.json"
"""Name of the results in the `--out` folder."""


def probe_interconnect(seconds: float, out: Path | None, *, json: bool) -> None:
    """Measure the interconnect on all ranks. Rank 0 prints the results and writes the file.

    Raises the same exceptions as `measure`.
    """
    first = torchrun.number("RANK", 0) == 0
    if out is not None and first:
        check_out(out)
    console = Console(stderr=True)
    try:
        if json or not first:
            found = measure(seconds)
        else:
            with console.status("connecting") as status:
                found = measure(seconds, status.update)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if found is None:
        return
    text = json_format.dumps(found.document(), indent=2)
    if out is not None:
        write_out(out, {FILE: text + "\n"}, {})
    if json:
        typer.echo(text)
    else:
        show(Console(highlight=False), found, out)


def show(console: Console, found: Interconnect, out: Path | None) -> None:
    """Print the results."""
    network, sent = found.network, found.network.sent
    rows = []
    for name in COLLECTIVES:
        for number, (nbytes, seconds) in enumerate(getattr(network, name)):
            bits = f"{8e-9 * sent[name] * nbytes / seconds:.3g}" if sent[name] else ""
            label = "" if number else LABELS[name]
            rows.append((label, format_size(nbytes), f"{1e3 * seconds:.3g}", f"{1e-6 * nbytes / seconds:.0f}", bits))
    several, more = network.nodes > 1, network.ranks_per_node > 1
    title = (
        f"collectives on {network.nodes} node{'s' * several} with {network.ranks_per_node} rank{'s' * more}"
        f"{' each' * several}, {found.backend}"
    )
    console.print(table(title, ("collective", ">tensor", ">ms", ">MB/s", ">Gbit/s sent per node"), rows))
    console.print()
    console.print(Text("tensor: size before sharding; MB/s: this size divided by the time"))
    options = f"--nodes {network.nodes} --ranks {network.ranks_per_node}"
    if out is not None:
        console.print(Text(f"wrote {out / FILE}, for `infinity plan {options} --interconnect {out / FILE}`"))
    else:
        console.print(Text(f"pass --out to write {FILE} for `infinity plan {options} --interconnect`"))
