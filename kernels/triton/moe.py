"""Mixture of experts: routing, SwiGLU, and the experts of few tokens, bound by how fast their weights stream by."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.triton.grouped import grouped_mixture
from tokenspeed.kernels.triton.launch import chained, release_next, wait_for_previous

STREAMED_TOKENS = 4
"""Up to so many tokens rarely share an expert: each streams its own. More are grouped by expert."""
TILE = 16384
"""Weight elements in a program of a streamed expert, about; all are in registers at once."""
SWIGLU_COLUMNS = 1024


def route(logits: Tensor, experts_per_token: int) -> tuple[Tensor, Tensor]:
    tokens, count = logits.shape
    weights = torch.empty((tokens, experts_per_token), dtype=torch.float32, device=logits.device)
    experts = torch.empty((tokens, experts_per_token), dtype=torch.int64, device=logits.device)
    if tokens:
        _route_kernel[(tokens,)](
            logits,
            weights,
            experts,
            logits.stride(0),
            EXPERTS=count,
            CHOSEN=experts_per_token,
            BLOCK=triton.next_power_of_2(count),
            WIDE=logits.dtype == torch.float32,
            num_warps=1,
            **chained(logits.device),
        )
    return weights, experts


def swiglu(gate_up: Tensor) -> Tensor:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    inner = gate_up.new_empty(tokens, width)
    if tokens:
        block = min(SWIGLU_COLUMNS, triton.next_power_of_2(width))
        _swiglu_kernel[(tokens, triton.cdiv(width, block))](
            gate_up, inner, gate_up.stride(0), WIDTH=width, BLOCK=block, num_warps=4, **chained(gate_up.device)
        )
    return inner


def mixture(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared_gate_up: Tensor,
    shared_down: Tensor,
    shared_gate: Tensor,
) -> Tensor:
    operands = (x, weights, experts, gate_up, down, shared_gate_up, shared_down, shared_gate)
    if x.shape[0] <= STREAMED_TOKENS:
        return _streamed_mixture(*operands)
    return grouped_mixture(*operands)


def _streamed_mixture(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared_gate_up: Tensor,
    shared_down: Tensor,
    shared_gate: Tensor,
) -> Tensor:
    (tokens, hidden), chosen = x.shape, experts.shape[1]
    width, shared_width = down.shape[2], shared_down.shape[1]
    y = x.new_empty(tokens, hidden)
    if not tokens:
        return y
    inner = x.new_empty(tokens, shared_width + chosen * width)
    block = triton.next_power_of_2(hidden)
    rows = max(1, TILE // (2 * block))
    blocks = triton.cdiv(shared_width, rows) + chosen * triton.cdiv(width, rows)
    _stream_gate_up_kernel[(tokens, blocks)](
        x,
        weights,
        experts,
        gate_up,
        shared_gate_up,
        shared_gate,
        inner,
        x.stride(0),
        HIDDEN=hidden,
        WIDTH=width,
        SHARED_WIDTH=shared_width,
        CHOSEN=chosen,
        ROWS=rows,
        BLOCK=block,
        num_warps=_warps(2 * rows * block),
        **chained(x.device),
    )
    block, slots = triton.next_power_of_2(width), triton.next_power_of_2(chosen)
    _stream_down_kernel[(tokens, hidden)](
        experts,
        down,
        shared_down,
        inner,
        y,
        HIDDEN=hidden,
        WIDTH=width,
        SHARED_WIDTH=shared_width,
        CHOSEN=chosen,
        SLOTS=slots,
        BLOCK=block,
        SHARED_BLOCK=triton.next_power_of_2(shared_width),
        num_warps=_warps(slots * block),
        **chained(x.device),
    )
    return y


def _warps(elements: int) -> int:
    return max(1, min(8, elements // 4096))


@triton.jit(do_not_specialize=["logits_stride"])
def _route_kernel(
    logits,
    weights,
    experts,
    logits_stride,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The experts of one token. An expert's key is an integer in the order of its logit, and of its number where logits
    are equal. A 16-bit logit and the number fit in 32 bits; WIDE keys have 64."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    release_next(PDL)
    value = tl.load(logits + token * logits_stride + expert, mask=expert < EXPERTS, other=float("-inf"))
    value = value.to(tl.float32)
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(value == 0.0, 0, order)
    order = tl.where(value != value, 0x7FFFFFFF, order)
    if WIDE:
        LEAST: tl.constexpr = -(2**63)
        key = order.to(tl.int64) * 4294967296 + (BLOCK - 1 - expert)
    else:
        LEAST: tl.constexpr = -(2**31)
        key = (order & -8192) | (BLOCK - 1 - expert)  # at least 13 low bits of such a logit's float32 are idle
    key = tl.where(expert < EXPERTS, key, LEAST)
    place = tl.full((BLOCK,), CHOSEN, tl.int32)
    for turn in tl.static_range(CHOSEN):
        best = key == tl.max(key, 0)
        place = tl.where(best, turn, place)
        key = tl.where(best, LEAST, key)
    is_chosen = place < CHOSEN
    share = tl.where(is_chosen, tl.exp(value - tl.max(value, 0)), 0.0)
    at = token * CHOSEN + place
    tl.store(weights + at, share / tl.sum(share, 0), mask=is_chosen)
    tl.store(experts + at, expert.to(tl.int64), mask=is_chosen)


@triton.jit
def _swiglu_kernel(gate_up, inner, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """BLOCK columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    wait_for_previous(PDL)
    release_next(PDL)
    at = gate_up + token * stride + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(inner + token * WIDTH + column, result.to(inner.dtype.element_ty), mask=inside)


@triton.jit
def _stream_gate_up_kernel(
    x,
    weights,
    experts,
    gate_up,
    shared_gate_up,
    shared_gate,
    inner,
    x_stride,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED_WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS of one expert's SwiGLU for one token, times the expert's weight.

    inner: [tokens, SHARED_WIDTH + CHOSEN * WIDTH], the shared expert first.
    """
    SHARED_BLOCKS: tl.constexpr = (SHARED_WIDTH + ROWS - 1) // ROWS
    BLOCKS: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    inner += token * (SHARED_WIDTH + CHOSEN * WIDTH)
    # The kernel behind fetches experts before it waits, which is safe because this one waits before it lets that start.
    if block < SHARED_BLOCKS:
        row = block * ROWS + tl.arange(0, ROWS)
        there = row < SHARED_WIDTH
        at = shared_gate_up + row[:, None] * HIDDEN + column
        mask = there[:, None] & inside
        gate = tl.load(at, mask=mask, other=0.0)
        up = tl.load(at + SHARED_WIDTH * HIDDEN, mask=mask, other=0.0)
        share = tl.load(shared_gate + column, mask=inside, other=0.0).to(tl.float32)
        wait_for_previous(PDL)
        release_next(PDL)
        value = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        result = _swiglu_rows(gate, up, value) * tl.sigmoid(tl.sum(value * share, 0))
        tl.store(inner + row, result.to(inner.dtype.element_ty), mask=there)
    else:
        slot = (block - SHARED_BLOCKS) // BLOCKS
        row = (block - SHARED_BLOCKS) % BLOCKS * ROWS + tl.arange(0, ROWS)
        there = row < WIDTH
        wait_for_previous(PDL)
        release_next(PDL)
        expert = tl.load(experts + token * CHOSEN + slot)
        factor = tl.load(weights + token * CHOSEN + slot)
        at = gate_up + expert * (2 * WIDTH * HIDDEN) + row[:, None] * HIDDEN + column
        mask = there[:, None] & inside
        gate = tl.load(at, mask=mask, other=0.0)
        up = tl.load(at + WIDTH * HIDDEN, mask=mask, other=0.0)
        value = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        result = _swiglu_rows(gate, up, value) * factor
        tl.store(inner + SHARED_WIDTH + slot * WIDTH + row, result.to(inner.dtype.element_ty), mask=there)


@triton.jit
def _swiglu_rows(gate, up, value):
    """SiLU(gate · value) · (up · value) of gate, up [rows, columns] and value [columns]."""
    gates = tl.sum(gate.to(tl.float32) * value, 1)
    return gates * tl.sigmoid(gates) * tl.sum(up.to(tl.float32) * value, 1)


@triton.jit
def _stream_down_kernel(
    experts,
    down,
    shared_down,
    inner,
    y,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED_WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One column of one token's output: the sum over its experts, whose `inner` is weighted already."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    slot, depth, shared_depth = tl.arange(0, SLOTS), tl.arange(0, BLOCK), tl.arange(0, SHARED_BLOCK)
    mask = (slot < CHOSEN)[:, None] & (depth < WIDTH)
    shared_mask = shared_depth < SHARED_WIDTH
    # All weights are fetched before the wait. Their addresses come from the kernel before the previous one: it has
    # ended, because the previous one waited for it before it let this one start; only the L1 may not know yet.
    expert = tl.load(experts + token * CHOSEN + slot, mask=slot < CHOSEN, other=0, cache_modifier=".cg")
    routed = tl.load(down + (expert * HIDDEN + column)[:, None] * WIDTH + depth, mask=mask, other=0.0)
    shared = tl.load(shared_down + column * SHARED_WIDTH + shared_depth, mask=shared_mask, other=0.0)
    wait_for_previous(PDL)
    release_next(PDL)
    inner += token * (SHARED_WIDTH + CHOSEN * WIDTH)
    shared_inner = tl.load(inner + shared_depth, mask=shared_mask, other=0.0)
    routed_inner = tl.load(inner + SHARED_WIDTH + slot[:, None] * WIDTH + depth, mask=mask, other=0.0)
    total = tl.sum(tl.sum(routed.to(tl.float32) * routed_inner.to(tl.float32), 1), 0)
    total += tl.sum(shared.to(tl.float32) * shared_inner.to(tl.float32), 0)
    tl.store(y + token * HIDDEN + column, total.to(y.dtype.element_ty))
