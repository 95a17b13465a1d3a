"""The gated delta rule over a prefill, in chunks of CHUNK tokens that never cross a sequence's end.

Within a chunk, with G the running sum of g, r the inverse length of a key and u the corrections (see the reference),

    (1 + A)·u = beta·(v − exp(G)·r·S₀·k),   A_ij = beta_i·r_i·r_j·exp(G_i − G_j)·(k_i·k_j) for j < i
    S = exp(G_last)·S₀ + Σ_j exp(G_last − G_j)·r_j·u_j·k_jᵀ
    o_i = exp(G_i)·S₀·q_i + Σ_{j≤i} exp(G_i − G_j)·(q_i·r_j·k_j)·u_j

1. `_inverse_kernel`, chunks and heads in parallel: (1 + A)⁻¹, G, beta and r.
2. `_state_kernel`, in order of a sequence's chunks, for blocks of the value dimension: S₀ and u of every chunk.
3. `_output_kernel`, chunks and heads in parallel: o. `_store_kernel`: the states to keep from inside.

Keys, queries and values enter the products as they come, in bfloat16; the matrix, the inverse and what is multiplied by
them are float32 and enter as the sum of two bfloat16 numbers, so that a state is as exact as in float32. Only what
leads to an output alone is rounded to bfloat16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.delta_rule import LENGTH_EPS
from tokenspeed.kernels.state_rows import Stores
from tokenspeed.kernels.triton.delta_net import sigmoid, softplus
from tokenspeed.kernels.triton.launch import dot
from tokenspeed.kernels.triton.ragged import first_slot, gather_rows, piece, search_steps, slots

VALUES = 64
"""Rows of the matrix of one program of the state kernel: the tensor cores' smallest height."""
INVERSE_WARPS, INVERSE_STAGES = 4, 1
STATE_WARPS, STATE_STAGES = 4, 2
OUTPUT_WARPS, OUTPUT_STAGES = 8, 1
OUTPUT_VALUES = 128
"""Columns of the output of one program."""

_LENGTH_EPS = tl.constexpr(LENGTH_EPS)


def gated_delta_prefill(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    matrices: Tensor,
    starts: Tensor,
    read_rows: Tensor,
    write_rows: Tensor,
    stores: Stores | None,
    chunk: int = 64,
) -> Tensor:
    """As the reference; `chunk` is a power of two from 16 on."""
    _, heads, value_dim, key_dim = matrices.shape
    tokens, sequences = qkv.shape[0], read_rows.shape[0]
    output = qkv.new_empty(tokens, heads, value_dim)
    if sequences == 0:
        return output
    chunks, steps = slots(tokens, sequences, chunk), search_steps(sequences)
    sizes = {
        "STRIDE": qkv.stride(0),
        "CHUNK": chunk,
        "KEY_HEADS": (qkv.shape[1] - heads * value_dim) // (2 * key_dim),
        "HEADS": heads,
        "KEY_DIM": key_dim,
        "KEY": max(16, triton.next_power_of_2(key_dim)),
    }
    values = {"VALUE_DIM": value_dim, "VALUES": min(VALUES, max(16, triton.next_power_of_2(value_dim)))}
    blocks = triton.cdiv(value_dim, values["VALUES"])

    parts = 1 if qkv.dtype == torch.float32 else 2  # a float32 number, or the two that it is split into
    inverses = qkv.new_empty(chunks, heads, parts, chunk, chunk)
    gates = matrices.new_empty(chunks, heads, 3, chunk)
    _inverse_kernel[(heads, chunks)](
        qkv,
        a,
        b,
        a_log,
        dt_bias,
        starts,
        inverses,
        gates,
        sequences,
        steps,
        A_STRIDE=a.stride(0),
        B_STRIDE=b.stride(0),
        LEVELS=chunk.bit_length() - 1,
        **sizes,
        num_warps=INVERSE_WARPS,
        num_stages=INVERSE_STAGES,
    )

    initial = gather_rows(matrices, read_rows)  # no matrix is read after this
    states = qkv.new_empty(chunks, heads, value_dim, key_dim)
    corrections = qkv.new_empty(chunks, heads, value_dim, chunk)
    count = 0 if stores is None else stores.rows.shape[0]
    marks = starts.new_full((chunks if count else 1,), -1)
    kept = matrices.new_empty(count, heads, value_dim, key_dim)
    if count:
        _mark_kernel[(count,)](starts, stores.sequences, stores.counts, marks, CHUNK=chunk)
    launch = {**sizes, **values, "num_warps": STATE_WARPS, "num_stages": STATE_STAGES}
    _state_kernel[(heads * blocks, sequences)](
        qkv,
        starts,
        inverses,
        gates,
        initial,
        states,
        corrections,
        marks,
        kept,
        write_rows,
        matrices,
        MARKED=count > 0,
        **launch,
    )
    if count:
        listed = (stores.sequences, stores.counts, stores.rows)
        _store_kernel[(heads * blocks, count)](qkv, starts, inverses, gates, marks, kept, *listed, matrices, **launch)
    values["VALUES"] = min(OUTPUT_VALUES, max(16, triton.next_power_of_2(value_dim)))
    _output_kernel[(heads * triton.cdiv(value_dim, values["VALUES"]), chunks)](
        qkv,
        starts,
        gates,
        states,
        corrections,
        output,
        sequences,
        steps,
        **sizes,
        **values,
        num_warps=OUTPUT_WARPS,
        num_stages=OUTPUT_STAGES,
    )
    return output


@triton.jit
def _split(x):
    """x, float32, as two bfloat16 numbers whose sum it is to 16 bits."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _product(x, y, total):
    """total + x · y for a float32 x and a y as it was loaded."""
    if y.dtype == tl.float32:
        return dot(x, y, total)
    else:
        high, low = _split(x)
        return dot(high, y, dot(low, y, total))


@triton.jit
def _square_product(x, y, SPLIT: tl.constexpr):
    """x · y for two float32 squares."""
    total = tl.zeros_like(x)
    if SPLIT:
        high, low = _split(y)
        return _product(x, high, dot(x.to(tl.bfloat16), low, total))
    else:
        return dot(x, y, total)


@triton.jit
def _key_rows(qkv, token, end, head, STRIDE: tl.constexpr, KEY_DIM: tl.constexpr, KEY: tl.constexpr):
    """[tokens, KEY] of one of the heads of the queries or, behind them, of the keys; zero from token `end` on."""
    key = tl.arange(0, KEY)
    mask = (token < end)[:, None] & (key < KEY_DIM)[None, :]
    return tl.load(qkv + token[:, None] * STRIDE + (head * KEY_DIM + key)[None, :], mask=mask, other=0.0)


@triton.jit
def _inverse_length(x):
    """[n, dim] → [n]"""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + _LENGTH_EPS)


@triton.jit(do_not_specialize=["sequences", "steps"])
def _inverse_kernel(
    qkv,
    a,
    b,
    a_log,
    dt_bias,
    starts,
    inverses,
    gates,
    sequences,
    steps,
    A_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    LEVELS: tl.constexpr,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY: tl.constexpr,
):
    head, slot = tl.program_id(0), tl.program_id(1)
    _, _, begin, end = piece(slot, starts, sequences, steps, CHUNK)
    if begin >= end:
        return
    SPLIT: tl.constexpr = qkv.dtype.element_ty != tl.float32
    row = tl.arange(0, CHUNK)
    token = begin + row
    alive = token < end
    pace = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    # A token past the end neither decays nor changes the matrix: g = beta = 0.
    decay = softplus(tl.load(a + token * A_STRIDE + head, mask=alive, other=0.0).to(tl.float32) + bias)
    total = tl.cumsum(tl.where(alive, pace * decay, 0.0), 0)
    beta = tl.where(alive, sigmoid(tl.load(b + token * B_STRIDE + head, mask=alive, other=0.0).to(tl.float32)), 0.0)
    k = _key_rows(qkv, token, end, KEY_HEADS + head // (HEADS // KEY_HEADS), STRIDE, KEY_DIM, KEY)
    scale = _inverse_length(k)
    place = gates + (slot.to(tl.int64) * HEADS + head) * (3 * CHUNK) + row
    tl.store(place, total)
    tl.store(place + CHUNK, beta)
    tl.store(place + 2 * CHUNK, scale)

    # Only differences of G are raised, and only those of the past: they are at most 0.
    past = row[:, None] > row[None, :]
    weight = tl.exp(tl.where(past, total[:, None] - total[None, :], float("-inf")))
    scores = dot(k, tl.trans(k), tl.zeros([CHUNK, CHUNK], dtype=tl.float32))
    scores *= weight * (beta * scale)[:, None] * scale[None, :]
    # The inverse of a block [P 0; C Q] is [P⁻¹ 0; −Q⁻¹·C·P⁻¹ Q⁻¹]: from blocks of one, whose inverse is 1, to all.
    joined = (row[:, None] // 2) == (row[None, :] // 2)
    inverse = tl.where(row[:, None] == row[None, :], 1.0, tl.where(joined, -scores, 0.0))
    for level in tl.static_range(1, LEVELS):
        apart = (row[:, None] >> level) != (row[None, :] >> level)
        joined = (row[:, None] >> (level + 1)) == (row[None, :] >> (level + 1))
        corner = tl.where(joined & apart, scores, 0.0)
        inverse -= _square_product(_square_product(inverse, corner, SPLIT), inverse, SPLIT)
    place = (slot.to(tl.int64) * HEADS + head) * ((2 if SPLIT else 1) * CHUNK * CHUNK)
    place += row[:, None] * CHUNK + row[None, :]
    if SPLIT:
        high, low = _split(inverse)
        tl.store(inverses + place, high)
        tl.store(inverses + place + CHUNK * CHUNK, low)
    else:
        tl.store(inverses + place, inverse)


@triton.jit
def _mark_kernel(starts, owners, counts, marks, CHUNK: tl.constexpr):
    """marks[slot] becomes one of the stores inside that chunk, whichever: its place in `kept` will hold the state
    before the chunk."""
    store = tl.program_id(0)
    slot = _slot_of_store(starts, owners, counts, store, CHUNK)
    tl.store(marks + slot, store)


@triton.jit
def _slot_of_store(starts, owners, counts, store, CHUNK: tl.constexpr):
    return first_slot(starts, tl.load(owners + store), CHUNK) + (tl.load(counts + store) - 1) // CHUNK


@triton.jit
def _corrections(
    qkv,
    inverses,
    gates,
    state,
    token,
    end,
    head,
    slot,
    value,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Of a chunk after `state` [values, KEY]: the corrections [values, CHUNK], and G, r and k.

    Everything is laid with the values as rows: a product's result is then the next one's left operand where it lies.
    """
    k = _key_rows(qkv, token, end, KEY_HEADS + head // (HEADS // KEY_HEADS), STRIDE, KEY_DIM, KEY)
    column = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    mask = (value < VALUE_DIM)[:, None] & (token < end)[None, :]
    v = tl.load(qkv + column[:, None] + token[None, :] * STRIDE, mask=mask, other=0.0).to(tl.float32)
    row = tl.arange(0, CHUNK)
    chunk = slot.to(tl.int64) * HEADS + head
    total = tl.load(gates + chunk * (3 * CHUNK) + row)
    beta = tl.load(gates + chunk * (3 * CHUNK) + CHUNK + row)
    scale = tl.load(gates + chunk * (3 * CHUNK) + 2 * CHUNK + row)
    SPLIT: tl.constexpr = qkv.dtype.element_ty != tl.float32
    place = chunk * ((2 if SPLIT else 1) * CHUNK * CHUNK) + row[:, None] * CHUNK + row[None, :]
    inverse = tl.trans(tl.load(inverses + place))

    nothing = tl.zeros([value.shape[0], CHUNK], dtype=tl.float32)
    known = _product(state, tl.trans(k), nothing)
    right = beta[None, :] * (v - (tl.exp(total) * scale)[None, :] * known)
    correction = _product(right, inverse, nothing)
    if SPLIT:
        low = tl.trans(tl.load(inverses + place + CHUNK * CHUNK))
        correction = dot(right.to(tl.bfloat16), low, correction)
    return correction, total, scale, k


@triton.jit
def _state_kernel(
    qkv,
    starts,
    inverses,
    gates,
    initial,
    states,
    corrections,
    marks,
    kept,
    write_rows,
    matrices,
    MARKED: tl.constexpr,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
):
    BLOCKS: tl.constexpr = (VALUE_DIM + VALUES - 1) // VALUES
    SIZE: tl.constexpr = HEADS * VALUE_DIM * KEY_DIM
    head, sequence = tl.program_id(0) // BLOCKS, tl.program_id(1).to(tl.int64)
    value = tl.program_id(0) % BLOCKS * VALUES + tl.arange(0, VALUES)
    key, row = tl.arange(0, KEY), tl.arange(0, CHUNK)
    start, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    first = start // CHUNK + sequence
    place = (head * VALUE_DIM + value)[:, None] * KEY_DIM + key[None, :]
    mask = (value < VALUE_DIM)[:, None] & (key < KEY_DIM)[None, :]
    state = tl.load(initial + sequence * SIZE + place, mask=mask, other=0.0)
    turned = (head * VALUE_DIM + value)[:, None] * CHUNK + row[None, :]
    for index in range(tl.cdiv(end - start, CHUNK)):
        slot = first + index
        token = start + index * CHUNK + row
        tl.store(states + slot * SIZE + place, state, mask=mask)
        if MARKED:
            mark = tl.load(marks + slot)
            if mark >= 0:
                tl.store(kept + mark * SIZE + place, state, mask=mask)
        correction, total, scale, k = _corrections(
            qkv, inverses, gates, state, token, end, head, slot, value,
            STRIDE, CHUNK, KEY_HEADS, HEADS, KEY_DIM, KEY, VALUE_DIM,
        )  # fmt: skip
        tl.store(
            corrections + slot * (HEADS * VALUE_DIM * CHUNK) + turned, correction, mask=(value < VALUE_DIM)[:, None]
        )
        last = tl.load(gates + (slot * HEADS + head) * (3 * CHUNK) + CHUNK - 1)
        faded = correction * (tl.exp(last - total) * scale)[None, :]
        state = _product(faded, k, state * tl.exp(last))
    write = tl.load(write_rows + sequence)
    tl.store(matrices + write * SIZE + place, state, mask=mask & (write != 0))


@triton.jit
def _store_kernel(
    qkv,
    starts,
    inverses,
    gates,
    marks,
    kept,
    owners,
    counts,
    rows,
    matrices,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
):
    """One step of the state kernel from the state before the store's chunk, but only to the store's last token."""
    BLOCKS: tl.constexpr = (VALUE_DIM + VALUES - 1) // VALUES
    SIZE: tl.constexpr = HEADS * VALUE_DIM * KEY_DIM
    head, store = tl.program_id(0) // BLOCKS, tl.program_id(1)
    value = tl.program_id(0) % BLOCKS * VALUES + tl.arange(0, VALUES)
    key, row = tl.arange(0, KEY), tl.arange(0, CHUNK)
    sequence, count = tl.load(owners + store), tl.load(counts + store)
    slot = _slot_of_store(starts, owners, counts, store, CHUNK)
    stop = (count - 1) % CHUNK
    token = tl.load(starts + sequence) + count - 1 - stop + row
    place = (head * VALUE_DIM + value)[:, None] * KEY_DIM + key[None, :]
    mask = (value < VALUE_DIM)[:, None] & (key < KEY_DIM)[None, :]
    state = tl.load(kept + tl.load(marks + slot) * SIZE + place, mask=mask, other=0.0)
    correction, total, scale, k = _corrections(
        qkv, inverses, gates, state, token, tl.load(starts + sequence + 1), head, slot, value,
        STRIDE, CHUNK, KEY_HEADS, HEADS, KEY_DIM, KEY, VALUE_DIM,
    )  # fmt: skip
    last = tl.load(gates + (slot * HEADS + head) * (3 * CHUNK) + stop)
    fade = tl.exp(tl.where(row <= stop, last - total, float("-inf"))) * scale
    state = _product(correction * fade[None, :], k, state * tl.exp(last))
    target = tl.load(rows + store)
    tl.store(matrices + target * SIZE + place, state, mask=mask & (target != 0))


@triton.jit(do_not_specialize=["sequences", "steps"])
def _output_kernel(
    qkv,
    starts,
    gates,
    states,
    corrections,
    output,
    sequences,
    steps,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
):
    BLOCKS: tl.constexpr = (VALUE_DIM + VALUES - 1) // VALUES
    head, slot = tl.program_id(0) // BLOCKS, tl.program_id(1)
    _, _, begin, end = piece(slot, starts, sequences, steps, CHUNK)
    if begin >= end:
        return
    value = tl.program_id(0) % BLOCKS * VALUES + tl.arange(0, VALUES)
    key, row = tl.arange(0, KEY), tl.arange(0, CHUNK)
    token = begin + row
    k = _key_rows(qkv, token, end, KEY_HEADS + head // (HEADS // KEY_HEADS), STRIDE, KEY_DIM, KEY)
    q = _key_rows(qkv, token, end, head // (HEADS // KEY_HEADS), STRIDE, KEY_DIM, KEY)
    chunk = slot.to(tl.int64) * HEADS + head
    within = (value < VALUE_DIM)[:, None]
    place = (chunk * VALUE_DIM + value[:, None]) * KEY_DIM + key[None, :]
    state = tl.load(states + place, mask=within & (key < KEY_DIM)[None, :], other=0.0)
    place = (chunk * VALUE_DIM + value[:, None]) * CHUNK + row[None, :]
    correction = tl.load(corrections + place, mask=within, other=0.0)
    total = tl.load(gates + chunk * (3 * CHUNK) + row)
    scale = tl.load(gates + chunk * (3 * CHUNK) + 2 * CHUNK + row)

    result = dot(q, tl.trans(state), tl.zeros([CHUNK, VALUES], dtype=tl.float32)) * tl.exp(total)[:, None]
    weight = tl.exp(tl.where(row[:, None] >= row[None, :], total[:, None] - total[None, :], float("-inf")))
    reads = dot(q, tl.trans(k), tl.zeros([CHUNK, CHUNK], dtype=tl.float32)) * weight * scale[None, :]
    result = dot(reads.to(correction.dtype), tl.trans(correction), result)
    result *= (_inverse_length(q) * KEY_DIM**-0.5)[:, None]
    place = (token[:, None] * HEADS + head) * VALUE_DIM + value[None, :]
    tl.store(output + place, result, mask=(token < end)[:, None] & (value < VALUE_DIM)[None, :])
