"""Dense products of one token, bound by how fast the weight streams by; torch's own for more."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.state_rows import compute_dtype
from tokenspeed.kernels.triton.launch import chained, release_next, wait_for_previous
from tokenspeed.kernels.triton.norms import add_rms_norm

NARROW = 512
"""A product with so few outputs is over before matrix units are fed: each token streams the weight, which stays in the
cache, and norms its input by itself, which costs less than a launch."""
NARROW_TOKENS = 16
"""Up to so many tokens, that is."""
ROWS = 4
"""Outputs of one program."""
WARP_ELEMENTS = 2048
"""Weight elements of one warp. More programs in flight, of fewer or of less hungry threads, were slower: the memory
likes its requests long."""
BLOCK = 8192
"""Columns of a program's tile at most; a tile is in registers as a whole."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return _product(x, weight, x.dtype)


def vocabulary_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return _product(hidden, weight, compute_dtype(hidden.dtype))


def add_norm_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    (tokens, hidden), outputs = x.shape, weight.shape[0]
    block = triton.next_power_of_2(hidden)
    if not (0 < tokens <= NARROW_TOKENS and outputs <= NARROW) or block > BLOCK:
        normed, residual = add_rms_norm(x, residual, norm_weight, eps)
        return linear(normed, weight), normed, residual
    projected, normed, total = x.new_empty(tokens, outputs), torch.empty_like(x), torch.empty_like(x)
    _add_norm_linear_kernel[(triton.cdiv(outputs, ROWS), tokens)](
        x,
        residual,
        norm_weight,
        weight,
        projected,
        normed,
        total,
        outputs,
        x.stride(0),
        residual.stride(0),
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        ROWS=ROWS,
        num_warps=_warps(ROWS * block),
        **chained(x.device),
    )
    return projected, normed, total


def _product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    (tokens, depth), outputs = x.shape, weight.shape[0]
    if tokens != 1 and not (0 < tokens <= NARROW_TOKENS and outputs <= NARROW):
        return F.linear(x, weight).to(dtype)
    y = torch.empty((tokens, outputs), dtype=dtype, device=x.device)
    block = min(triton.next_power_of_2(depth), BLOCK)
    _stream_kernel[(triton.cdiv(outputs, ROWS), tokens)](
        x,
        weight,
        y,
        outputs,
        x.stride(0),
        DEPTH=depth,
        BLOCK=block,
        ROWS=ROWS,
        num_warps=_warps(ROWS * block),
        **chained(x.device),
    )
    return y


def _warps(elements: int) -> int:
    return max(1, min(8, elements // WARP_ELEMENTS))


@triton.jit(do_not_specialize=["outputs", "x_stride"])
def _stream_kernel(
    x, weight, y, outputs, x_stride, DEPTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):
    """ROWS outputs of one token's product. Weights are fetched one block ahead, the first before the input is there."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = (row < outputs)[:, None]
    at = weight + row.to(tl.int64)[:, None] * DEPTH + column
    ahead = tl.load(at, mask=there & (column < DEPTH), other=0.0)
    release_next(PDL)
    wait_for_previous(PDL)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.static_range(0, DEPTH, BLOCK):
        tile = ahead
        if start + BLOCK < DEPTH:
            ahead = tl.load(at + start + BLOCK, mask=there & (start + BLOCK + column < DEPTH), other=0.0)
        value = tl.load(x + token * x_stride + start + column, mask=start + column < DEPTH, other=0.0)
        total += tile.to(tl.float32) * value.to(tl.float32)
    tl.store(y + token * outputs + row, tl.sum(total, 1).to(y.dtype.element_ty), mask=row < outputs)


@triton.jit(do_not_specialize=["outputs", "x_stride", "residual_stride"])
def _add_norm_linear_kernel(
    x,
    residual,
    norm_weight,
    weight,
    projected,
    normed,
    total,
    outputs,
    x_stride,
    residual_stride,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS outputs for one token. The norm's root mean square is one factor of all outputs, so every program sums the
    squares beside its products and applies it last; the first also stores the norm and the sum."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    tile = tl.load(
        weight + row.to(tl.int64)[:, None] * HIDDEN + column, mask=(row < outputs)[:, None] & inside, other=0.0
    )
    scale = 1.0 + tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    release_next(PDL)
    wait_for_previous(PDL)
    kind = total.dtype.element_ty
    value = tl.load(residual + token * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = value.to(kind).to(tl.float32)
    scaled = value * scale
    y = tl.sum(tile.to(tl.float32) * scaled, 1)
    factor = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    tl.store(projected + token * outputs + row, (y * factor).to(projected.dtype.element_ty), mask=row < outputs)
    if tl.program_id(0) == 0:
        tl.store(total + token * HIDDEN + column, value.to(kind), mask=inside)
        tl.store(normed + token * HIDDEN + column, (scaled * factor).to(kind), mask=inside)
