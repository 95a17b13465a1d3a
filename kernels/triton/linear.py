"""Dense products for few tokens, bound by how fast the weight streams by; torch's own for many."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.state_rows import compute_dtype
from tokenspeed.kernels.triton.launch import chained, dot, release_next, wait_for_previous
from tokenspeed.kernels.triton.norms import add_rms_norm

STREAMED_TOKENS = 64
"""Up to so many tokens a product streams the weight; with more, matrix units are worth feeding."""
FUSED_TOKENS = 2
"""Up to so many tokens every program norms the input by itself, which costs less than a launch."""
TILE = 4096
"""Weight elements in a program of a single token's product, at most; all are in registers at once."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return _product(x, weight, x.dtype)


def vocabulary_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return _product(hidden, weight, compute_dtype(hidden.dtype))


def add_norm_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, hidden = x.shape
    if not 0 < tokens <= FUSED_TOKENS:
        normed, residual = add_rms_norm(x, residual, norm_weight, eps)
        return linear(normed, weight), normed, residual
    outputs = weight.shape[0]
    projected, normed, total = x.new_empty(tokens, outputs), torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(hidden)
    rows = _rows(block, outputs)
    _add_norm_linear_kernel[(triton.cdiv(outputs, rows), tokens)](
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
        ROWS=rows,
        num_warps=_warps(block * rows),
        **chained(x.device),
    )
    return projected, normed, total


def _product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    tokens, depth = x.shape
    outputs = weight.shape[0]
    if tokens > STREAMED_TOKENS or tokens == 0 or x.dtype != weight.dtype:
        return F.linear(x, weight).to(dtype)
    y = torch.empty((tokens, outputs), dtype=dtype, device=x.device)
    if tokens == 1:
        block = min(triton.next_power_of_2(depth), TILE)
        rows = _rows(block, outputs)
        _stream_kernel[(triton.cdiv(outputs, rows),)](
            x,
            weight,
            y,
            outputs,
            DEPTH=depth,
            BLOCK=block,
            ROWS=rows,
            num_warps=_warps(block * rows),
            **chained(x.device),
        )
        return y
    # Narrow weights get narrow tiles, so that there are programs enough to keep the memory busy.
    rows = 64 if outputs >= 64 * 264 else 32 if outputs >= 32 * 264 else 16
    _stream_dot_kernel[(triton.cdiv(outputs, rows),)](
        x,
        weight,
        y,
        tokens,
        outputs,
        x.stride(0),
        DEPTH=depth,
        BLOCK=min(256, triton.next_power_of_2(depth)),
        ROWS=rows,
        TOKENS=max(16, triton.next_power_of_2(tokens)),
        num_warps=4,
        num_stages=4,
        **chained(x.device),
    )
    return y


def _rows(block: int, outputs: int) -> int:
    """Outputs of one program, for a tile of `block` columns: fewer where there would be too few programs."""
    most = max(1, TILE // block)
    return max(1, min(most, triton.next_power_of_2(outputs) // 512))


def _warps(elements: int) -> int:
    return max(1, min(8, elements // 1024))


@triton.jit(do_not_specialize=["outputs"])
def _stream_kernel(
    x, weight, y, outputs, DEPTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):
    """ROWS outputs of one token's product. Weights are fetched one block ahead, the first before the input is there."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
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
        value = tl.load(x + start + column, mask=start + column < DEPTH, other=0.0)
        total += tile.to(tl.float32) * value.to(tl.float32)
    tl.store(y + row, tl.sum(total, 1).to(y.dtype.element_ty), mask=row < outputs)


@triton.jit(do_not_specialize=["tokens", "outputs", "x_stride"])
def _stream_dot_kernel(
    x,
    weight,
    y,
    tokens,
    outputs,
    x_stride,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS outputs of all tokens' product, TOKENS or fewer."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    token = tl.arange(0, TOKENS)
    at = weight + row.to(tl.int64)[:, None] * DEPTH + column
    release_next(PDL)
    wait_for_previous(PDL)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, DEPTH, BLOCK):
        inside = start + column < DEPTH
        tile = tl.load(at + start, mask=(row < outputs)[:, None] & inside, other=0.0)
        value = tl.load(
            x + token[None, :].to(tl.int64) * x_stride + (start + column)[:, None],
            mask=(token < tokens)[None, :] & inside[:, None],
            other=0.0,
        )
        total = dot(tile, value, total)
    tl.store(
        y + token[None, :].to(tl.int64) * outputs + row[:, None],
        total.to(y.dtype.element_ty),
        mask=(token < tokens)[None, :] & (row < outputs)[:, None],
    )


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
    """ROWS outputs for one token. Every program norms the token; the first also stores the norm and the sum."""
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
    unit = value * tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    norm = (unit * scale).to(kind)
    if tl.program_id(0) == 0:
        tl.store(total + token * HIDDEN + column, value.to(kind), mask=inside)
        tl.store(normed + token * HIDDEN + column, norm, mask=inside)
    y = tl.sum(tile.to(tl.float32) * norm.to(tl.float32), 1)
    tl.store(projected + token * outputs + row, y.to(projected.dtype.element_ty), mask=row < outputs)
