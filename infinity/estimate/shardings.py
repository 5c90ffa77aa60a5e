"""Comparison of two ways to shard a model over several nodes: full shard across all ranks, and HSDP."""

from __future__ import annotations

from dataclasses import dataclass, replace

from infinity.errors import BudgetError
from infinity.estimate.estimate import Estimate, estimate

EQUAL = 0.01
"""Fraction of the step time below which two shardings count as equally fast."""


@dataclass(frozen=True, kw_only=True)
class Shardings:
    """Estimates of a run with both shardings."""

    full_shard: Estimate
    """Parameters are sharded across all ranks of all nodes."""
    hsdp: Estimate | None
    """Parameters are sharded across the ranks of a node, and every node has a replica. ``None``: the host cache is too
    small.
    """
    shortfall: str = ""
    """Reason why HSDP is not possible, or an empty string."""

    @property
    def by_name(self) -> dict[str, Estimate]:
        """Possible shardings, by name."""
        return {"full_shard": self.full_shard} | ({"hsdp": self.hsdp} if self.hsdp else {})

    @property
    def fitting(self) -> dict[str, Estimate]:
        """Shardings that fit the drives and the device, by name."""
        return {name: one for name, one in self.by_name.items() if not one.shortfalls}

    @property
    def faster(self) -> str:
        """Name of the sharding with the shorter step among those that fit, or an empty string.

        It is empty if both are equally fast, or if neither fits.
        """
        seconds = {name: one.seconds.step for name, one in self.fitting.items()}
        if len(seconds) == 2 and max(seconds.values()) <= (1 + EQUAL) * min(seconds.values()):
            return ""
        return min(seconds, key=seconds.__getitem__, default="")


def shardings_of(found: Estimate, nodes: int) -> Shardings:
    """Return the estimates of a run on several nodes with both shardings.

    Args:
        found: Estimate with full shard.
        nodes: Number of nodes.
    """
    work = replace(found.workload, replicas=nodes)
    try:
        hsdp = estimate(found.model, work, found.machine, found.settings)
    except BudgetError as error:
        return Shardings(full_shard=found, hsdp=None, shortfall=str(error))
    return Shardings(full_shard=found, hsdp=hsdp)
