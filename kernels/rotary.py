"""Rotary positions (neox halves, on the first part of the head) and the attention layer's input in one operator."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed.kernels.attention import write_kv
from tokenspeed.kernels.norms import gemma_rms_norm
from tokenspeed.kernels.state_rows import compute_dtype


def rotary_table(positions: Tensor, theta: float, rotary_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position · theta^(-2i / rotary_dim).

    The angle is formed in float64: in float32 a position near a million would be off by several hundredths of a radian.

    Args:
        positions: [tokens] int64.
    Returns:
        cos, sin: [tokens, rotary_dim / 2] in promote(float32, dtype).
    """
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float64) / rotary_dim
    angles = positions.to(torch.float64)[:, None] * theta**-exponents
    compute = compute_dtype(dtype)
    return angles.cos().to(compute), angles.sin().to(compute)


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
    """Splits the attention layer's projection, norms q and k over the head (Gemma flavour), rotates them, writes the
    tokens' K and V to their token rows.

    Args:
        qkv: [tokens, heads * 2 * head_dim + 2 * kv_heads * head_dim]: per query head its query and its gate, then the
            keys, then the values.
        q_weight, k_weight: [head_dim].
        cos, sin: [tokens, rotary_dim / 2], of `rotary_table`.
        k_pages, v_pages: [pages, page_size, kv_heads, head_dim], the layer's pages; changed in place.
        rows: [tokens] int64, `page * page_size + offset`; distinct outside page 0, the sink.
    Returns:
        q [tokens, heads, head_dim], contiguous, and gate [tokens, heads, head_dim], a view of qkv; in qkv's type.
    """
    tokens = qkv.shape[0]
    head_dim = q_weight.shape[0]
    queries, keys, values = torch.split(qkv, [heads * 2 * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
    q, gate = queries.view(tokens, heads, 2 * head_dim).chunk(2, dim=-1)
    k = keys.view(tokens, kv_heads, head_dim)
    v = values.view(tokens, kv_heads, head_dim)
    q = _rotate(gemma_rms_norm(q.to(cos.dtype), q_weight, eps), cos, sin).to(qkv.dtype)
    k = _rotate(gemma_rms_norm(k.to(cos.dtype), k_weight, eps), cos, sin).to(qkv.dtype)
    write_kv(k, v, k_pages, v_pages, rows)
    return q, gate


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
