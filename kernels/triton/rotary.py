"""The rotary table, and the attention layer's input: norm, rotation and the write of K and V in one kernel."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.triton.launch import chained, release_next, wait_for_previous

TABLE_ELEMENTS = 256  # of the table in a program
FEW_TOKENS = 64  # up to here a program and a warp for each head of each token; above, tiles of tokens
TOKEN_TILE, TILE_WARPS = 8, 4


def rotary_table(positions: Tensor, theta: float, rotary_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    tokens, half = positions.shape[0], rotary_dim // 2
    cos, sin = torch.empty(2, tokens, half, dtype=torch.float32, device=positions.device)
    if tokens:
        _rotary_table_kernel[(triton.cdiv(tokens * half, TABLE_ELEMENTS),)](
            positions,
            _frequencies(theta, rotary_dim, positions.device),
            cos,
            sin,
            tokens * half,
            HALF=half,
            BLOCK=TABLE_ELEMENTS,
            num_warps=4,
            **chained(positions.device),
        )
    return cos, sin


@cache
def _frequencies(theta: float, rotary_dim: int, device: torch.device) -> Tensor:
    """[rotary_dim / 2] float64. The first call for a device copies from the host, so it may not be inside a capture."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    return (theta**-exponents).to(device)


def qk_norm_rope_write(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    tokens, head_dim = qkv.shape[0], q_weight.shape[0]
    q = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    tile, warps = (1, 1) if tokens <= FEW_TOKENS else (TOKEN_TILE, TILE_WARPS)
    if tokens:
        _qk_norm_rope_write_kernel[(triton.cdiv(tokens, tile), heads + 2 * kv_heads)](
            qkv,
            q_weight,
            k_weight,
            cos,
            sin,
            q,
            k_pages,
            v_pages,
            rows,
            tokens,
            qkv.stride(0),
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            HALF=cos.shape[1],
            TILE=tile,
            num_warps=warps,
            **chained(qkv.device),
        )
    return q, qkv[:, : heads * 2 * head_dim].view(tokens, heads, 2 * head_dim)[..., head_dim:]


@triton.jit(do_not_specialize=["elements"], do_not_specialize_on_alignment=["positions"])
def _rotary_table_kernel(
    positions,
    frequencies,
    cos,
    sin,
    elements,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Element i of the flat table is frequency i % HALF at token i // HALF."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < elements
    frequency = tl.load(frequencies + element % HALF, mask=inside, other=0.0)
    release_next(PDL)
    wait_for_previous(PDL)
    position = tl.load(positions + element // HALF, mask=inside, other=0)
    angle = position.to(tl.float64) * frequency
    # Whole turns go in float64, which leaves the slow reduction of far angles inside cos and sin unused.
    angle -= tl.floor(angle * 0.15915494309189535 + 0.5) * 6.283185307179586
    tl.store(cos + element, tl.cos(angle).to(tl.float32), mask=inside)
    tl.store(sin + element, tl.sin(angle).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["rows"])
def _qk_norm_rope_write_kernel(
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    q,
    k_pages,
    v_pages,
    rows,
    tokens,
    qkv_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of TILE tokens; heads count the queries, then the keys, then the values. HALF is a power of two."""
    token = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    head = tl.program_id(1)
    place = tl.arange(0, HEAD_DIM)[None, :]
    rotated = place < 2 * HALF
    partner = tl.where(rotated, place ^ HALF, place)
    # Runs of HALF elements trade places, so a partner is loaded as widely as the element itself.
    partner = tl.max_contiguous(tl.multiple_of(partner, [1, HALF]), [1, HALF])
    live = token < tokens
    kind = q.dtype.element_ty
    if head < HEADS:
        weight = q_weight
        source = qkv + head * 2 * HEAD_DIM
    else:
        weight = k_weight
        source = qkv + (HEADS + head) * HEAD_DIM
    scale = 1.0 + tl.load(weight + place).to(tl.float32)
    partner_scale = 1.0 + tl.load(weight + partner).to(tl.float32)
    release_next(PDL)
    wait_for_previous(PDL)
    source += token * qkv_stride
    value = tl.load(source + place, mask=live, other=0.0)
    if head < HEADS + KV_HEADS:
        value = value.to(tl.float32)
        other = tl.load(source + partner, mask=live & rotated, other=0.0).to(tl.float32)
        turn = token * HALF + place % HALF
        c = tl.load(cos + turn, mask=live & rotated, other=1.0)
        s = tl.load(sin + turn, mask=live & rotated, other=0.0)
        size = tl.rsqrt(tl.sum(value * value, 1)[:, None] / HEAD_DIM + eps)
        other = tl.where(place < HALF, -other, other) * partner_scale
        value = ((value * scale * c + other * s) * size).to(kind)
    if head < HEADS:
        tl.store(q + (token * HEADS + head) * HEAD_DIM + place, value.to(kind), mask=live)
    else:
        row = tl.load(rows + token, mask=live, other=0)
        if head < HEADS + KV_HEADS:
            target = k_pages + (head - HEADS) * HEAD_DIM
        else:
            target = v_pages + (head - HEADS - KV_HEADS) * HEAD_DIM
        tl.store(target + row * (KV_HEADS * HEAD_DIM) + place, value.to(target.dtype.element_ty), mask=live)
