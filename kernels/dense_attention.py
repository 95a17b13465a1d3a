"""Prefill attention through cuDNN, which knows neither pages nor a causal mask over earlier keys, and plans by shape.

A sequence's pages are gathered, and its queries attend twice: to what was there before them, without a mask, and to
themselves, causally. Two softmaxes over disjoint keys are joined by their logsumexps: the second one's share of the sum
is sigmoid(difference).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed.kernels.attention import gated


def serves(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether cuDNN attends in such heads on a device."""
    q, k = (torch.zeros(count, 128, head_dim, dtype=dtype, device=device) for count in (heads, kv_heads))
    try:
        _attend(q.reshape(kv_heads, -1, head_dim), k, k, causal=False)
    except RuntimeError:
        return False
    return True


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
    """Without `bounds` it asks the device for the lengths, which waits for it."""
    heads, head_dim = q.shape[1:]
    page_size, kv_heads = k_pages.shape[1:3]
    group = heads // kv_heads
    if bounds is None:
        bounds = list(zip(starts.diff().tolist(), lengths.tolist(), strict=True))
    output = torch.empty_like(q, dtype=torch.promote_types(torch.float32, q.dtype))
    end = 0
    for sequence, (count, length) in enumerate(bounds):
        first, end = end, end + count
        pages = page_table[sequence, : -(-length // page_size)]
        k, v = (pool.index_select(0, pages).flatten(0, 1)[:length].transpose(0, 1) for pool in (k_pages, v_pages))
        query = q[first:end].transpose(0, 1)
        before = length - count
        own_k, own_v = (x[:, before:].repeat_interleave(group, 0) for x in (k, v))
        attended, weight = _attend(query, own_k, own_v, causal=True)
        if before:
            # Unmasked, the query heads of a KV head are so many more queries of it.
            packed = query.reshape(kv_heads, group * count, head_dim)
            past, past_weight = _attend(packed, k[:, :before], v[:, :before], causal=False)
            share = torch.sigmoid(past_weight.reshape(heads, count) - weight)
            attended = attended.lerp(past.reshape(heads, count, head_dim), share[..., None])
        output[first:end] = attended.transpose(0, 1)
    return gated(output, gate)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """q: [heads, queries, head_dim]; k, v: [heads, keys, head_dim]; if causal, as many keys as queries. Returns the
    output, like q, and the logsumexp of the scaled logits, [heads, queries], both in promote(float32, q's type)."""
    operands = q[None], k[None], v[None]
    if q.device.type != "cuda":
        result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*operands, is_causal=causal)
    else:
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(*operands, None, True, is_causal=causal)
    compute = torch.promote_types(torch.float32, q.dtype)
    return result[0][0].to(compute), result[1].reshape(q.shape[:2]).to(compute)
