"""The gated delta rule over a prefill, in chunks of CHUNK tokens that never cross a sequence's end.

Within a chunk, with G the running sum of g, r the inverse length of a key and u the corrections (see the reference),

    (1 + A)·u = beta·(v − exp(G)·r·S₀·k),   A_ij = beta_i·r_i·r_j·exp(G_i − G_j)·(k_i·k_j) for j < i
    S = exp(G_last)·S₀ + Σ_j exp(G_last − G_j)·r_j·u_j·k_jᵀ
    o_i = exp(G_i)·S₀·q_i + Σ_{j≤i} exp(G_i − G_j)·(q_i·r_j·k_j)·u_j

1. `_inverse_kernel`, chunks and heads in parallel: (1 + A)⁻¹ · beta, G and r.
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
STATE_WARPS, STATE_STAGES = 4, 3
OUTPUT_WARPS, OUTPUT_STAGES = 4, 1
OUTPUT_VALUES = 64
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
    gates = matrices.new_empty(chunks, heads, 2, chunk)
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
    if stores is not None and stores.rows.shape[0] == 0:
        stores = None
    count = 0 if stores is None else stores.rows.shape[0]
    marks = starts.new_full((chunks if count else 1,), -1)
    kept = matrices.new_empty(count, heads, value_dim, key_dim)
    if stores is not None:
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
        MARKED=stores is not None,
        **launch,
    )
    if stores is not None:
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
def _key_rows(qkv, left, head, CHUNK: tl.constexpr, STRIDE: tl.constexpr, KEY_DIM: tl.constexpr, KEY: tl.constexpr):
    """[CHUNK, KEY] of one of the heads of the queries or, behind them, of the keys, from a chunk's first token `qkv`
    on; zero where no token is `left`."""
    row, key = tl.arange(0, CHUNK), tl.arange(0, KEY)
    mask = (row < left)[:, None] & (key < KEY_DIM)[None, :]
    return tl.load(qkv + row[:, None] * STRIDE + (head * KEY_DIM + key)[None, :], mask=mask, other=0.0)


@triton.jit
def _inverse_length(x):
    """[n, dim] → [n]"""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + _LENGTH_EPS)


@triton.jit(do_not_specialize=["starts", "sequences", "steps"])
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
    row, left = tl.arange(0, CHUNK), (end - begin).to(tl.int32)
    alive = row < left
    qkv += begin * STRIDE
    a += begin * A_STRIDE + head
    b += begin * B_STRIDE + head
    pace = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    # A token past the end neither decays nor changes the matrix: g = beta = 0.
    decay = softplus(tl.load(a + row * A_STRIDE, mask=alive, other=0.0).to(tl.float32) + bias)
    total = tl.cumsum(tl.where(alive, pace * decay, 0.0), 0)
    beta = tl.where(alive, sigmoid(tl.load(b + row * B_STRIDE, mask=alive, other=0.0).to(tl.float32)), 0.0)
    k = _key_rows(qkv, left, KEY_HEADS + head // (HEADS // KEY_HEADS), CHUNK, STRIDE, KEY_DIM, KEY)
    scale = _inverse_length(k)
    chunk = slot.to(tl.int64) * HEADS + head
    place = gates + chunk * (2 * CHUNK) + row
    tl.store(place, total)
    tl.store(place + CHUNK, scale)

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
    inverse *= beta[None, :]
    place = inverses + chunk * ((2 if SPLIT else 1) * CHUNK * CHUNK) + row[:, None] * CHUNK + row[None, :]
    if SPLIT:
        high, low = _split(inverse)
        tl.store(place, high)
        tl.store(place + CHUNK * CHUNK, low)
    else:
        tl.store(place, inverse)


@triton.jit(do_not_specialize=["starts", "owners", "counts"])
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
    left,
    head,
    value,
    CHUNK: tl.constexpr,
    STRIDE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Of a chunk with `left` tokens after `state` [values, KEY]: the corrections [values, CHUNK], and G, r and k. qkv
    is its first token; `inverses` and `gates` are its head's.

    Everything is laid with the values as rows: a product's result is then the next one's left operand where it lies.
    """
    SPLIT: tl.constexpr = qkv.dtype.element_ty != tl.float32
    row = tl.arange(0, CHUNK)
    k = _key_rows(qkv, left, KEY_HEADS + head // (HEADS // KEY_HEADS), CHUNK, STRIDE, KEY_DIM, KEY)
    column = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    mask = (row < left)[:, None] & (value < VALUE_DIM)[None, :]
    v = tl.load(qkv + row[:, None] * STRIDE + column[None, :], mask=mask, other=0.0)
    total, scale = tl.load(gates + row), tl.load(gates + CHUNK + row)
    place = inverses + row[:, None] * CHUNK + row[None, :]
    inverse = tl.load(place)

    nothing = tl.zeros([value.shape[0], CHUNK], dtype=tl.float32)
    known = _product(state, tl.trans(k), nothing)
    correction = dot(tl.trans(v), tl.trans(inverse), nothing)
    known *= -(tl.exp(total) * scale)[None, :]
    if SPLIT:
        low = tl.load(place + CHUNK * CHUNK)
        correction = dot(tl.trans(v), tl.trans(low), correction)
        correction = dot(known.to(tl.bfloat16), tl.trans(low), correction)
    correction = _product(known, tl.trans(inverse), correction)
    return correction, total, scale, k


@triton.jit(do_not_specialize=["starts", "write_rows"])
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
    PARTS: tl.constexpr = 2 if qkv.dtype.element_ty != tl.float32 else 1
    head, sequence = tl.program_id(0) // BLOCKS, tl.program_id(1).to(tl.int64)
    value = tl.program_id(0) % BLOCKS * VALUES + tl.arange(0, VALUES)
    key, row = tl.arange(0, KEY), tl.arange(0, CHUNK)
    start, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    first, tokens = start // CHUNK + sequence, (end - start).to(tl.int32)
    place = (head * VALUE_DIM + value)[:, None] * KEY_DIM + key[None, :]
    mask = (value < VALUE_DIM)[:, None] & (key < KEY_DIM)[None, :]
    state = tl.load(initial + sequence * SIZE + place, mask=mask, other=0.0)
    turned = (head * VALUE_DIM + value)[:, None] * CHUNK + row[None, :]
    mark = tl.load(marks + first) if MARKED else -1
    for index in range(tl.cdiv(tokens, CHUNK)):
        slot = first + index
        chunk = slot * HEADS + head
        gate = gates + chunk * (2 * CHUNK)
        tl.store(states + slot * SIZE + place, state, mask=mask)
        if MARKED:
            # The next chunk's mark is on its way while this chunk is computed.
            following = tl.load(marks + slot + 1, mask=(index + 1) * CHUNK < tokens, other=-1)
            if mark >= 0:
                tl.store(kept + mark * SIZE + place, state, mask=mask)
            mark = following
        correction, total, scale, k = _corrections(
            qkv + (start + index * CHUNK) * STRIDE, inverses + chunk * (PARTS * CHUNK * CHUNK), gate, state,
            tokens - index * CHUNK, head, value, CHUNK, STRIDE, KEY_HEADS, HEADS, KEY_DIM, KEY, VALUE_DIM,
        )  # fmt: skip
        target = corrections + slot * (HEADS * VALUE_DIM * CHUNK) + turned
        tl.store(target, correction, mask=(value < VALUE_DIM)[:, None])
        last = tl.load(gate + CHUNK - 1)
        faded = correction * (tl.exp(last - total) * scale)[None, :]
        state = _product(faded, k, state * tl.exp(last))
    write = tl.load(write_rows + sequence)
    tl.store(matrices + write * SIZE + place, state, mask=mask & (write != 0))


@triton.jit(do_not_specialize=["starts", "owners", "counts", "rows"])
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
    PARTS: tl.constexpr = 2 if qkv.dtype.element_ty != tl.float32 else 1
    head, store = tl.program_id(0) // BLOCKS, tl.program_id(1)
    value = tl.program_id(0) % BLOCKS * VALUES + tl.arange(0, VALUES)
    key, row = tl.arange(0, KEY), tl.arange(0, CHUNK)
    sequence, count = tl.load(owners + store), tl.load(counts + store)
    slot = _slot_of_store(starts, owners, counts, store, CHUNK)
    stop = (count - 1) % CHUNK
    begin = tl.load(starts + sequence) + count - 1 - stop
    left = (tl.load(starts + sequence + 1) - begin).to(tl.int32)
    place = (head * VALUE_DIM + value)[:, None] * KEY_DIM + key[None, :]
    mask = (value < VALUE_DIM)[:, None] & (key < KEY_DIM)[None, :]
    state = tl.load(kept + tl.load(marks + slot) * SIZE + place, mask=mask, other=0.0)
    chunk = slot * HEADS + head
    gate = gates + chunk * (2 * CHUNK)
    correction, total, scale, k = _corrections(
        qkv + begin * STRIDE, inverses + chunk * (PARTS * CHUNK * CHUNK), gate, state,
        left, head, value, CHUNK, STRIDE, KEY_HEADS, HEADS, KEY_DIM, KEY, VALUE_DIM,
    )  # fmt: skip
    last = tl.load(gate + stop)
    fade = tl.exp(tl.where(row <= stop, last - total, float("-inf"))) * scale
    state = _product(correction * fade[None, :], k, state * tl.exp(last))
    target = tl.load(rows + store)
    tl.store(matrices + target * SIZE + place, state, mask=mask & (target != 0))


@triton.jit(do_not_specialize=["starts", "sequences", "steps"])
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
    left = (end - begin).to(tl.int32)
    qkv += begin * STRIDE
    q = _key_rows(qkv, left, head // (HEADS // KEY_HEADS), CHUNK, STRIDE, KEY_DIM, KEY)
    k = _key_rows(qkv, left, KEY_HEADS + head // (HEADS // KEY_HEADS), CHUNK, STRIDE, KEY_DIM, KEY)
    chunk = slot.to(tl.int64) * HEADS + head
    within = (value < VALUE_DIM)[:, None]
    place = states + chunk * (VALUE_DIM * KEY_DIM) + value[:, None] * KEY_DIM + key[None, :]
    state = tl.load(place, mask=within & (key < KEY_DIM)[None, :], other=0.0)
    place = corrections + chunk * (VALUE_DIM * CHUNK) + value[:, None] * CHUNK + row[None, :]
    correction = tl.load(place, mask=within, other=0.0)
    gates += chunk * (2 * CHUNK)
    total, scale = tl.load(gates + row), tl.load(gates + CHUNK + row)

    result = dot(q, tl.trans(state), tl.zeros([CHUNK, VALUES], dtype=tl.float32)) * tl.exp(total)[:, None]
    weight = tl.exp(tl.where(row[:, None] >= row[None, :], total[:, None] - total[None, :], float("-inf")))
    reads = dot(q, tl.trans(k), tl.zeros([CHUNK, CHUNK], dtype=tl.float32)) * weight * scale[None, :]
    result = dot(reads.to(correction.dtype), tl.trans(correction), result)
    result *= (_inverse_length(q) * KEY_DIM**-0.5)[:, None]
    place = output + begin * (HEADS * VALUE_DIM) + row[:, None] * (HEADS * VALUE_DIM) + head * VALUE_DIM
    tl.store(place + value[None, :], result, mask=(row < left)[:, None] & (value < VALUE_DIM)[None, :])
