"""Time of the collectives with which FSDP2 gathers weights and reduces gradients, by the size of an FSDP module.

All sizes are sizes of complete tensors, that is, of the weights or gradients of an FSDP module before they are sharded.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from infinity.schema import integer, number, one_of, record, sequence

Points = tuple[tuple[float, float], ...]
"""Measured or computed (bytes, seconds) of a collective, in ascending order of bytes."""


def ring_share(ranks: int) -> float:
    """Return the fraction of a tensor that a ring sends over each of its links to gather, or to reduce and scatter.

    A ring passes each node once, so this is also the fraction that each node sends to another one, regardless of its
    number of ranks.
    """
    return (ranks - 1) / ranks


def seconds_of(points: Points, nbytes: float) -> float:
    """Return the time of a collective, in seconds.

    The time is interpolated linearly between points, and extrapolated with the last two points beyond the largest one.
    Below the smallest point, which is mostly latency, the time is constant.
    """
    if len(points) < 2 or nbytes <= points[0][0]:
        return points[0][1] if points else 0.0
    low, high = next((pair for pair in pairwise(points) if nbytes <= pair[1][0]), points[-2:])
    slope = max(0.0, high[1] - low[1]) / (high[0] - low[0])
    return high[1] + (nbytes - high[0]) * slope


@dataclass(frozen=True, kw_only=True)
class Network:
    """Collectives between the ranks of a run. A collective without points takes no time."""

    nodes: int = 1
    """Number of nodes."""
    ranks_per_node: int = 1
    """Number of ranks on each node."""
    all_gather: Points = ()
    """All-gather by all ranks."""
    reduce_scatter: Points = ()
    """Reduce-scatter by all ranks."""
    node_all_gather: Points = ()
    """All-gather by the ranks of each node."""
    node_reduce_scatter: Points = ()
    """Reduce-scatter by the ranks of each node."""
    all_reduce: Points = ()
    """All-reduce between nodes by all ranks at the same time, each with the ranks that have the same shard."""
    reduces_all: bool = False
    """``True`` if a reduce-scatter is a sliced all-reduce, as in gloo. It sends twice as many bytes."""
    overlapped: bool = False
    """``True`` if collectives run in parallel with computation. On a GPU, FSDP2 runs them on separate streams. On the
    CPU, it waits for each of them.
    """

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that a node sends over the network per byte of a tensor, by collective of `COLLECTIVES`."""
        ranks = ring_share(self.nodes * self.ranks_per_node) if self.nodes > 1 else 0.0
        return {
            "all_gather": ranks,
            "reduce_scatter": ranks * (1 + self.reduces_all),
            "node_all_gather": 0.0,
            "node_reduce_scatter": 0.0,
            "all_reduce": 2 * ring_share(self.nodes),
        }


COLLECTIVES = ("all_gather", "reduce_scatter", "node_all_gather", "node_reduce_scatter", "all_reduce")
"""Collectives of a `Network`, by attribute."""


ALONE = Network()
"""Collectives that take no time."""


def network_of_rates(nodes: int, ranks_per_node: int, *, network: float, within: float, gloo: bool) -> Network:
    """Return the collectives of rings over links of known bandwidth.

    Args:
        nodes: Number of nodes.
        ranks_per_node: Number of ranks on each node.
        network: Bandwidth of a node's network in each direction, in bytes per second. 0: takes no time.
        within: Bandwidth between the ranks of a node in each direction, in bytes per second. 0: takes no time.
        gloo: Whether collectives run on the CPU with gloo.
    """
    rates = [rate for rate, used in ((network, nodes > 1), (within, ranks_per_node > 1)) if rate and used]

    def points(share: float, rate: float) -> Points:
        return ((0.0, 0.0), (rate, share)) if share and rate else ()

    everyone, local, reducing = ring_share(nodes * ranks_per_node), ring_share(ranks_per_node), 1.0 + gloo
    slowest = min(rates, default=0.0)
    return Network(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        all_gather=points(everyone, slowest),
        reduce_scatter=points(everyone * reducing, slowest),
        node_all_gather=points(local, within),
        node_reduce_scatter=points(local * reducing, within),
        all_reduce=points(2 * ring_share(nodes), network),
        reduces_all=gloo,
        overlapped=not gloo,
    )


_POINT = record(
    lambda **point: (float(point["bytes"]), float(point["seconds"])),
    more=True,
    bytes=number(0, 1e18),
    seconds=number(1e-12, 1e9),
)
_MEASUREMENTS = record(
    more=True,
    backend=one_of("gloo", "nccl"),
    nodes=integer(1),
    ranks_per_node=integer(1),
    collectives=record(lacking=COLLECTIVES, more=True, **dict.fromkeys(COLLECTIVES, sequence(_POINT))),
)


def network_of_measurements(found: object) -> Network:
    """Return the collectives that `infinity probe --interconnect` has measured.

    Args:
        found: Content of `interconnect.json`.

    Raises:
        ValueError: If the content is malformed.
    """
    results = _MEASUREMENTS(found)
    measured: dict[str, Points] = results["collectives"]
    if not measured.get("all_gather") or not measured.get("reduce_scatter"):
        raise ValueError("incomplete measurements")
    if any(low >= high for points in measured.values() for (low, _), (high, _) in pairwise(points)):
        raise ValueError("measurements not in ascending order")
    gloo = results["backend"] == "gloo"
    return Network(
        nodes=results["nodes"],
        ranks_per_node=results["ranks_per_node"],
        reduces_all=gloo,
        overlapped=not gloo,
        **measured,
    )
