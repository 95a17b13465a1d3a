"""Choosing tokens in two launches, whatever the options are: a survey of the vocabulary and a decision for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels import sampling
from tokenspeed.kernels.sampling import Chosen, SamplingOptions, Word
from tokenspeed.kernels.triton.launch import chained, release_next, wait_for_previous
from tokenspeed.kernels.triton.noise import noise_at
from tokenspeed.kernels.triton.truncation import draw_truncated

PART = 256
"""Ids of which the survey remembers the best."""
SURVEYED_PARTS = 8
SURVEY_WARPS = 8
DECIDE_WARPS = 16
CAPACITY = 2048
"""Candidates that a truncated row may have before it is searched the slow way."""
PROBE = 512
"""Parts whose nearest tokens are tried as candidates for top-p."""
GROUP = 16
"""Parts read at once for candidates."""
PAIRS = 64
OTHERS = 128
"""So many candidates are compared at once with so many."""
SEARCH_BLOCK = 4096

_TEMPERATURE, _TOP_P, _MIN_P, _REPETITION, _PRESENCE, _FREQUENCY, _TOP_K, _REPORTED, _ADJUSTED, _MASKED, _SEED = (
    tl.constexpr(int(word)) for word in Word
)
_WORDS = tl.constexpr(sampling.WORDS)
# The survey's figures of a part.
_RAW_PEAK, _RAW_SUM, _PEAK, _SUM, _BEST, _BEST_ID, _FIGURES = (tl.constexpr(index) for index in range(7))


def choose(logits: Tensor, options: SamplingOptions, places: Tensor, positions: Tensor, live: Tensor) -> Chosen:
    rows, vocabulary = logits.shape
    device, top = logits.device, min(sampling.TOP, vocabulary)
    chosen = Chosen(
        tokens=torch.empty(rows, dtype=torch.int64, device=device),
        logprobs=torch.empty(rows, dtype=torch.float32, device=device),
        top_ids=torch.empty((rows, top), dtype=torch.int64, device=device),
        top_logprobs=torch.empty((rows, top), dtype=torch.float32, device=device),
    )
    if rows == 0:
        return chosen
    assert logits.stride(1) == 1
    parts = triton.cdiv(vocabulary, PART)
    figures = torch.empty((rows, _FIGURES.value, parts), dtype=torch.float32, device=device)
    edited = torch.empty((rows, vocabulary), dtype=torch.float32, device=device)
    integers = torch.empty((rows, parts + 3 * CAPACITY), dtype=torch.int32, device=device)
    before = torch.empty((rows, CAPACITY), dtype=torch.int64, device=device)
    words = options.scalars.view(torch.int32)
    _survey_kernel[(triton.cdiv(parts, SURVEYED_PARTS), rows)](
        logits,
        words,
        options.in_prompt.view(torch.uint8),
        options.counts,
        options.bias,
        options.allowed,
        places,
        positions,
        live.view(torch.uint8),
        figures,
        edited,
        logits.stride(0),
        VOCABULARY=vocabulary,
        PART=PART,
        PARTS=parts,
        SURVEYED=SURVEYED_PARTS,
        num_warps=SURVEY_WARPS,
        **chained(device),
    )
    _decide_kernel[(rows,)](
        logits,
        words,
        options.counts,
        options.forced if options.forced is not None else words,
        places,
        positions,
        live.view(torch.uint8),
        figures,
        edited,
        integers,
        before,
        chosen.tokens,
        chosen.logprobs,
        chosen.top_ids,
        chosen.top_logprobs,
        logits.stride(0),
        options.forced.stride(0) if options.forced is not None else 0,
        VOCABULARY=vocabulary,
        HAS_FORCED=options.forced is not None,
        TOP=top,
        PART=PART,
        PARTS=parts,
        PARTS_BLOCK=triton.next_power_of_2(parts),
        CAPACITY=CAPACITY,
        PROBE=PROBE,
        GROUP=GROUP,
        PAIRS=PAIRS,
        OTHERS=OTHERS,
        BLOCK=min(SEARCH_BLOCK, triton.next_power_of_2(vocabulary)),
        num_warps=DECIDE_WARPS,
        **chained(device),
    )
    return chosen


@triton.jit
def _float(words, index):
    return tl.load(words + index).to(tl.float32, bitcast=True)


@triton.jit
def _is_truncated(words, VOCABULARY: tl.constexpr):
    """Whether the options of a place leave out tokens that could be drawn."""
    top_k = tl.load(words + _TOP_K)
    some = ((top_k > 0) & (top_k < VOCABULARY)) | (_float(words, _TOP_P) < 1.0) | (_float(words, _MIN_P) > 0.0)
    return some & (_float(words, _TEMPERATURE) > 0.0)


@triton.jit
def _seed(words, half):
    return tl.load(words + _SEED + half).to(tl.uint32, bitcast=True)


@triton.jit
def _penalized(scores, words, in_prompt, counts, bias, ids, inside):
    """`adjust_logits`, for pointers to the place's rows."""
    repetition = _float(words, _REPETITION)
    count = tl.load(counts + ids, mask=inside, other=0)
    in_output = count > 0
    seen = in_output | (tl.load(in_prompt + ids, mask=inside, other=0) != 0)
    repeated = tl.where(scores > 0.0, tl.div_rn(scores, repetition), scores * repetition)
    scores = tl.where(seen, repeated, scores)
    scores = scores - tl.where(in_output, _float(words, _PRESENCE), 0.0)
    scores = scores - _float(words, _FREQUENCY) * count.to(tl.float32)
    return scores + tl.load(bias + ids, mask=inside, other=0.0)


@triton.jit(do_not_specialize_on_alignment=["places", "positions", "live"])
def _survey_kernel(
    logits,
    words,
    in_prompt,
    counts,
    bias,
    allowed,
    places,
    positions,
    live,
    figures,
    edited,
    logits_stride,
    VOCABULARY: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    SURVEYED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some parts of a row: largest logit (NaN if there is one) and sum of exponentials; the same of the scores that
    tokens are drawn by; the best token with noise, relative to the part's largest score."""
    release_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0) * SURVEYED + tl.arange(0, SURVEYED)
    ids = part[:, None] * PART + tl.arange(0, PART)[None, :]
    inside = ids < VOCABULARY
    # All loads that do not depend on each other come first: the options take two more.
    raw = tl.load(logits + row * logits_stride + ids, mask=inside, other=-float("inf")).to(tl.float32)
    place = tl.load(places + row).to(tl.int64)
    position = tl.load(positions + row)
    if tl.load(live + row) == 0:
        return
    words += place * _WORDS
    temperature = _float(words, _TEMPERATURE)
    adjusted = tl.load(words + _ADJUSTED) != 0
    masked = tl.load(words + _MASKED) != 0
    reported = tl.load(words + _REPORTED) >= 0

    nans = tl.max((raw != raw).to(tl.int32), 1)
    raw_peak = tl.max(raw, 1)
    out = figures + row * (_FIGURES * PARTS) + part
    is_part = part < PARTS
    tl.store(out + _RAW_PEAK * PARTS, tl.where(nans > 0, float("nan"), raw_peak), mask=is_part)
    if reported:
        raw_base = tl.where(raw_peak == -float("inf"), 0.0, raw_peak)
        tl.store(out + _RAW_SUM * PARTS, tl.sum(tl.exp(raw - raw_base[:, None]), 1), mask=is_part)

    scores = raw
    if adjusted | masked:
        if adjusted:
            at = place * VOCABULARY
            scores = _penalized(scores, words, in_prompt + at, counts + at, bias + at, ids, inside)
        if masked:
            # The words apart from the ids: a load of them by id would not be contiguous, and its layout would spread.
            ALLOWED: tl.constexpr = (VOCABULARY + 31) // 32
            index = part[:, None] * (PART // 32) + tl.arange(0, PART // 32)[None, :]
            bits = tl.load(allowed + place * ALLOWED + index, mask=index < ALLOWED, other=0)
            bits = bits[:, :, None] >> tl.arange(0, 32)[None, None, :]
            scores = tl.where((tl.reshape(bits, (SURVEYED, PART)) & 1) != 0, scores, -float("inf"))
        tl.store(edited + row * VOCABULARY + ids, scores, mask=inside)
    peak, index = tl.max(scores, 1, return_indices=True)
    tl.store(out + _PEAK * PARTS, peak, mask=is_part)

    best = tl.zeros((SURVEYED,), tl.float32)
    if temperature > 0.0:
        base = tl.where(peak == -float("inf"), 0.0, peak)
        scaled = tl.div_rn(scores - base[:, None], temperature)
        if _is_truncated(words, VOCABULARY):
            tl.store(out + _SUM * PARTS, tl.sum(tl.exp(scaled), 1), mask=is_part)
        else:
            noise = noise_at(_seed(words, 0), _seed(words, 1), position, ids)
            best, index = tl.max(scaled + noise, 1, return_indices=True)
    tl.store(out + _BEST * PARTS, best, mask=is_part)
    best_id = part * PART + index
    tl.store(out + _BEST_ID * PARTS, best_id.to(tl.float32, bitcast=True), mask=is_part)


@triton.jit
def _report(
    logits,
    part_peaks,
    peak,
    log_total,
    wanted,
    top_ids,
    top_logprobs,
    VOCABULARY: tl.constexpr,
    PART: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
):
    """The `wanted` most likely tokens, one after the other. `part_peaks` become the largest logits not yet named."""
    parts = tl.arange(0, PARTS_BLOCK)
    last = tl.full((), float("inf"), tl.float32)
    last_id = tl.full((), -1, tl.int32)
    rank = 0
    while rank < wanted:
        value, part = tl.max(part_peaks, 0, return_indices=True)
        ids = part * PART + tl.arange(0, PART)
        inside = ids < VOCABULARY
        raw = tl.load(logits + ids, mask=inside, other=-float("inf")).to(tl.float32)
        unnamed = inside & ((raw < last) | ((raw == last) & (ids > last_id)))
        id = tl.min(tl.where(unnamed & (raw == value), ids, VOCABULARY - 1), 0)
        tl.store(top_ids + rank, id.to(tl.int64))
        tl.store(top_logprobs + rank, value - peak - log_total)
        last = value
        last_id = id
        following = tl.max(tl.where(unnamed & (ids != id), raw, -float("inf")), 0)
        part_peaks = tl.where(parts == part, following, part_peaks)

        rank += 1


@triton.jit(
    do_not_specialize=["forced_stride"],
    do_not_specialize_on_alignment=["places", "positions", "live"],
)
def _decide_kernel(
    logits,
    words,
    counts,
    forced,
    places,
    positions,
    live,
    figures,
    edited,
    integers,
    before,
    tokens,
    logprobs,
    top_ids,
    top_logprobs,
    logits_stride,
    forced_stride,
    VOCABULARY: tl.constexpr,
    HAS_FORCED: tl.constexpr,
    TOP: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    PROBE: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row's token from its survey, and what is reported of it."""
    release_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS_BLOCK)
    is_part = parts < PARTS
    figures += row * (_FIGURES * PARTS) + parts
    # All loads that do not depend on each other come first. Those of a row that is not live are of no use.
    raw_peaks = tl.load(figures + _RAW_PEAK * PARTS, mask=is_part, other=-float("inf"))
    peaks = tl.load(figures + _PEAK * PARTS, mask=is_part, other=-float("inf"))
    best = tl.load(figures + _BEST * PARTS, mask=is_part, other=0.0)
    best_ids = tl.load(figures + _BEST_ID * PARTS, mask=is_part, other=0.0).to(tl.int32, bitcast=True)
    place = tl.load(places + row).to(tl.int64)
    position = tl.load(positions + row)
    if tl.load(live + row) == 0:
        tl.store(tokens + row, -1)
        return
    words += place * _WORDS
    temperature = _float(words, _TEMPERATURE)
    adjusted = tl.load(words + _ADJUSTED) != 0
    masked = tl.load(words + _MASKED) != 0
    reported = tl.load(words + _REPORTED)
    has_nan = tl.max((raw_peaks != raw_peaks).to(tl.int32), 0) != 0
    peak = tl.max(peaks, 0)
    logits += row * logits_stride

    token = tl.full((), -1, tl.int32)
    if (tl.abs(peak) < float("inf")) & (has_nan == 0):
        if _is_truncated(words, VOCABULARY):
            sums = tl.load(figures + _SUM * PARTS, mask=is_part, other=0.0)
            token = draw_truncated(
                logits,
                edited + row * VOCABULARY,
                adjusted | masked,
                parts,
                peaks,
                sums,
                peak,
                temperature,
                tl.load(words + _TOP_K),
                _float(words, _TOP_P),
                _float(words, _MIN_P),
                _seed(words, 0),
                _seed(words, 1),
                position,
                integers + row * (PARTS + 3 * CAPACITY),
                before + row * CAPACITY,
                VOCABULARY,
                PART,
                PARTS,
                CAPACITY,
                PROBE,
                GROUP,
                PAIRS,
                OTHERS,
                BLOCK,
            )
        else:
            divisor = tl.where(temperature > 0.0, temperature, 1.0)
            _, part = tl.max(best + tl.div_rn(peaks - peak, divisor), 0, return_indices=True)
            token = tl.sum(tl.where(parts == part, best_ids, 0), 0)
        if HAS_FORCED:
            must = tl.load(forced + place * forced_stride + position)
            token = tl.where(must >= 0, must, token)
        if adjusted:
            count = counts + place * VOCABULARY + token
            tl.store(count, tl.load(count) + 1)
    tl.store(tokens + row, token.to(tl.int64))

    if reported >= 0:
        if token >= 0:
            raw_peak = tl.max(raw_peaks, 0)
            raw_sums = tl.load(figures + _RAW_SUM * PARTS, mask=is_part, other=0.0)
            log_total = tl.log(tl.sum(raw_sums * tl.exp(raw_peaks - raw_peak), 0))
            tl.store(logprobs + row, tl.load(logits + token).to(tl.float32) - raw_peak - log_total)
            _report(
                logits,
                raw_peaks,
                raw_peak,
                log_total,
                tl.minimum(reported, TOP),
                top_ids + row * TOP,
                top_logprobs + row * TOP,
                VOCABULARY,
                PART,
                PARTS_BLOCK,
            )
        else:
            tl.store(logprobs + row, float("nan"))
