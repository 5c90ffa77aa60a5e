"""The recommended batch: large enough to hide storage, in micro-batches that fit in memory."""

from __future__ import annotations

from dataclasses import replace

from infinity.estimate.estimate import Estimate, working_bytes
from infinity.memory.limits import available_memory

LEAST = 8
"""Minimum number of sequences per rank, because a step has costs that do not depend on the batch."""
_ROOM = 0.95
"""Fraction of the memory that computation may use."""


def recommended_batch(found: Estimate) -> tuple[int, int]:
    """Return the recommended number of sequences per micro-batch, and of micro-batches per rank and step.

    This is the smallest batch with which storage is hidden, but at least `LEAST` sequences, and only as many as fit in
    memory (`fits`). If storage cannot be hidden, a larger batch does not help, so it is `LEAST` sequences. If not even
    one sequence fits, it is `LEAST` micro-batches of one. Both numbers are powers of two, so that small differences
    between measurements of a machine do not matter.
    """
    work = found.workload
    hidden = 0 if found.moves_nothing else found.hidden_from_tokens or 0
    sequences = LEAST
    while sequences * work.sequence * work.world_size < hidden:
        sequences *= 2
    while sequences:
        for parts in (2**power for power in range(sequences.bit_length())):
            if fits(found, sequences // parts, parts):
                return sequences // parts, parts
        sequences //= 2
    return 1, LEAST


def fits(found: Estimate, size: int, parts: int) -> bool:
    """Return whether the computation of `parts` micro-batches of `size` sequences fits in memory.

    This is the memory of the device, or on a CPU this rank's share of the available memory without the host cache. If
    the memory of a device is unknown, every batch fits.
    """
    work, machine = found.workload, found.machine
    memory: float = machine.device.memory_bytes
    if not memory:
        if machine.device.link:
            return True
        memory = available_memory() / machine.ranks_per_node - found.budget.host_bytes
    tokens = size * parts * work.sequence * work.world_size
    tried = replace(work, batch_tokens=tokens, micro_batches=parts, layer_major=True)
    return working_bytes(found.model, tried, paged=found.settings.activations.tier != "device") <= _ROOM * memory
