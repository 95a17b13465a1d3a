"""Depthwise causal convolution with SiLU, whose state is the last `width - 1` raw input columns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels.state_rows import Stores, compute_dtype, gather_rows


def causal_conv_prefill(
    x: Tensor,
    weight: Tensor,
    windows: Tensor,
    starts: Tensor,
    read_rows: Tensor,
    write_rows: Tensor,
    stores: Stores | None,
) -> Tensor:
    """SiLU(Σ_w weight[:, w] · column[t - width + 1 + w]) for sequences laid flat, each continued from its window.

    All windows are read before any is written.

    Args:
        x: [tokens, channels], raw columns.
        weight: [channels, width], oldest column first.
        windows: [rows, channels, width - 1], oldest first; changed in place.
        starts: [sequences + 1] int64, prefix sums of the query lengths (each at least 1).
        read_rows: [sequences] int64, the window to continue from; row 0 means zeros.
        write_rows: [sequences] int64, where the window after the last token goes; row 0 discards it.
        stores: windows to keep from inside the sequences, or None.
    Returns:
        [tokens, channels] in x's type.
    """
    tokens, keep = x.shape[0], weight.shape[1] - 1
    lengths = starts[1:] - starts[:-1]
    sequences = lengths.shape[0]
    # Sequence s of `columns` is its `keep` columns of history and then its tokens, from column heads[s] on.
    heads = starts[:-1] + keep * torch.arange(sequences, device=x.device)
    history = gather_rows(windows, read_rows).transpose(1, 2).to(x.dtype)
    window = torch.arange(keep, device=x.device)
    if sequences == 1:
        columns = torch.cat((history[0], x))
    else:
        owner = torch.repeat_interleave(torch.arange(1, sequences + 1, device=x.device), lengths, output_size=tokens)
        places = torch.arange(tokens, device=x.device) + keep * owner
        columns = x.new_empty(tokens + keep * sequences, x.shape[1])
        columns[heads[:, None] + window] = history
        columns[places] = x

    raw = columns.to(compute_dtype(x.dtype))
    taps = weight.to(raw.dtype).unbind(1)
    outputs = raw.shape[0] - keep
    total = raw[:outputs] * taps[0]
    for offset, tap in enumerate(taps[1:], start=1):
        total.addcmul_(raw[offset : offset + outputs], tap)
    if sequences > 1:
        total = total[places - keep]

    def keep_windows(rows: Tensor, ends: Tensor) -> None:
        windows[rows] = columns[ends[:, None] + window].transpose(1, 2).to(windows.dtype)

    keep_windows(write_rows, heads + lengths)
    if stores is not None:
        keep_windows(stores.rows, heads[stores.sequences] + stores.counts)
    return F.silu(total).to(x.dtype)


def causal_conv_step(x: Tensor, weight: Tensor, windows: Tensor, read_rows: Tensor, write_rows: Tensor) -> Tensor:
    """`causal_conv_prefill` for one token per sequence.

    Args:
        x: [sequences, channels].
        weight, windows, read_rows, write_rows: as there.
    Returns:
        [sequences, channels] in x's type.
    """
    columns = torch.cat((gather_rows(windows, read_rows), x[:, :, None].to(windows.dtype)), dim=-1)
    windows[write_rows] = columns[:, :, 1:]
    raw = columns.to(compute_dtype(x.dtype))
    return F.silu((raw * weight).sum(-1)).to(x.dtype)
