"""The causal convolution of a prefill."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.state_rows import Stores
from tokenspeed.kernels.triton.ragged import piece, search_steps, slots

TOKENS = 64
"""Tokens of a program, taken TILE at a time so that the weights are loaded once."""
TILE = 16
CHANNELS = 256
"""Channels of a program."""
WARPS = 4


def causal_conv_prefill(
    x: Tensor,
    weight: Tensor,
    windows: Tensor,
    starts: Tensor,
    read_rows: Tensor,
    write_rows: Tensor,
    stores: Stores | None,
) -> Tensor:
    tokens, channels = x.shape
    sequences, keep = read_rows.shape[0], weight.shape[1] - 1
    output = x.new_empty(tokens, channels)
    if sequences == 0:
        return output
    blocks = triton.cdiv(channels, CHANNELS)
    # The windows as rows of columns, like x. No window is read after this launch.
    history = windows.new_empty(sequences, keep, channels)
    sizes = {"KEEP": keep, "CHANNELS": channels, "BLOCK": CHANNELS}
    _history_kernel[(blocks, sequences)](windows, read_rows, history, **sizes)
    steps = search_steps(sequences)
    _causal_conv_kernel[(blocks, slots(tokens, sequences, TOKENS))](
        x,
        weight,
        history,
        starts,
        output,
        sequences,
        steps,
        STRIDE=x.stride(0),
        TOKENS=TOKENS,
        TILE=TILE,
        num_warps=WARPS,
        **sizes,
    )
    sizes |= {"STRIDE": x.stride(0), "PLACES": triton.next_power_of_2(keep)}
    _windows_kernel[(blocks, sequences)](x, history, windows, starts, starts, starts, write_rows, ENDS=True, **sizes)
    if stores is not None and stores.rows.shape[0]:
        listed = (stores.sequences, stores.counts, stores.rows)
        _windows_kernel[(blocks, stores.rows.shape[0])](x, history, windows, starts, *listed, ENDS=False, **sizes)
    return output


@triton.jit(do_not_specialize=["read_rows"])
def _history_kernel(windows, read_rows, history, KEEP: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    sequence = tl.program_id(1).to(tl.int64)
    row = tl.load(read_rows + sequence)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    alive = channel < CHANNELS
    for place in tl.static_range(KEEP):
        known = alive & (row != 0)
        column = tl.load(windows + (row * CHANNELS + channel) * KEEP + place, mask=known, other=0.0)
        tl.store(history + (sequence * KEEP + place) * CHANNELS + channel, column, mask=alive)


@triton.jit(do_not_specialize=["starts", "sequences", "steps"])
def _causal_conv_kernel(
    x,
    weight,
    history,
    starts,
    output,
    sequences,
    steps,
    STRIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    KEEP: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program is TOKENS tokens of one sequence, or none, and BLOCK channels."""
    sequence, start, begin, end = piece(tl.program_id(1), starts, sequences, steps, TOKENS)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    alive = (channel < CHANNELS)[None, :]
    past = history + sequence.to(tl.int64) * (KEEP * CHANNELS) + channel[None, :]
    taps = ()
    for tap in tl.static_range(KEEP + 1):
        scale = tl.load(weight + channel * (KEEP + 1) + tap, mask=channel < CHANNELS, other=0.0)
        taps = taps + (scale.to(tl.float32)[None, :],)  # type: ignore[assignment]  # noqa: RUF005
    for first in range(begin, end, TILE):
        token = (first + tl.arange(0, TILE))[:, None]
        inside = (token < end) & alive
        total = tl.zeros([TILE, BLOCK], dtype=tl.float32)
        for tap in tl.static_range(KEEP + 1):
            source = token - KEEP + tap
            column = tl.load(x + source * STRIDE + channel[None, :], mask=inside & (source >= start), other=0.0)
            total += column.to(tl.float32) * taps[tap]
        if first < start + KEEP:
            for tap in tl.static_range(KEEP):
                source = token - KEEP + tap
                column = tl.load(past + (source - start + KEEP) * CHANNELS, mask=inside & (source < start), other=0.0)
                total += column.to(tl.float32) * taps[tap]
        total = total / (1 + tl.exp(-total))
        tl.store(output + token * CHANNELS + channel[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["starts", "owners", "counts", "rows"])
def _windows_kernel(
    x,
    history,
    windows,
    starts,
    owners,
    counts,
    rows,
    ENDS: tl.constexpr,
    STRIDE: tl.constexpr,
    KEEP: tl.constexpr,
    PLACES: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The window after the first `counts` tokens of sequence `owners`, or (ENDS) after all of each sequence."""
    index = tl.program_id(1)
    sequence = index.to(tl.int64) if ENDS else tl.load(owners + index)
    start = tl.load(starts + sequence)
    end = tl.load(starts + sequence + 1) if ENDS else start + tl.load(counts + index)
    row = tl.load(rows + index)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    place = tl.arange(0, PLACES)[None, :]
    alive = (channel < CHANNELS) & (place < KEEP) & (row != 0)
    source = end - KEEP + place
    new = tl.load(x + source * STRIDE + channel, mask=alive & (source >= start), other=0.0)
    past = history + (sequence * KEEP + source - start + KEEP) * CHANNELS + channel
    old = tl.load(past, mask=alive & (source < start), other=0.0)
    column = tl.where(source < start, old.to(tl.float32), new.to(tl.float32))
    tl.store(windows + (row * CHANNELS + channel) * KEEP + place, column, mask=alive)
