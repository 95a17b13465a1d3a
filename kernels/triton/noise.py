"""Gumbel noise as a function of (seed, position, token id), without float64."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed.kernels import philox

_ROUNDS = tl.constexpr(philox.ROUNDS)
_MULTIPLIER_0 = tl.constexpr(philox.MULTIPLIERS[0])
_MULTIPLIER_1 = tl.constexpr(philox.MULTIPLIERS[1])
_WEYL_0 = tl.constexpr(philox.WEYL[0])
_WEYL_1 = tl.constexpr(philox.WEYL[1])


@triton.jit
def philox_word(c0, c1, c2, c3, k0, k1):
    """The first word of Philox4x32-10; counter and key are uint32. What is a scalar stays one as long as it can."""
    for _ in tl.static_range(_ROUNDS):
        first = c0.to(tl.uint64) * _MULTIPLIER_0
        second = c2.to(tl.uint64) * _MULTIPLIER_1
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = second.to(tl.uint32)
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = first.to(tl.uint32)
        k0 = k0 + _WEYL_0
        k1 = k1 + _WEYL_1
    return c0


@triton.jit
def gumbel_noise(word):
    """-log(-log(u)), float32, with u = (x + ½) · 2⁻²⁴ and x the top 24 bits of a uint32 `word`.

    Within 4e-6 of the exact value. Near 1, where float32 has no room for u and its logarithm vanishes, -log(u) is
    2 artanh(v / (2 - v)) with v = 1 - u, which float32 holds.
    """
    x = (word >> 8).to(tl.int32)
    u = (x.to(tl.float32) + 0.5) * 5.9604644775390625e-08
    v = ((0xFFFFFF - x).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    s = v / (2.0 - v)
    q = s * s
    series = 2.0 * s * (1.0 + q * (0.33333333 + q * (0.2 + q * 0.14285714)))
    return -tl.log(tl.where(v < 0.125, series, -tl.log(u)))


@triton.jit
def noise_at(seed_low, seed_high, position, ids):
    """Noise of token `ids` (int32) at a position (int64 scalar) under a seed (two uint32)."""
    low = position.to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    zero = low ^ low
    return gumbel_noise(philox_word(ids.to(tl.uint32), low, high, zero, seed_low, seed_high))
