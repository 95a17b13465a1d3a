"""Attention over KV pages.

Pages are [pages, page_size, kv_heads, head_dim]; token row `page * page_size + offset`. Query head h uses KV head
h // (heads / kv_heads); scores are scaled by head_dim^-½.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels.state_rows import compute_dtype

QUERY_BLOCK = 512  # queries scored at once, which bounds the mask to QUERY_BLOCK × length


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, rows: Tensor) -> None:
    """Writes the tokens' K and V to their token rows.

    Args:
        k, v: [tokens, kv_heads, head_dim].
        k_pages, v_pages: the layer's pages; changed in place.
        rows: [tokens] int64; distinct outside page 0, the sink.
    """
    k_pages.view(-1, *k.shape[1:])[rows] = k.to(k_pages.dtype)
    v_pages.view(-1, *v.shape[1:])[rows] = v.to(v_pages.dtype)


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
    """Causal, gated attention of sequences laid flat; a query at position p sees positions 0 … p of its page table.

    Args:
        q, gate: [tokens, heads, head_dim].
        page_table: [sequences, pages] int64; entries past the length may be anything valid.
        positions: [tokens] int64; consecutive within a sequence, ending at its length - 1.
        starts: [sequences + 1] int64, prefix sums of the query lengths.
        lengths: [sequences] int64, each sequence's length with these tokens.
        longest: an upper bound of `lengths`.
        bounds: per sequence its query length and its length, where the host knows them.
    Returns:
        attention · sigmoid(gate), heads joined: [tokens, heads * head_dim] in q's type.
    """
    output = torch.empty_like(q, dtype=compute_dtype(q.dtype))
    if bounds is None:
        bounds = list(zip(starts.diff().tolist(), lengths.tolist(), strict=True))
    end = 0
    for sequence, (count, length) in enumerate(bounds):
        first, end = end, end + count
        k, v = _gather(k_pages, v_pages, page_table[sequence : sequence + 1], length, q.dtype)
        keys = torch.arange(length, device=q.device)
        for start in range(first, end, QUERY_BLOCK):
            block = slice(start, min(start + QUERY_BLOCK, end))
            seen = keys <= positions[block, None]
            output[block] = _attend(q[block].transpose(0, 1)[None], k, v, seen)[0].transpose(0, 1)
    return gated(output, gate)


def attention_decode(
    q: Tensor,
    gate: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    longest: int,
) -> Tensor:
    """Gated attention of one query per sequence over the positions 0 … length - 1 of its page table.

    Args:
        q, gate: [sequences, heads, head_dim].
        page_table: [sequences, pages] int64; entries past the length may be anything valid.
        lengths: [sequences] int64, at least 1.
        longest: an upper bound of `lengths`.
    Returns:
        attention · sigmoid(gate), heads joined: [sequences, heads * head_dim] in q's type.
    """
    sequences, heads, head_dim = q.shape
    kv_heads = k_pages.shape[2]
    longest = min(longest, page_table.shape[1] * k_pages.shape[1])
    if sequences == 1:
        k, v = _gather(k_pages, v_pages, page_table, int(lengths), q.dtype)
        seen = None
    else:
        k, v = _gather(k_pages, v_pages, page_table, longest, q.dtype, lengths)
        seen = (torch.arange(longest, device=q.device) < lengths[:, None])[:, None, None]
    # The query heads of one KV head stand as queries, so that K and V are not repeated.
    grouped = q.reshape(sequences, kv_heads, heads // kv_heads, head_dim)
    return gated(_attend(grouped, k, v, seen).reshape(q.shape), gate)


def gated(attended: Tensor, gate: Tensor) -> Tensor:
    """attended · sigmoid(gate), heads joined, in the gate's type. Both are [tokens, heads, head_dim]."""
    return (attended * gate.to(attended.dtype).sigmoid()).to(gate.dtype).flatten(1)


def _gather(
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    length: int,
    dtype: torch.dtype,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """K and V of positions 0 … length - 1, [sequences, kv_heads, length, head_dim]. Positions at or past `lengths`
    yield position 0's, which is finite: what stands there in the pool may be NaN, and a masked NaN is still NaN."""
    page_size = k_pages.shape[1]
    positions = torch.arange(length, device=page_table.device)
    rows = page_table[:, positions // page_size] * page_size + positions % page_size
    if lengths is not None:
        rows = torch.where(positions < lengths[:, None], rows, rows[:, :1])
    compute = compute_dtype(dtype)
    k = k_pages.view(-1, *k_pages.shape[2:])[rows]
    v = v_pages.view(-1, *v_pages.shape[2:])[rows]
    return k.transpose(1, 2).to(compute), v.transpose(1, 2).to(compute)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q.to(k.dtype), k, v, attn_mask=seen, enable_gqa=grouped)
