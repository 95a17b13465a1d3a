"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011).

Words are int64 tensors holding 32 bits.
"""

from __future__ import annotations

from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]

WORD = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """The four output words for a counter and a key; all broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The products wrap around int64, which leaves the bits of the unsigned product.
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 32 & WORD) ^ c1 ^ k0,
            second & WORD,
            (first >> 32 & WORD) ^ c3 ^ k1,
            first & WORD,
        )
        k0, k1 = k0 + WEYL[0] & WORD, k1 + WEYL[1] & WORD
    return c0, c1, c2, c3
