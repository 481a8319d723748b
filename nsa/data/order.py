"""A shuffle without memory: the place of each row is a pure function of seed, epoch and index."""

from __future__ import annotations

import hashlib

ROUNDS = 6


def shuffled(index: int, size: int, seed: int, epoch: int) -> int:
    """Return where `index` goes in the permutation of range(size) that (seed, epoch) names.

    A Feistel network permutes [0, 4^k), the smallest such range that holds `size`; results
    outside of range(size) are permuted again until they fall inside, which keeps it one-to-one.
    """
    assert 0 <= index < size, f"index {index} is not in range({size})"
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        index = _feistel(index, half_bits, f"{seed}/{epoch}")
        if index < size:
            return index


def _feistel(value: int, half_bits: int, key: str) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(ROUNDS):
        digest = hashlib.blake2b(f"{key}/{number}/{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return left << half_bits | right
