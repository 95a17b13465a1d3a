"""The gated delta rule: per value head a matrix S [value_dim, key_dim] that decays, is corrected and is read.

    S ← exp(g)·S;   S ← S + beta·(v − S·k)·kᵀ;   o = S·q

with g = −exp(a_log)·softplus(a + dt_bias), beta = sigmoid(b), k and q divided by their length, q times key_dim^-½.
Value head j uses key head j // (value_heads / key_heads).
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels.state_rows import Stores, compute_dtype, gather_rows

LENGTH_EPS = 1e-6


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
    """The recurrence over sequences laid flat, `chunk` tokens at a time.

    All matrices are read before any is written.

    Args:
        qkv: [tokens, 2 * key_heads * key_dim + value_heads * value_dim], queries, keys and values by head, after the
            convolution.
        a, b: [tokens, value_heads].
        a_log, dt_bias: [value_heads].
        matrices: [rows, value_heads, value_dim, key_dim]; changed in place.
        starts: [sequences + 1] int64, prefix sums of the query lengths (each at least 1).
        read_rows: [sequences] int64, the matrix to continue from; row 0 means zero.
        write_rows: [sequences] int64, where the matrix after the last token goes; row 0 discards it.
        stores: matrices to keep from inside the sequences, or None.
        chunk: tokens solved at once, at least 1.
    Returns:
        [tokens, value_heads, value_dim] in qkv's type.
    """
    q, k, v, g, beta = _inputs(qkv, a, b, a_log, dt_bias, matrices.shape)
    bounds = starts.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    chunk = min(chunk, max(lengths))
    counts = [-(-length // chunk) for length in lengths]
    first = [0]  # the chunk that each sequence begins with
    for count in counts:
        first.append(first[-1] + count)

    # Tokens by chunk, [chunks, chunk]; the padding of a sequence's last chunk points at a token of zeros, which neither
    # decays (g = 0) nor changes (k = beta = 0) the matrix.
    tokens = qkv.shape[0]
    index = torch.full((first[-1], chunk), tokens, device=qkv.device)
    places = torch.arange(tokens, device=qkv.device)
    for start, length, begin, count in zip(bounds, lengths, first, counts, strict=False):
        index[begin : begin + count].view(-1)[:length] = places[start : start + length]
    q, k, v = (_by_chunk(x, index) for x in (q, k, v))  # [chunks, heads, chunk, dim]
    g, beta = (_by_chunk(x[..., None], index).squeeze(-1) for x in (g, beta))  # [chunks, value_heads, chunk]
    group = v.shape[1] // k.shape[1]

    # Within a chunk, with G the running sum of g and u_i = beta_i (v_i − S_i⁻·k_i) the correction of token i,
    #   S_i = exp(G_i)·S_0 + Σ_{j≤i} exp(G_i − G_j)·u_j·k_jᵀ
    #   u_i + beta_i Σ_{j<i} exp(G_i − G_j)·(k_i·k_j)·u_j = beta_i·(v_i − exp(G_i)·S_0·k_i)
    # is a triangular system, solved for both terms on the right before S_0 is known.
    total = g.cumsum(-1)
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=qkv.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill_(future, -torch.inf).exp_()
    scores = (k @ k.transpose(-1, -2)).repeat_interleave(group, dim=1)
    reads = (q @ k.transpose(-1, -2)).repeat_interleave(group, dim=1).mul_(decay)
    scores.mul_(decay).mul_(beta[..., None])
    k = k.repeat_interleave(group, dim=1)
    decayed = total.exp()[..., None]
    right = torch.cat((v, k * decayed), dim=-1).mul_(beta[..., None])
    solved = torch.linalg.solve_triangular(scores, right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    q = q.repeat_interleave(group, dim=1) * decayed
    faded = k * (total[..., -1:] - total).exp()[..., None]

    wanted: dict[int, list[tuple[int, int, int]]] = {}  # by chunk of the sequence: store, sequence, tokens of the chunk
    kept: list[Tensor] = []
    if stores is not None:
        kept = [torch.empty(0)] * stores.rows.shape[0]
        pairs = zip(stores.sequences.tolist(), stores.counts.tolist(), strict=True)
        for store, (sequence, count) in enumerate(pairs):
            step = (count - 1) // chunk
            wanted.setdefault(step, []).append((store, sequence, count - step * chunk))

    state = gather_rows(matrices, read_rows).to(v.dtype)
    outputs = torch.empty_like(v)
    for step in range(max(counts)):
        running = [sequence for sequence, count in enumerate(counts) if count > step]
        at = torch.tensor([first[sequence] + step for sequence in running], device=qkv.device)
        every = len(running) == len(counts)
        before = state if every else state[running]
        correction = values[at] - keys[at] @ before.transpose(-1, -2)
        outputs[at] = q[at] @ before.transpose(-1, -2) + reads[at] @ correction
        after = before * decayed[at, :, -1:] + correction.transpose(-1, -2) @ faded[at]
        for store, sequence, count in wanted.get(step, []):
            n, place = first[sequence] + step, running.index(sequence)
            weighted = k[n, :, :count] * decay[n, :, count - 1, :count, None]
            seen = correction[place, :, :count].transpose(-1, -2) @ weighted
            kept[store] = before[place] * decayed[n, :, count - 1, None] + seen
        if every:
            state = after
        else:
            state[running] = after

    matrices[write_rows] = state.to(matrices.dtype)
    if stores is not None and kept:
        matrices[stores.rows] = torch.stack(kept).to(matrices.dtype)
    flat = outputs.transpose(1, 2).reshape(-1, *outputs.shape[1::2])
    return flat[(index.view(-1) < tokens).nonzero()[:, 0]].to(qkv.dtype)


def gated_delta_step(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    matrices: Tensor,
    read_rows: Tensor,
    write_rows: Tensor,
) -> Tensor:
    """`gated_delta_prefill` for one token per sequence.

    Args:
        qkv: [sequences, 2 * key_heads * key_dim + value_heads * value_dim].
        a, b: [sequences, value_heads].
        a_log, dt_bias, matrices, read_rows, write_rows: as there.
    Returns:
        [sequences, value_heads, value_dim] in qkv's type.
    """
    q, k, v, g, beta = _inputs(qkv, a, b, a_log, dt_bias, matrices.shape)
    group = v.shape[1] // k.shape[1]
    if group > 1:
        q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    state = gather_rows(matrices, read_rows).to(v.dtype)
    state.mul_(g.exp_()[..., None, None])
    correction = (v - (state @ k[..., None]).squeeze(-1)).mul_(beta[..., None])
    state.addcmul_(correction[..., None], k[..., None, :])
    matrices[write_rows] = state.to(matrices.dtype)
    return (state @ q[..., None]).squeeze(-1).to(qkv.dtype)


def _inputs(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, shape: torch.Size
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k [tokens, key_heads, key_dim] of unit length (q scaled), v [tokens, value_heads, value_dim], g and beta
    [tokens, value_heads], in `compute_dtype`."""
    _, value_heads, value_dim, key_dim = shape
    qkv = qkv.to(compute_dtype(qkv.dtype))
    value = value_heads * value_dim
    qk, v = torch.split(qkv, [qkv.shape[1] - value, value], dim=-1)
    qk = qk.view(qkv.shape[0], -1, key_dim)
    qk = qk * torch.rsqrt(qk.square().sum(-1, keepdim=True) + LENGTH_EPS)
    q, k = qk.chunk(2, dim=1)
    g = F.softplus(a.to(qkv.dtype) + dt_bias) * -a_log.to(qkv.dtype).exp()
    return q * key_dim**-0.5, k, v.view(-1, value_heads, value_dim), g, b.to(qkv.dtype).sigmoid()


def _by_chunk(x: Tensor, index: Tensor) -> Tensor:
    """[tokens, heads, n] laid out as [chunks, heads, chunk, n]; index `tokens` yields zeros."""
    return F.pad(x, (0, 0, 0, 0, 0, 1))[index].transpose(1, 2)
