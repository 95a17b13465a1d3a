"""The gated delta net's decode step, in one launch, and its output norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.delta_rule import LENGTH_EPS
from tokenspeed.kernels.triton.launch import chained, release_next, wait_for_previous

STEP_WARPS = 4
"""Warps of a program of the step: at 128 x 128 each thread holds 64 elements of the matrix."""
NORM_ROWS = 32
"""Heads normed by one program of `gated_rms_norm`."""

_LENGTH_EPS = tl.constexpr(LENGTH_EPS)


def delta_net_step(
    projected: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    windows: Tensor,
    matrices: Tensor,
    read_rows: Tensor,
    write_rows: Tensor,
    eps: float,
) -> Tensor:
    sequences = projected.shape[0]
    _, value_heads, value_dim, key_dim = matrices.shape
    channels, width = conv_weight.shape
    key = triton.next_power_of_2(key_dim)
    output = projected.new_empty(sequences, value_heads * value_dim)
    if sequences == 0:
        return output
    _delta_net_step_kernel[(value_heads, sequences)](
        projected,
        conv_weight,
        a_log,
        dt_bias,
        norm_weight,
        windows,
        matrices,
        read_rows,
        write_rows,
        output,
        eps,
        STRIDE=projected.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        TAPS=triton.next_power_of_2(width),
        KEY_HEADS=(channels - value_heads * value_dim) // (2 * key_dim),
        VALUE_HEADS=value_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        VALUE=triton.next_power_of_2(value_dim),
        PARTS=max(1, key // 32),
        LANES=min(32, key),
        num_warps=STEP_WARPS,
        **chained(projected.device),
    )
    return output


@triton.jit(do_not_specialize=["read_rows", "write_rows"])
def _delta_net_step_kernel(
    projected,
    conv_weight,
    a_log,
    dt_bias,
    norm_weight,
    windows,
    matrices,
    read_rows,
    write_rows,
    output,
    eps,
    STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program is a value head of a sequence. Its key head's columns are convolved by each program of the group; the
    group's first keeps their window.

    The matrix is a tile [VALUE, PARTS, LANES] with key = part * LANES + lane: eight threads then read 128 bytes in a
    row, and a sum over the keys is one over registers and three exchanges between threads. Queries and keys are divided
    by their lengths only where they have been summed over, and the new matrix is read as the old one and its
    correction are, S'·q = decay·S·q + correction·(k·q), so that no sum over the keys waits for another.
    """
    KEY: tl.constexpr = PARTS * LANES
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    SIZE: tl.constexpr = VALUE_HEADS * VALUE_DIM * KEY_DIM
    WINDOW: tl.constexpr = CHANNELS * (WIDTH - 1)
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    key, value = tl.arange(0, KEY), tl.arange(0, VALUE)
    key_alive, value_alive = key < KEY_DIM, value < VALUE_DIM
    q_channel = head // GROUP * KEY_DIM + key
    k_channel = q_channel + KEY_HEADS * KEY_DIM
    v_channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    q_taps = _taps(conv_weight, q_channel, key_alive, WIDTH, TAPS)
    k_taps = _taps(conv_weight, k_channel, key_alive, WIDTH, TAPS)
    v_taps = _taps(conv_weight, v_channel, value_alive, WIDTH, TAPS)
    scale = tl.load(norm_weight + value, mask=value_alive, other=0.0).to(tl.float32)
    pace, bias = tl.exp(tl.load(a_log + head).to(tl.float32)), tl.load(dt_bias + head).to(tl.float32)

    # The state is older than the step, so it is on its way before the projection is there.
    read = tl.load(read_rows + sequence, cache_modifier=".cg")
    write = tl.load(write_rows + sequence, cache_modifier=".cg")
    known, kept = read != 0, write != 0
    column = tl.arange(0, PARTS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    place = (head * VALUE_DIM + value[:, None, None]) * KEY_DIM + column
    inside = value_alive[:, None, None] & (column < KEY_DIM)
    matrix = tl.load(matrices + read * SIZE + place, mask=inside & known, other=0.0, cache_modifier=".cg")
    matrix = matrix.to(tl.float32)
    old, new = windows + read * WINDOW, windows + write * WINDOW
    q_past = _past(old, q_channel, key_alive & known, WIDTH, TAPS)
    k_past = _past(old, k_channel, key_alive & known, WIDTH, TAPS)
    v_past = _past(old, v_channel, value_alive & known, WIDTH, TAPS)
    release_next(PDL)
    wait_for_previous(PDL)

    x = projected + sequence * STRIDE
    kept_here = kept & (head % GROUP == 0)
    q = _convolve(x, q_taps, q_past, new, q_channel, key_alive, kept_here, WIDTH, TAPS)
    k = _convolve(x, k_taps, k_past, new, k_channel, key_alive, kept_here, WIDTH, TAPS)
    v = _convolve(x, v_taps, v_past, new, v_channel, value_alive, kept, WIDTH, TAPS)
    gate = tl.load(x + CHANNELS + head * VALUE_DIM + value, mask=value_alive, other=0.0).to(tl.float32)
    rates = x + CHANNELS + VALUE_HEADS * VALUE_DIM + head
    beta = sigmoid(tl.load(rates).to(tl.float32))
    decay = tl.exp(-pace * softplus(tl.load(rates + VALUE_HEADS).to(tl.float32) + bias))

    qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, _add_each)
    q_scale = tl.rsqrt(qq + _LENGTH_EPS) * KEY_DIM**-0.5
    k_scale = tl.rsqrt(kk + _LENGTH_EPS)
    q, k = tl.reshape(q, [PARTS, LANES])[None, :, :], tl.reshape(k, [PARTS, LANES])[None, :, :]
    seen, read_out = tl.sum(tl.sum(matrix * k, 1), 1), tl.sum(tl.sum(matrix * q, 1), 1)
    correction = beta * (v - decay * k_scale * seen)
    o = decay * q_scale * read_out + correction * (q_scale * k_scale * qk)
    o *= tl.rsqrt(tl.sum(o * o, 0) / VALUE_DIM + eps) * scale * gate * sigmoid(gate)
    at = sequence * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + value
    tl.store(output + at, o, mask=value_alive)
    matrix = decay * matrix + (correction * k_scale)[:, None, None] * k
    tl.store(matrices + write * SIZE + place, matrix, mask=inside & kept)


@triton.jit
def _add_each(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def _taps(weight, channel, alive, WIDTH: tl.constexpr, TAPS: tl.constexpr):
    """Those of the window's columns [channels, TAPS], oldest first, and of the new one [channels]."""
    tap = tl.arange(0, TAPS)[None, :]
    past = tl.load(weight + channel[:, None] * WIDTH + tap, mask=alive[:, None] & (tap < WIDTH - 1), other=0.0)
    last = tl.load(weight + channel * WIDTH + WIDTH - 1, mask=alive, other=0.0)
    return past.to(tl.float32), last.to(tl.float32)


@triton.jit
def _past(window, channel, known, WIDTH: tl.constexpr, TAPS: tl.constexpr):
    """A window's columns [channels, TAPS], oldest first, zero where not `known`."""
    tap = tl.arange(0, TAPS)[None, :]
    place = window + channel[:, None] * (WIDTH - 1) + tap
    return tl.load(place, mask=known[:, None] & (tap < WIDTH - 1), other=0.0, cache_modifier=".cg")


@triton.jit
def _convolve(x, taps, columns, new, channel, alive, kept, WIDTH: tl.constexpr, TAPS: tl.constexpr):
    """SiLU of the window's columns and the new one times `taps`; all but the oldest become the new window."""
    KEEP: tl.constexpr = WIDTH - 1
    past, last = taps
    tap = tl.arange(0, TAPS)[None, :]
    place = channel[:, None] * KEEP + tap
    inside = alive[:, None] & (tap < KEEP)
    column = tl.load(x + channel, mask=alive, other=0.0)
    tl.store(new + place - 1, columns, mask=inside & (tap > 0) & kept)
    tl.store(new + channel * KEEP + KEEP - 1, column, mask=alive & kept)
    total = tl.sum(columns.to(tl.float32) * past, 1) + column.to(tl.float32) * last
    return total * sigmoid(total)


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)) with a small relative error where it is small: a slow decay is applied many thousand times.

    log(1 + e) is 2·atanh(e / (2 + e)), whose argument is at most 1/3 here; eight terms of the series reach float32.
    """
    e = tl.exp(-tl.abs(x))
    s = e / (2 + e)
    t = s * s
    series = 1 / 13 + t * (1 / 15)
    series = 1 / 9 + t * (1 / 11 + t * series)
    series = 1 / 5 + t * (1 / 7 + t * series)
    series = 1 + t * (1 / 3 + t * series)
    return tl.maximum(x, 0.0) + 2 * s * series


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    size = x.shape[-1]
    output = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if output.numel() == 0:
        return output
    heads = x.shape[-2] if x.dim() > 1 else 1
    x, gate = x.reshape(-1, heads, size), gate.reshape(-1, heads, size)
    rows = x.shape[0] * heads
    _gated_rms_norm_kernel[(triton.cdiv(rows, NORM_ROWS),)](
        x,
        gate,
        weight,
        output,
        eps,
        rows,
        X_STRIDE=x.stride(0),
        X_HEAD=x.stride(1),
        GATE_STRIDE=gate.stride(0),
        GATE_HEAD=gate.stride(1),
        HEADS=heads,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        ROWS=NORM_ROWS,
    )
    return output


@triton.jit(do_not_specialize=["rows"])
def _gated_rms_norm_kernel(
    x,
    gate,
    weight,
    output,
    eps,
    rows,
    X_STRIDE: tl.constexpr,
    X_HEAD: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    GATE_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    token, head = (row // HEADS)[:, None], (row % HEADS)[:, None]
    mask = (row < rows)[:, None] & (column < SIZE)[None, :]
    values = tl.load(x + token * X_STRIDE + head * X_HEAD + column[None, :], mask=mask, other=0.0).to(tl.float32)
    gates = tl.load(gate + token * GATE_STRIDE + head * GATE_HEAD + column[None, :], mask=mask, other=0.0)
    gates = gates.to(tl.float32)
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)[:, None] * scale[None, :] * gates * sigmoid(gates)
    tl.store(output + row[:, None] * SIZE + column[None, :], values, mask=mask)
