"""Choosing the next token: penalties, temperature, top-k, top-p, min-p and Gumbel noise that needs no generator."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from tokenspeed.kernels.philox import WORD, philox4x32
from tokenspeed.kernels.state_rows import compute_dtype

TOP = 20
"""How many of the most likely ids can be reported."""


class Word(IntEnum):
    """Where `SamplingOptions.scalars` holds what, in words of 32 bits. The seed takes two."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION = 3
    PRESENCE = 4
    FREQUENCY = 5
    TOP_K = 6
    REPORTED = 7
    ADJUSTED = 8
    MASKED = 9
    SEED = 10


WORDS = 16


@dataclass(frozen=True)
class SamplingOptions:
    """How the sequence in each place has its tokens chosen; arrays that live as long as the engine.

    Attributes:
        scalars: int64 [places, WORDS / 2], packed so that a place is set by one small copy; see the properties.
        in_prompt: [places, vocabulary] bool. counts: [places, vocabulary] int32, occurrences in the output.
        bias: [places, vocabulary] float32. All three mean something only where `adjusted`.
        allowed: int32 [places, ⌈vocabulary / 32⌉], bit i % 32 of word i // 32 for id i. Only where `masked`.
        forced: int32 [places, positions + 1], the id that a position must have, -1 for any; or None.
    """

    scalars: Tensor
    in_prompt: Tensor
    counts: Tensor
    bias: Tensor
    allowed: Tensor
    forced: Tensor | None

    @classmethod
    def empty(cls, places: int, vocabulary: int, positions: int | None, device: torch.device) -> SamplingOptions:
        """Greedy, with all other options off. `positions`: of a full context where ids can be forced, else None."""
        forced = None
        if positions is not None:
            forced = torch.full((places, positions + 1), -1, dtype=torch.int32, device=device)
        return cls(
            scalars=pack_scalars(temperature=0.0).repeat(places, 1).to(device),
            in_prompt=torch.zeros((places, vocabulary), dtype=torch.bool, device=device),
            counts=torch.zeros((places, vocabulary), dtype=torch.int32, device=device),
            bias=torch.zeros((places, vocabulary), dtype=torch.float32, device=device),
            allowed=torch.full((places, -(-vocabulary // 32)), -1, dtype=torch.int32, device=device),
            forced=forced,
        )

    @property
    def temperature(self) -> Tensor:
        return self._floats(Word.TEMPERATURE)

    @property
    def top_p(self) -> Tensor:
        return self._floats(Word.TOP_P)

    @property
    def min_p(self) -> Tensor:
        return self._floats(Word.MIN_P)

    @property
    def repetition(self) -> Tensor:
        return self._floats(Word.REPETITION)

    @property
    def presence(self) -> Tensor:
        return self._floats(Word.PRESENCE)

    @property
    def frequency(self) -> Tensor:
        return self._floats(Word.FREQUENCY)

    @property
    def top_k(self) -> Tensor:
        return self._integers(Word.TOP_K)

    @property
    def reported(self) -> Tensor:
        """How many of the most likely to report beside the chosen one; -1 for neither."""
        return self._integers(Word.REPORTED)

    @property
    def adjusted(self) -> Tensor:
        """Whether there are penalties or a bias."""
        return self._integers(Word.ADJUSTED) != 0

    @property
    def masked(self) -> Tensor:
        """Whether `allowed` counts."""
        return self._integers(Word.MASKED) != 0

    @property
    def seed(self) -> Tensor:
        return self.scalars[:, Word.SEED // 2]

    def _floats(self, word: Word) -> Tensor:
        return self.scalars.view(torch.float32)[:, word]

    def _integers(self, word: Word) -> Tensor:
        return self.scalars.view(torch.int32)[:, word]


def pack_scalars(
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    top_k: int = 0,
    reported: int = -1,
    adjusted: bool = False,
    masked: bool = False,
    seed: int = 0,
) -> Tensor:
    """A row of `SamplingOptions.scalars`, int64 [WORDS / 2] on the host. `seed`: 0 … 2⁶⁴ - 1."""
    floats = (temperature, top_p, min_p, repetition, presence, frequency)
    packed = struct.pack("<6f4iQ16x", *floats, top_k, reported, adjusted, masked, seed)
    return torch.frombuffer(bytearray(packed), dtype=torch.int64)


@dataclass(frozen=True)
class Chosen:
    """What `choose` gives.

    Attributes:
        tokens: [n] int64; -1 where the row has a NaN, its largest logit is not finite or the sequence is not live.
        logprobs: [n], of the tokens under softmax(logits), NaN for -1.
        top_ids, top_logprobs: [n, min(TOP, vocabulary)] int64 and float, the most likely in falling order, equal ones
            by id. As `logprobs`, they hold anything where the place wants none reported.
    """

    tokens: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def choose(logits: Tensor, options: SamplingOptions, places: Tensor, positions: Tensor, live: Tensor) -> Chosen:
    """The next token of each sequence, as its place's options want it.

    Logits are adjusted (`adjust_logits`), ids that are not allowed get -∞, then a token is drawn (`sample`); if one
    could be, an id that is forced takes its place. The token is counted in `options.counts` where live and adjusted.

    Args:
        logits: [n, vocabulary]; rows may be apart.
        places: [n] int64; distinct but for those not live.
        positions: [n] int64, the position that the new token will have.
        live: [n] bool; others choose nothing and leave no trace.
    """
    vocabulary = logits.shape[1]
    scores = _edited(logits, options, places)
    tokens = sample(
        scores,
        options.temperature[places],
        options.top_k[places],
        options.top_p[places],
        options.min_p[places],
        options.seed[places],
        positions,
    )
    # A NaN counts even where its id is not allowed.
    tokens = tokens.where(live & ~logits.isnan().any(-1), -1)
    if options.forced is not None:
        forced = options.forced[places, positions].long()
        tokens = torch.where((forced >= 0) & (tokens >= 0), forced, tokens)
    adjusted = options.adjusted[places]
    if bool(adjusted.any()):
        counted = (adjusted & (tokens >= 0)).int()
        options.counts.index_put_((places, tokens.clamp(min=0)), counted, accumulate=True)
    if bool((options.reported[places] >= 0).any()):
        return Chosen(tokens, *token_logprobs(logits, tokens, TOP))
    dtype, shape = compute_dtype(logits.dtype), (len(logits), min(TOP, vocabulary))
    return Chosen(
        tokens,
        torch.zeros(shape[0], dtype=dtype, device=logits.device),
        torch.zeros(shape, dtype=torch.int64, device=logits.device),
        torch.zeros(shape, dtype=dtype, device=logits.device),
    )


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


def _edited(logits: Tensor, options: SamplingOptions, places: Tensor) -> Tensor:
    """`logits` with penalties and bias where adjusted and -∞ for what is not allowed where masked."""
    adjusted, masked = options.adjusted[places], options.masked[places]
    if bool(adjusted.any()):
        changed = adjust_logits(
            logits,
            options.in_prompt[places],
            options.counts[places],
            options.repetition[places],
            options.presence[places],
            options.frequency[places],
            options.bias[places],
        )
        logits = torch.where(adjusted[:, None], changed, logits)
    if bool(masked.any()):
        ids = torch.arange(logits.shape[1], device=logits.device)
        bits = options.allowed[places][:, ids // 32] >> (ids % 32).int() & 1
        logits = logits.masked_fill((bits == 0) & masked[:, None], -torch.inf)
    return logits


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
