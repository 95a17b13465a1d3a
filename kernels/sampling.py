"""Choosing the next token: temperature, top-k, top-p, min-p and Gumbel noise that needs no generator."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed.kernels.philox import WORD, philox4x32
from tokenspeed.kernels.state_rows import compute_dtype


def gumbel_noise(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """-log(-log(u)), a pure function of (seed, position, token id).

    u = (x + ½) · 2⁻²⁴ with x the top 24 bits of the first word of Philox4x32-10, whose key is the seed's low and high
    word and whose counter is (id, position's low word, position's high word, 0).

    Args:
        seeds: int64, the bits of a uint64. positions, ids: int64. All broadcast together.
    Returns:
        float64: the largest u does not fit into float32.
    """
    counter = (ids, positions & WORD, positions >> 32 & WORD, torch.zeros_like(ids))
    word = philox4x32(counter, (seeds & WORD, seeds >> 32 & WORD))[0]
    u = ((word >> 8).to(torch.float64) + 0.5) * 2.0**-24
    return -(-u.log()).log()


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """The next token of each row: argmax of logits / temperature + noise over the tokens that are kept.

    Kept, with the probabilities p = softmax(logits / temperature): the `top_k` most likely tokens; of these, with p
    scaled to sum to 1, the shortest run of most likely tokens whose sum reaches `top_p`; of these, those with p at
    least `min_p` times the largest. Equal logits rank by id, the lower first, here and in the argmax.

    Args:
        logits: [n, vocabulary].
        temperature: [n] float; 0 takes the argmax of the logits whatever the other options are.
        top_k: [n] int64; 0 is off.
        top_p: [n] float; 1 is off.
        min_p: [n] float; 0 is off.
        seeds, positions: [n] int64, of `gumbel_noise`; the position is the one that the new token will have.
    Returns:
        tokens [n] int64, -1 where the row has a NaN or its largest logit is not finite.
    """
    logits = logits.to(compute_dtype(logits.dtype))
    peak = logits.amax(-1, keepdim=True)
    greedy = temperature == 0
    scores = logits
    if not bool(greedy.all()):
        divisor = torch.where(greedy, 1, temperature).to(logits.dtype)
        scaled = (logits - peak) / divisor[:, None]
        ids = torch.arange(logits.shape[1], device=logits.device)
        noise = gumbel_noise(seeds[:, None], positions[:, None], ids).to(logits.dtype)
        noisy = (scaled + noise).masked_fill(~_kept(scaled, top_k, top_p, min_p), -torch.inf)
        scores = torch.where(greedy[:, None], logits, noisy)
    tokens = scores.argmax(-1)
    return tokens.where(peak[:, 0].isfinite(), -1)


def adjust_logits(
    logits: Tensor,
    in_prompt: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    bias: Tensor,
) -> Tensor:
    """Logits with penalties for what was seen, then a bias.

    The logit of an id in prompt or output is divided by `repetition` if positive, multiplied by it if not (Keskar et
    al., 2019, CTRL); then `presence` is subtracted where the id is in the output, and `frequency` times its count
    there; then `bias` is added.

    Args:
        logits: [n, vocabulary].
        in_prompt: [n, vocabulary] bool. counts: [n, vocabulary] int, occurrences in the output.
        repetition, presence, frequency: [n] float; 1, 0 and 0 are off.
        bias: [n, vocabulary] float.
    Returns:
        [n, vocabulary] in promote(float32, logits' type).
    """
    logits = logits.to(compute_dtype(logits.dtype))
    rate = repetition.to(logits.dtype)[:, None]
    repeated = torch.where(logits > 0, logits / rate, logits * rate)
    logits = torch.where(in_prompt | (counts > 0), repeated, logits)
    logits = logits - presence.to(logits.dtype)[:, None] * (counts > 0)
    return logits - frequency.to(logits.dtype)[:, None] * counts + bias.to(logits.dtype)


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities under softmax(logits).

    Args:
        logits: [n, vocabulary]. tokens: [n] int64; -1 gives NaN. top: how many of the most likely to name.
    Returns:
        those of `tokens` [n], the `top` most likely ids [n, top] in falling order (equal ones by id), and theirs
        [n, top]; in promote(float32, logits' type).
    """
    scores = logits.to(compute_dtype(logits.dtype)).log_softmax(-1)
    chosen = scores.gather(-1, tokens.clamp(min=0)[:, None])[:, 0].where(tokens >= 0, torch.nan)
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    return chosen, order[:, :top], ranked[:, :top]


def _kept(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[n, vocabulary] bool, the tokens that may be drawn."""
    if not bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()):
        return torch.ones_like(scaled, dtype=torch.bool)
    ranked, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    kept = (rank < top_k[:, None]) | (top_k[:, None] <= 0)
    weights = ranked.masked_fill(~kept, -torch.inf).softmax(-1)
    before = weights.cumsum(-1) - weights
    kept &= (before < top_p[:, None]) | (top_p[:, None] >= 1)
    kept &= weights >= min_p[:, None].to(weights.dtype) * weights[:, :1]
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(-1, order, kept)
