"""Norms over the last axis, a program for each token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.triton.launch import chained, release_next, wait_for_previous


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0]:
        _launch(rows, rows, weight, normed, normed, eps, add=False)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normed, total = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    rows, residuals = x.reshape(-1, x.shape[-1]), residual.reshape(-1, x.shape[-1])
    if rows.shape[0]:
        _launch(rows, residuals, weight, normed, total, eps, add=True)
    return normed, total


def _launch(x: Tensor, residual: Tensor, weight: Tensor, normed: Tensor, total: Tensor, eps: float, add: bool) -> None:
    tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    _add_norm_kernel[(tokens,)](
        x,
        residual,
        weight,
        normed,
        total,
        x.stride(0),
        residual.stride(0),
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        ADD=add,
        num_warps=max(1, min(8, block // 256)),
        **chained(x.device),
    )


@triton.jit(do_not_specialize=["x_stride", "residual_stride"])
def _add_norm_kernel(
    x,
    residual,
    weight,
    normed,
    total,
    x_stride,
    residual_stride,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """The norm (Gemma flavour) of a token's sum; without ADD, of x alone, and `total` is left alone."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    scale = 1.0 + tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    release_next(PDL)
    wait_for_previous(PDL)
    kind = normed.dtype.element_ty
    value = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + token * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        value = value.to(kind).to(tl.float32)
        tl.store(total + token * HIDDEN + column, value.to(kind), mask=inside)
    unit = value * tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    tl.store(normed + token * HIDDEN + column, (unit * scale).to(kind), mask=inside)
