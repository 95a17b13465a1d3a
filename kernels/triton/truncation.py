"""Drawing from the tokens that top-k, top-p and min-p keep, without sorting a vocabulary. One program a row.

A token's distance is (largest logit - its logit) / temperature, in float32: tokens rank by distance, then by id, and
weigh exp(-distance). Weights are summed as integers, in units of 2⁻⁴⁴ of the most likely token's, so that sums do not
depend on their order. A nucleus ends where the reference's does unless the sum before a token is within 1e-5 of the
whole from `top_p`, relatively.

A survey of the row knows the nearest token of each part of the vocabulary. Where k parts have a token within some
distance, so have the k most likely tokens; those within it, the candidates, are few because likely tokens are seldom in
the same part, and are ranked by comparing all pairs. Rows whose candidates are too many, or too few for top-p, are
searched for the distance at which the kept tokens end: slow (about a millisecond), but only flat or tied distributions
need it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed.kernels.triton.noise import noise_at

_FARTHEST = tl.constexpr(3.4028234663852886e38)  # of a token that can be drawn
_INFINITE = tl.constexpr(0x7F800000)  # bits of the distance of one that cannot
_UNIT = tl.constexpr(2.0**44)
_EVERYTHING = tl.constexpr(2**63 - 1)
_STEPS = tl.constexpr(16)
_ROUNDS = tl.constexpr(3)


@triton.jit
def scores_at(logits, edited, is_edited, ids, inside):
    """A row's logits, or what penalties, bias and mask have made of them; -∞ outside."""
    if is_edited:
        scores = tl.load(edited + ids, mask=inside, other=-float("inf"))
    else:
        scores = tl.load(logits + ids, mask=inside, other=-float("inf")).to(tl.float32)
    return scores


@triton.jit
def _weight(distance):
    return (tl.exp(-distance) * _UNIT).to(tl.int64)


@triton.jit
def _reach(parts, count, goal):
    """A distance within which `count` of `parts` have a token, or their nearest tokens weigh `goal`; the farthest if
    there is none. It is the shortest such distance but for 1/4096 of the range."""
    finite = parts <= _FARTHEST
    weights = tl.exp(-parts)
    reach = _FARTHEST
    if (tl.sum(finite.to(tl.int32), 0) >= count) | (tl.sum(weights, 0) >= goal):
        low = 0.0
        reach = tl.max(tl.where(finite, parts, 0.0), 0)
        steps = (tl.arange(0, _STEPS) + 1).to(tl.float32) / _STEPS
        for _ in range(_ROUNDS):
            # The last is `reach` itself, not a rounded neighbour of it.
            tried = tl.where(steps == 1.0, reach, low + (reach - low) * steps)
            near = parts[None, :] <= tried[:, None]
            reached = tl.sum(near.to(tl.int32), 1) >= count
            reached = reached | (tl.sum(tl.where(near, weights[None, :], 0.0), 1) >= goal)
            reached = reached | (steps == 1.0)
            low = tl.max(tl.where(reached, low, tried), 0)
            reach = tl.min(tl.where(reached, tried, reach), 0)
    return reach


@triton.jit
def _collect(
    logits,
    edited,
    is_edited,
    parts,
    part_peaks_distance,
    peak,
    temperature,
    reach,
    listed,
    distances,
    ids_out,
    VOCABULARY: tl.constexpr,
    PART: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Writes distances and ids of the tokens within `reach`, in the order of ids, as far as there is room. Returns how
    many there are."""
    near = part_peaks_distance <= reach
    slot = tl.cumsum(near.to(tl.int32), 0) - 1
    tl.store(listed + slot, parts, mask=near)
    found = tl.sum(near.to(tl.int32), 0)
    tl.debug_barrier()
    count = 0
    start = 0
    while start < found:
        entry = start + tl.arange(0, GROUP)
        part = tl.load(listed + entry, mask=entry < found, other=0)
        ids = part[:, None] * PART + tl.arange(0, PART)[None, :]
        inside = (ids < VOCABULARY) & (entry < found)[:, None]
        scores = scores_at(logits, edited, is_edited, ids, inside)
        distance = tl.div_rn(peak - scores, temperature)
        taken = (distance <= reach).to(tl.int32)
        of_part = tl.sum(taken, 1)
        before = tl.cumsum(of_part, 0) - of_part
        slots = count + before[:, None] + tl.cumsum(taken, 1) - 1
        fits = (taken != 0) & (slots < CAPACITY)
        tl.store(distances + slots, distance, mask=fits)
        tl.store(ids_out + slots, ids, mask=fits)
        count += tl.sum(of_part, 0)
        start += GROUP
    tl.debug_barrier()
    return count


@triton.jit
def _rank(distances, ids, ranks, before, count, limit, PAIRS: tl.constexpr, OTHERS: tl.constexpr):
    """Writes each candidate's rank and the weight of those before it. Returns the weight of those with a rank below
    `limit`."""
    total = tl.zeros((), tl.int64)
    start = 0
    while start < count:
        mine = start + tl.arange(0, PAIRS)
        distance = tl.load(distances + mine, mask=mine < count, other=float("inf"))
        id = tl.load(ids + mine, mask=mine < count, other=0)
        rank = tl.zeros((PAIRS,), tl.int32)
        weight = tl.zeros((PAIRS,), tl.int64)
        other_start = 0
        while other_start < count:
            other = other_start + tl.arange(0, OTHERS)
            other_distance = tl.load(distances + other, mask=other < count, other=float("inf"))
            other_id = tl.load(ids + other, mask=other < count, other=0)
            nearer = other_distance[None, :] < distance[:, None]
            tied = (other_distance[None, :] == distance[:, None]) & (other_id[None, :] < id[:, None])
            ahead = nearer | tied
            rank += tl.sum(ahead.to(tl.int32), 1)
            weight += tl.sum(tl.where(ahead, _weight(other_distance)[None, :], 0), 1)
            other_start += OTHERS
        tl.store(ranks + mine, rank, mask=mine < count)
        tl.store(before + mine, weight, mask=mine < count)
        total += tl.sum(tl.where((mine < count) & (rank < limit), _weight(distance), 0), 0)
        start += PAIRS
    tl.debug_barrier()
    return total


@triton.jit
def _draw_candidate(
    distances, ids, ranks, before, count, limit, goal, min_p, seed_low, seed_high, position, BLOCK: tl.constexpr
):
    """The candidate with the largest noisy logit among those of a rank below `limit`, with less than `goal` before
    them and a weight of at least `min_p`."""
    best = -float("inf")
    token = 0
    start = 0
    while start < count:
        mine = start + tl.arange(0, BLOCK)
        inside = mine < count
        distance = tl.load(distances + mine, mask=inside, other=float("inf"))
        id = tl.load(ids + mine, mask=inside, other=0)
        kept = inside & (tl.load(ranks + mine, mask=inside, other=0) < limit)
        kept = kept & (tl.load(before + mine, mask=inside, other=0) < goal) & (tl.exp(-distance) >= min_p)
        noisy = tl.where(kept, noise_at(seed_low, seed_high, position, id) - distance, -float("inf"))
        # Candidates are in the order of ids: the first of equals has the lowest.
        score, index = tl.max(noisy, 0, return_indices=True)
        better = score > best
        token = tl.where(better, tl.load(ids + start + index), token)
        best = tl.maximum(best, score)
        start += BLOCK
    return token


@triton.jit
def _weights_through(
    logits,
    edited,
    is_edited,
    peak,
    temperature,
    by_count,
    first,
    second,
    third,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The weight, or number, of tokens with distance bits up to each of three bounds."""
    a = tl.zeros((BLOCK,), tl.int64)
    b = tl.zeros((BLOCK,), tl.int64)
    c = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, VOCABULARY, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < VOCABULARY
        distance = tl.div_rn(peak - scores_at(logits, edited, is_edited, ids, inside), temperature)
        bits = distance.to(tl.int32, bitcast=True)
        weight = tl.where(by_count, 1, _weight(distance))
        weight = tl.where(inside, weight, 0)
        a += tl.where(bits <= first, weight, 0)
        b += tl.where(bits <= second, weight, 0)
        c += tl.where(bits <= third, weight, 0)
    return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)


@triton.jit
def _end(logits, edited, is_edited, peak, temperature, by_count, goal, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """The least distance, as bits, through which the weight (or number) of tokens is at least `goal`, which all
    together have; and the weight of those nearer."""
    low = tl.full((), -1, tl.int32)
    high = tl.full((), _INFINITE, tl.int32)
    nearer = tl.zeros((), tl.int64)
    while high - low > 1:
        step = (high - low + 3) // 4
        first = tl.minimum(low + step, high)
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        a, b, c = _weights_through(
            logits, edited, is_edited, peak, temperature, by_count, first, second, third, VOCABULARY, BLOCK
        )
        # Weights rise with distance: the bounds below the goal come first.
        if a >= goal:
            high = first
        elif b >= goal:
            low = first
            nearer = a
            high = second
        elif c >= goal:
            low = second
            nearer = b
            high = third
        else:
            low = third
            nearer = c
    return high, nearer


@triton.jit
def _draw_through(
    logits,
    edited,
    is_edited,
    peak,
    temperature,
    end,
    ties,
    min_p,
    seed_low,
    seed_high,
    position,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token with the largest noisy logit of those nearer than the distance with the bits `end`, the first `ties` of
    those at it, and with a weight of at least `min_p`."""
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    token = tl.zeros((BLOCK,), tl.int32)
    tied_before = tl.zeros((), tl.int32)
    for start in range(0, VOCABULARY, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < VOCABULARY
        distance = tl.div_rn(peak - scores_at(logits, edited, is_edited, ids, inside), temperature)
        bits = distance.to(tl.int32, bitcast=True)
        tied = ((bits == end) & inside).to(tl.int32)
        place = tied_before + tl.cumsum(tied, 0) - tied
        kept = inside & ((bits < end) | ((tied != 0) & (place < ties))) & (tl.exp(-distance) >= min_p)
        noisy = tl.where(kept, noise_at(seed_low, seed_high, position, ids) - distance, -float("inf"))
        better = noisy > best
        token = tl.where(better, ids, token)
        best = tl.where(better, noisy, best)
        tied_before += tl.sum(tied, 0)
    return tl.min(tl.where(best == tl.max(best, 0), token, VOCABULARY - 1), 0)


@triton.jit
def draw_truncated(
    logits,
    edited,
    is_edited,
    parts,
    part_peaks,
    part_sums,
    peak,
    temperature,
    top_k,
    top_p,
    min_p,
    seed_low,
    seed_high,
    position,
    integers,
    before,
    VOCABULARY: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    PROBE: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token drawn for a row whose largest score, `peak`, is finite.

    Args:
        logits, edited: pointers to the row; see `scores_at`.
        parts, part_peaks, part_sums: [power of two] of the survey, index, largest score (-∞ beyond the last) and sum of
            exp((score - largest) / temperature).
        integers, before: scratch of the row, int32 [PARTS + 3 CAPACITY] and int64 [CAPACITY].
    """
    listed = integers
    ids = integers + PARTS
    ranks = ids + CAPACITY
    distances = (ranks + CAPACITY).to(tl.pointer_type(tl.float32), bitcast=True)
    by_rank = (top_k > 0) & (top_k < VOCABULARY)
    by_mass = top_p < 1.0
    limit = tl.where(by_rank, top_k, VOCABULARY)
    apart = tl.div_rn(peak - part_peaks, temperature)

    total = tl.sum(tl.where(apart <= _FARTHEST, part_sums * tl.exp(-apart), 0.0), 0)
    # What min-p keeps lies within this distance, with room for rounding. With both others the weight of all k counts.
    bound = tl.full((), _FARTHEST, tl.float32)
    if (min_p > 0.0) & ~(by_rank & by_mass):
        bound = 0.001 - 1.0001 * tl.log(min_p)
    reach = bound
    if by_rank | by_mass:
        wanted = tl.where(by_rank, top_k, PROBE)
        share = tl.where(by_rank, float("inf"), top_p * total * 1.00001)
        reach = tl.minimum(bound, _reach(apart, wanted, share))
    count = _collect(
        logits,
        edited,
        is_edited,
        parts,
        apart,
        peak,
        temperature,
        reach,
        listed,
        distances,
        ids,
        VOCABULARY,
        PART,
        CAPACITY,
        GROUP,
    )
    goal = tl.full((), _EVERYTHING, tl.int64)
    enough = (count <= CAPACITY) & ((reach >= bound) | (by_rank & (count >= top_k)))
    token = tl.zeros((), tl.int32)
    if count <= CAPACITY:
        weight = _rank(distances, ids, ranks, before, count, limit, PAIRS, OTHERS)
        if by_mass:
            whole = tl.where(by_rank, weight.to(tl.float64), total.to(tl.float64) * _UNIT)
            goal = tl.math.ceil(whole * top_p.to(tl.float64)).to(tl.int64)
            enough = enough | (weight >= goal)
    if enough:
        token = _draw_candidate(
            distances, ids, ranks, before, count, limit, goal, min_p, seed_low, seed_high, position, PAIRS
        )
    else:
        end = tl.full((), _INFINITE, tl.int32)
        ties = tl.zeros((), tl.int64)
        whole = total.to(tl.float64) * _UNIT
        if by_rank:
            ranked = limit.to(tl.int64)
            end, nearer = _end(logits, edited, is_edited, peak, temperature, True, ranked, VOCABULARY, BLOCK)
            ties = ranked - nearer
            if by_mass:
                inner, _, _ = _weights_through(
                    logits, edited, is_edited, peak, temperature, False, end - 1, end - 1, end, VOCABULARY, BLOCK
                )
                at_end = _weight(end.to(tl.float32, bitcast=True))
                whole = (inner + ties * at_end).to(tl.float64)
        if by_mass:
            goal = tl.math.ceil(whole * top_p.to(tl.float64)).to(tl.int64)
            end, nearer = _end(logits, edited, is_edited, peak, temperature, False, goal, VOCABULARY, BLOCK)
            each = tl.maximum(_weight(end.to(tl.float32, bitcast=True)), 1)
            ties = (goal - nearer + each - 1) // each
        token = _draw_through(
            logits,
            edited,
            is_edited,
            peak,
            temperature,
            end,
            ties,
            min_p,
            seed_low,
            seed_high,
            position,
            VOCABULARY,
            BLOCK,
        )
    return token
