"""Cores, and what they can do."""

from __future__ import annotations

import math
import os
from typing import Final

from infinity.memory.cgroups import cores_of_groups
from infinity.processor import crawls_in_bf16, multiplies_bf16
from infinity_tools.doctor.finding import Group, Verdict, check, note, ok, warning
from infinity_tools.doctor.world import World


def _threads() -> int:
    """Return how many threads OMP_NUM_THREADS gives torch; 0: as many as there are cores."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


@check("cores")
def cores(world: World) -> Verdict:
    """The cores that this process may use: its affinity, and the time that control groups leave it. torch starts as
    many threads as the affinity or OMP_NUM_THREADS says; more threads than time for them wait for one another.
    torchrun sets OMP_NUM_THREADS to 1 where it is not set and there are several ranks."""
    mine, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    time = min(cores_of_groups(world.root), mine)
    value = f"{mine}" + (f" of {there}" if mine < there else "")
    threads = _threads() or mine
    if time < mine:
        value += f", but time of {time:.2g} (cpu limit of a control group)"
    if threads > math.ceil(time):
        return warning(
            f"{value}; torch would start {threads} threads",
            f"export OMP_NUM_THREADS={max(1, math.floor(time))}, or raise the limit",
        )
    if mine == 1:
        return note(f"{value}: computation, updates and transfers take turns", "give the process more cores")
    if threads < mine:
        return note(
            f"{value}; OMP_NUM_THREADS={threads} lets torch compute on {threads}",
            "if no GPU computes and one rank runs here: unset OMP_NUM_THREADS",
        )
    return ok(value)


@check("bf16")
def bf16(world: World) -> Verdict:
    """Whether the processor multiplies in bf16. Where it does not and there is no GPU, `infinity train --dtype auto`
    computes in fp32: emulated bf16 is several times slower, and a hundred times where AVX-512 is missing, too."""
    if multiplies_bf16(world.root):
        return ok("the processor multiplies it natively")
    fix = "without a GPU compute in fp32, as `--dtype auto` does"
    if world.read("proc/cpuinfo") is None:
        return note("not told by the kernel", fix)
    if crawls_in_bf16(world.root):
        return warning("torch computes it in plain loops here, about a hundred times slower than fp32", fix)
    return note("the processor emulates it", fix)


@check("numa")
def numa(world: World) -> Verdict:
    """NUMA nodes: parts of the machine with memory of their own. A rank whose memory, cores, GPU and drives are of
    one node moves its bytes without a detour."""
    nodes = [path.name for path in (world.root / "sys/devices/system/node").glob("node[0-9]*")]
    if len(nodes) > 1:
        return note(
            f"{len(nodes)} nodes: memory of another node is slower",
            "with GPUs torchrun --numa-binding=node, else numactl",
        )
    return ok("one node" if nodes else "not told by the kernel")


PROCESSOR: Final = Group("Processor", (cores, bf16, numa))
