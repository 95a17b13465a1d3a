"""One decode step of the gated delta net between its two projections."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed.kernels.convolution import causal_conv_step
from tokenspeed.kernels.delta_rule import gated_delta_step
from tokenspeed.kernels.norms import gated_rms_norm


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
    """Convolution, gated delta rule and gated norm of one token per sequence.

    Rows written are distinct, but for row 0. Apart from row 0 no row may be both read and written in one call: an
    implementation spreads a sequence over programs that share what they read. (The reference reads everything first,
    so here a sequence may write the row it reads.) An engine gives each sequence a ring of two rows or more.

    Args:
        projected: [sequences, channels + value_heads * value_dim + 2 * value_heads]: the raw columns of queries, keys
            and values, the output gate z, then b and a.
        conv_weight: [channels, width], oldest column first.
        a_log, dt_bias: [value_heads].
        norm_weight: [value_dim].
        windows: [rows, channels, width - 1], oldest first; changed in place.
        matrices: [rows, value_heads, value_dim, key_dim]; changed in place.
        read_rows: [sequences] int64, window and matrix to continue from; row 0 means zeros.
        write_rows: [sequences] int64, where those after the token go; row 0 discards them.
        eps: of the output norm.
    Returns:
        [sequences, value_heads * value_dim] in projected's type.
    """
    _, value_heads, value_dim, _ = matrices.shape
    sizes = [conv_weight.shape[0], value_heads * value_dim, value_heads, value_heads]
    qkv, z, b, a = torch.split(projected, sizes, dim=-1)
    qkv = causal_conv_step(qkv, conv_weight, windows, read_rows, write_rows)
    mixed = gated_delta_step(qkv, a, b, a_log, dt_bias, matrices, read_rows, write_rows)
    return gated_rms_norm(mixed, z.reshape(-1, value_heads, value_dim), norm_weight, eps).flatten(1)
