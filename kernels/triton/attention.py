"""Attention over KV pages, whose keys may be split among programs; a second kernel then joins the parts.

A part is a softmax over some of a query's keys: its output, and the base-2 logarithm of its denominator (`weights`),
-inf where a program had no keys. Logits are scaled so that exp2 serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels import dense_attention
from tokenspeed.kernels.triton.launch import chained, dot, release_next, wait_for_previous

LOG2_E = 1.4426950408889634

DECODE_KEYS = 64  # keys a program reads at once
DECODE_WARPS, DECODE_STAGES = 4, 3
DECODE_PROGRAMS = 1  # programs per multiprocessor that share a step's keys
DECODE_PARTS = (8, 128)  # of a sequence, at least and at most; powers of two
JOIN_ELEMENTS = 4096  # of all parts of a head, in a program that joins them

PLANNED_CHUNK = 8192
PLANNED_LEAST, PLANNED_MOST = 3 * PLANNED_CHUNK, 1 << 18  # lengths that cuDNN serves, with the chunk
PREFILL_ROWS = 128  # query heads × tokens in a program
PREFILL_KEYS = 64
PREFILL_WARPS, PREFILL_STAGES = 8, 2
SINGLE_ROWS, SINGLE_KEYS, SINGLE_STAGES = 64, 16, 1  # at most, for float32, whose products are no matrix instructions
PREFILL_PARTS = 8  # at most
PREFILL_PART_KEYS = 1024  # that a part of the longest sequence has at least
PREFILL_PART_WAVES = 8  # of programs at most, if there are parts: 128 KiB of memory each
PREFILL_PART_OVERHEAD = 256  # what writing and joining a part costs, as keys


def attention_decode(
    q: Tensor,
    gate: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    longest: int,
) -> Tensor:
    """The launch depends on shapes alone, as that of a captured graph must; `longest` is not used."""
    sequences, heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    output = torch.empty(sequences, heads * head_dim, dtype=q.dtype, device=q.device)
    if not sequences:
        return output
    programs = DECODE_PROGRAMS * _multiprocessors(q.device)
    fewest, most = DECODE_PARTS
    parts = max(fewest, min(most, triton.next_power_of_2(triton.cdiv(programs, sequences * kv_heads))))
    joined, weights = _parts(sequences * heads, parts, head_dim, q.device)
    keys = min(DECODE_KEYS, SINGLE_KEYS) if q.dtype == torch.float32 else DECODE_KEYS
    _decode_kernel[(parts, sequences * kv_heads)](
        q,
        k_pages,
        v_pages,
        page_table,
        lengths,
        joined,
        weights,
        sequences,
        page_table.stride(0),
        LOG2_E * head_dim**-0.5,
        programs,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)),
        KEYS=_keys_at_once(keys, page_size),
        num_warps=DECODE_WARPS,
        num_stages=DECODE_STAGES,
        **chained(q.device),
    )
    _join(joined, weights, gate, output, most=parts)
    return output


def attention_prefill(
    q: Tensor,
    gate: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    positions: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    bounds: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Needs neither `lengths` nor `bounds`: a query's keys follow from its position, its tile from `starts`. With
    `bounds`, cuDNN may serve (`_planned`)."""
    tokens, heads, head_dim = q.shape
    if bounds is not None and _planned(q, k_pages.shape[2], bounds):
        operands = (q, gate, k_pages, v_pages, page_table, positions, starts, lengths, longest)
        return dense_attention.attention_prefill(*operands, bounds)
    page_size, kv_heads = k_pages.shape[1:3]
    sequences = page_table.shape[0]
    output = torch.empty(tokens, heads * head_dim, dtype=q.dtype, device=q.device)
    if not tokens:
        return output
    rows, keys, stages = PREFILL_ROWS, PREFILL_KEYS, PREFILL_STAGES
    if q.dtype == torch.float32:
        rows, keys, stages = min(rows, SINGLE_ROWS), min(keys, SINGLE_KEYS), SINGLE_STAGES
    tile = rows // (heads // kv_heads)
    tiles = triton.cdiv(tokens, tile) if sequences == 1 else tokens // tile + sequences
    parts = prefill_parts(tiles * kv_heads, longest, _multiprocessors(q.device))
    if parts > 1:
        joined, weights = _parts(tokens * heads, parts, head_dim, q.device)
    else:
        joined, weights = output, output  # not used
    _prefill_kernel[(kv_heads, tiles, parts)](
        q,
        gate,
        k_pages,
        v_pages,
        page_table,
        positions,
        starts,
        output,
        joined,
        weights,
        sequences,
        parts,
        page_table.stride(0),
        gate.stride(0),
        gate.stride(1),
        LOG2_E * head_dim**-0.5,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        TILE=tile,
        ROWS=rows,
        KEYS=_keys_at_once(keys, page_size),
        SPLIT=parts > 1,
        num_warps=PREFILL_WARPS,
        num_stages=stages,
    )
    if parts > 1:
        _join(joined, weights, gate, output, most=PREFILL_PARTS)
    return output


def _planned(q: Tensor, kv_heads: int, bounds: Sequence[tuple[int, int]]) -> bool:
    """Whether it is the chunk of a long prompt that cuDNN, faster there by a quarter, has a plan for: one of a certain
    size at a multiple of it. Other shapes would be planned as they come, which takes longer than they do."""
    (count, length), others = bounds[0], bounds[1:]
    if others or count != PLANNED_CHUNK or length % count or not PLANNED_LEAST <= length <= PLANNED_MOST:
        return False
    return q.dtype == torch.bfloat16 and q.is_cuda and _cudnn_serves(q.device, q.shape[1], kv_heads, q.shape[2])


@cache
def _cudnn_serves(device: torch.device, heads: int, kv_heads: int, head_dim: int) -> bool:
    return dense_attention.serves(device, torch.bfloat16, heads, kv_heads, head_dim)


def prefill_parts(tiles: int, longest: int, multiprocessors: int) -> int:
    """Parts to split every tile's keys into, so that few multiprocessors are idle in the last wave.

    A program has a multiprocessor to itself. Time is counted in keys; a part's way through memory counts as some."""
    most = min(PREFILL_PARTS, longest // PREFILL_PART_KEYS, PREFILL_PART_WAVES * multiprocessors // tiles)

    def keys(parts: int) -> float:
        overhead = PREFILL_PART_OVERHEAD if parts > 1 else 0
        waves: int = triton.cdiv(tiles * parts, multiprocessors)
        return waves * (longest / parts + overhead)

    return min(range(1, max(1, most) + 1), key=keys)


def _keys_at_once(most: int, page_size: int) -> int:
    """A block of keys within one page where pages allow it, and never fewer than a matrix instruction takes."""
    keys: int = triton.next_power_of_2(page_size)
    return max(16, min(most, keys))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _parts(rows: int, parts: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    outputs = torch.empty(rows, parts, head_dim, dtype=torch.float32, device=device)
    return outputs, torch.empty(rows, parts, dtype=torch.float32, device=device)


def _join(joined: Tensor, weights: Tensor, gate: Tensor, output: Tensor, most: int) -> None:
    rows, parts, head_dim = joined.shape
    columns = min(head_dim, max(16, JOIN_ELEMENTS // most))
    _join_kernel[(rows, triton.cdiv(head_dim, columns))](
        joined,
        weights,
        gate,
        output,
        parts,
        gate.stride(0),
        gate.stride(1),
        HEADS=gate.shape[1],
        HEAD_DIM=head_dim,
        PARTS=triton.next_power_of_2(most),
        COLUMNS=columns,
        num_warps=4,
        **chained(gate.device),
    )


@triton.jit
def _page_at(table, start, stop, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """Pages of the positions from `start`: one, where a block of KEYS lies within a page, or else one per position."""
    if PAGE % KEYS == 0:
        return tl.load(table + start // PAGE, mask=start < stop, other=0)
    else:
        position = start + tl.arange(0, KEYS)
        return tl.load(table + position // PAGE, mask=position < stop, other=0)


@triton.jit
def _sweep(
    query,
    position,
    attended,
    total,
    peak,
    k_head,
    v_head,
    table,
    first,
    last,
    stop,
    scale,
    STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Goes on with a softmax over blocks first … last - 1 of KEYS keys each.

    query: [rows, HEAD_DIM]; position: [rows], the last position that a row sees, looked at if MASKED; attended: [rows,
    HEAD_DIM], total and peak: [rows], the unnormalised output, its denominator and the greatest scaled logit so far.
    k_head, v_head: the pools at the KV head, rows STRIDE apart; table: the sequence's pages. Nothing at `stop` or
    behind it is read; without MASKED every key of every block is before it.
    """
    key = tl.arange(0, KEYS)
    place = tl.arange(0, HEAD_DIM)[None, :]
    within = key[:, None] * STRIDE + place
    page = _page_at(table, first * KEYS, stop, PAGE, KEYS)
    for block in range(first, last):
        start = block * KEYS
        # The next block's page is on its way while this block's keys are, so that no load waits for two others.
        following = _page_at(table, start + KEYS, stop, PAGE, KEYS)
        if PAGE % KEYS == 0:
            offsets = (page * PAGE + start % PAGE) * STRIDE + within
        else:
            offsets = (page * PAGE + (start + key) % PAGE)[:, None] * STRIDE + place
        written = (start + key < stop)[:, None]
        k = tl.load(k_head + offsets, mask=written, other=0.0) if MASKED else tl.load(k_head + offsets)
        logits = dot(query, tl.trans(k), tl.zeros((query.shape[0], KEYS), tl.float32))
        if MASKED:
            logits = tl.where((start + key)[None, :] <= position[:, None], logits, float("-inf"))
        above = tl.maximum(peak, tl.max(logits, 1) * scale)
        shares = tl.exp2(logits * scale - above[:, None])
        decay = tl.exp2(peak - above)
        total = total * decay + tl.sum(shares, 1)
        peak = above
        v = tl.load(v_head + offsets, mask=written, other=0.0) if MASKED else tl.load(v_head + offsets)
        attended = dot(shares.to(v.dtype), v, attended * decay[:, None])
        page = following
    return attended, total, peak


@triton.jit(
    do_not_specialize=["sequences", "table_stride", "programs"],
    do_not_specialize_on_alignment=["page_table", "lengths"],
)
def _decode_kernel(
    q,
    k_pages,
    v_pages,
    page_table,
    lengths,
    joined,
    weights,
    sequences,
    table_stride,
    scale,
    programs,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of the query heads of one sequence and KV head.

    Every sequence gets parts by its share of all keys, so that about `programs` programs of like size have work,
    however ragged the lengths; the others leave word that they had none."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    part, parts = tl.program_id(0), tl.num_programs(0)
    sequence, kv_head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    row = tl.arange(0, ROWS)
    place = tl.arange(0, HEAD_DIM)[None, :]
    live = row < GROUP
    head = sequence.to(tl.int64) * HEADS + kv_head * GROUP + row
    release_next(PDL)
    wait_for_previous(PDL)
    length = tl.load(lengths + sequence).to(tl.int32)
    query = tl.load(q + head[:, None] * HEAD_DIM + place, mask=live[:, None], other=0.0)
    all_blocks = 0
    for group in range(0, sequences, 128):
        index = group + tl.arange(0, 128)
        each = tl.load(lengths + index, mask=index < sequences, other=0).to(tl.int32)
        all_blocks += tl.sum((each + KEYS - 1) // KEYS, 0)
    blocks = (length + KEYS - 1) // KEYS
    share = tl.maximum((all_blocks * KV_HEADS + programs - 1) // programs, 1)
    used = tl.minimum((blocks + share - 1) // share, parts)
    if part < used:
        attended, total, peak = _sweep(
            query,
            tl.full((ROWS,), 0, tl.int32) + (length - 1),
            tl.zeros((ROWS, HEAD_DIM), tl.float32),
            tl.zeros((ROWS,), tl.float32),
            tl.full((ROWS,), -1e30, tl.float32),
            k_pages + kv_head * HEAD_DIM,
            v_pages + kv_head * HEAD_DIM,
            page_table + sequence.to(tl.int64) * table_stride,
            blocks * part // used,
            blocks * (part + 1) // used,
            length,
            scale,
            KV_HEADS * HEAD_DIM,
            HEAD_DIM,
            PAGE,
            KEYS,
            MASKED=True,
        )
        target = joined + (head * parts + part)[:, None] * HEAD_DIM + place
        tl.store(target, attended / total[:, None], mask=live[:, None])
        tl.store(weights + head * parts + part, peak + tl.log2(total), mask=live)
    else:
        tl.store(weights + head * parts + part, tl.full((ROWS,), float("-inf"), tl.float32), mask=live)


@triton.jit(
    do_not_specialize=["sequences", "parts", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "positions", "starts"],
)
def _prefill_kernel(
    q,
    gate,
    k_pages,
    v_pages,
    page_table,
    positions,
    starts,
    output,
    joined,
    weights,
    sequences,
    parts,
    table_stride,
    gate_token,
    gate_head,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The query heads of one KV head at TILE tokens of one sequence: row r is head r % GROUP at token r // GROUP. With
    SPLIT one part of their keys; without, the gated output.

    Later tiles, whose queries see more keys, start first."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, part = tl.program_id(0), tl.program_id(2)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    owner, begin, end, before = -1, 0, 0, 0
    for sequence in range(sequences):
        low = tl.load(starts + sequence).to(tl.int32)
        high = tl.load(starts + sequence + 1).to(tl.int32)
        tiles = (high - low + TILE - 1) // TILE
        here = (tile >= before) & (tile < before + tiles)
        owner = tl.where(here, sequence, owner)
        begin = tl.where(here, low + (tile - before) * TILE, begin)
        end = tl.where(here, high, end)
        before += tiles
    if owner >= 0:
        row = tl.arange(0, ROWS)
        place = tl.arange(0, HEAD_DIM)[None, :]
        token = begin + row // GROUP
        live = (row < TILE * GROUP) & (token < end)
        position = tl.load(positions + token, mask=live, other=-1).to(tl.int32)
        stop = tl.max(position, 0) + 1
        blocks = (stop + KEYS - 1) // KEYS
        first, last = blocks * part // parts, blocks * (part + 1) // parts
        # Up to here every row sees every key.
        plain = tl.minimum((tl.min(tl.where(live, position, stop), 0) + 1) // KEYS, last)
        head = token.to(tl.int64) * HEADS + kv_head * GROUP + row % GROUP
        query = tl.load(q + head[:, None] * HEAD_DIM + place, mask=live[:, None], other=0.0)
        k_head = k_pages + kv_head * HEAD_DIM
        v_head = v_pages + kv_head * HEAD_DIM
        table = page_table + tl.cast(owner, tl.int64) * table_stride
        attended = tl.zeros((ROWS, HEAD_DIM), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        peak = tl.full((ROWS,), -1e30, tl.float32)  # finite: of a block that a row sees nothing of, exp2 gives zeros
        attended, total, peak = _sweep(
            query,
            position,
            attended,
            total,
            peak,
            k_head,
            v_head,
            table,
            first,
            plain,
            stop,
            scale,
            KV_HEADS * HEAD_DIM,
            HEAD_DIM,
            PAGE,
            KEYS,
            MASKED=False,
        )
        attended, total, peak = _sweep(
            query,
            position,
            attended,
            total,
            peak,
            k_head,
            v_head,
            table,
            tl.maximum(first, plain),
            last,
            stop,
            scale,
            KV_HEADS * HEAD_DIM,
            HEAD_DIM,
            PAGE,
            KEYS,
            MASKED=True,
        )
        if SPLIT:
            target = joined + (head * parts + part)[:, None] * HEAD_DIM + place
            tl.store(target, attended / total[:, None], mask=live[:, None])
            tl.store(weights + head * parts + part, peak + tl.log2(total), mask=live)
        else:
            local = kv_head * GROUP + row % GROUP
            source = gate + (token.to(tl.int64) * gate_token + local * gate_head)[:, None] + place
            opened = tl.sigmoid(tl.load(source, mask=live[:, None], other=0.0).to(tl.float32))
            value = attended / total[:, None] * opened
            tl.store(output + head[:, None] * HEAD_DIM + place, value.to(output.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["parts"])
def _join_kernel(
    joined,
    weights,
    gate,
    output,
    parts,
    gate_token,
    gate_head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some columns of one head's output from its parts, gated. What a part without keys holds is not read."""
    head = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, PARTS)
    inside = place < HEAD_DIM
    release_next(PDL)
    wait_for_previous(PDL)
    weight = tl.load(weights + head * parts + part, mask=part < parts, other=float("-inf"))
    source = gate + head // HEADS * gate_token + head % HEADS * gate_head + place
    opened = tl.sigmoid(tl.load(source, mask=inside, other=0.0).to(tl.float32))
    some = weight > float("-inf")
    share = tl.where(some, tl.exp2(weight - tl.max(weight, 0)), 0.0)
    parted = joined + (head * parts + part)[:, None] * HEAD_DIM + place[None, :]
    values = tl.load(parted, mask=some[:, None] & inside[None, :], other=0.0)
    value = tl.sum(values * share[:, None], 0) / tl.sum(share, 0) * opened
    tl.store(output + head * HEAD_DIM + place, value.to(output.dtype.element_ty), mask=inside)
