"""Checks of the processor."""

from __future__ import annotations

import math
import os
from typing import Final

from infinity.memory.cgroups import cores_of_groups
from infinity.processor import crawls_in_bf16, multiplies_bf16
from infinity_tools.doctor.finding import Group, Verdict, check, note, ok, warning
from infinity_tools.doctor.world import World


def _threads() -> int:
    """Return the number of threads set by OMP_NUM_THREADS, or 0 if it is not set."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


@check("cores")
def cores(world: World) -> Verdict:
    """CPU cores that this process may use, given its affinity and the CPU time limit of control groups. Threads in
    excess of this number slow each other down. torchrun sets OMP_NUM_THREADS to 1 if it starts several ranks."""
    mine, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    time = min(cores_of_groups(world.root), mine)
    value = f"{mine}" + (f" of {there}" if mine < there else "")
    threads = _threads() or mine
    if time < mine:
        value += f", but CPU time for {time:.2g} (limit of a control group)"
    if threads > math.ceil(time):
        return warning(
            f"{value}; torch would start {threads} threads",
            f"export OMP_NUM_THREADS={max(1, math.floor(time))}, or raise the limit",
        )
    if mine == 1:
        return note(f"{value}: computation, updates and transfers compete for one core", "give the process more cores")
    if threads < mine:
        return note(
            f"{value}; OMP_NUM_THREADS={threads} limits torch to {threads} threads",
            "if this is the only rank on the node and there is no GPU: unset OMP_NUM_THREADS",
        )
    return ok(value)


@check("bf16")
def bf16(world: World) -> Verdict:
    """Native bf16 multiplication on the CPU. If there is neither this nor a GPU, `infinity train` uses fp32, because
    emulated bf16 is several times slower, or about a hundred times slower without AVX-512."""
    if multiplies_bf16(world.root):
        return ok("native bf16 multiplication")
    fix = "without a GPU, train in fp32 (`infinity train` selects it)"
    if world.read("proc/cpuinfo") is None:
        return note("not reported by Linux", fix)
    if crawls_in_bf16(world.root):
        return warning("emulated with plain loops, about a hundred times slower than fp32", fix)
    return note("emulated", fix)


@check("numa")
def numa(world: World) -> Verdict:
    """NUMA nodes, which are parts of the machine with their own memory. Transfers are fastest if the memory, cores, GPU
    and drives of a rank belong to the same node."""
    nodes = [path.name for path in (world.root / "sys/devices/system/node").glob("node[0-9]*")]
    if len(nodes) > 1:
        return note(
            f"{len(nodes)} nodes; accessing the memory of a different node is slower",
            "use torchrun --numa-binding=node with GPUs, or numactl without",
        )
    return ok("one node" if nodes else "not reported by Linux")


PROCESSOR: Final = Group("Processor", (cores, bf16, numa))
