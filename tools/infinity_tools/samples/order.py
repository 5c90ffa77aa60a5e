"""The order of an epoch: a permutation that is computed place by place, so that no memory grows with its length."""

from __future__ import annotations

import hashlib

_ROUNDS = 4


class Order:
    """A permutation of the numbers below a count, by seed and epoch: a Feistel network."""

    def __init__(self, count: int, seed: int, epoch: int) -> None:
        """Name it; `count` is 1 or more."""
        self._count = count
        self._half = max(1, ((count - 1).bit_length() + 1) // 2)  # bits of half a number
        self._key = f"{seed}.{epoch}.".encode()

    def at(self, place: int) -> int:
        """Return which number is at a place, from 0 on."""
        while True:  # the network permutes the numbers below a power of two; one beyond the count leads to the next
            place = self._network(place)
            if place < self._count:
                return place

    def _network(self, value: int) -> int:
        mask = (1 << self._half) - 1
        left, right = value >> self._half, value & mask
        for turn in range(_ROUNDS):
            digest = hashlib.blake2b(right.to_bytes(8, "little"), digest_size=8, key=self._key, salt=bytes([turn]))
            left, right = right, left ^ (int.from_bytes(digest.digest(), "little") & mask)
        return left << self._half | right
