"""The recommended batch: large enough to hide storage, in micro-batches that fit the memory."""

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

    This is the smallest batch with which storage is hidden, but at least `LEAST` sequences, and only as many as fit the
    memory of the device, or on a CPU the memory of this machine next to the host cache. If storage cannot be hidden, a
    larger batch is no remedy, so it is `LEAST` sequences. Both numbers are powers of two, so that small differences
    between measurements of a machine do not matter.
    """
    work, device = found.workload, found.machine.device
    memory = device.memory_bytes or available_memory() - found.settings.memory.host_bytes
    hidden = 0 if found.moves_nothing else found.hidden_from_tokens or 0
    sequences = LEAST
    while sequences * work.sequence * work.world_size < hidden:
        sequences *= 2
    while sequences > 1:
        tokens = sequences * work.sequence * work.world_size
        for parts in (2**power for power in range(sequences.bit_length())):
            tried = replace(work, batch_tokens=tokens, micro_batches=parts, layer_major=True)
            if working_bytes(found.model, tried, paged=found.settings.activations.tier != "device") <= _ROOM * memory:
                return sequences // parts, parts
        sequences //= 2
    return 1, 1
