from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tokenspeed.kernels.convolution import causal_conv_prefill, causal_conv_step

CHANNELS, WIDTH = 5, 4


def walk(columns: list[Tensor], weight: Tensor, window: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and windows after each of a sequence's columns, one multiplication at a time."""
    history = [window[:, place] for place in range(WIDTH - 1)]
    outputs, windows = [], []
    for column in columns:
        history.append(column)
        output = torch.zeros(CHANNELS, dtype=torch.float64)
        for channel in range(CHANNELS):
            total = sum(float(history[-WIDTH + tap][channel] * weight[channel, tap]) for tap in range(WIDTH))
            output[channel] = total / (1 + math.exp(-total))
        outputs.append(output)
        windows.append(torch.stack(history[1 - WIDTH :], dim=1))
    return outputs, windows


def setup(rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    weight = torch.randn(CHANNELS, WIDTH, dtype=torch.float64)
    windows = torch.randn(rows, CHANNELS, WIDTH - 1, dtype=torch.float64)
    windows[0] = torch.nan
    # Columns as the model has them: a slice of a wider projection.
    return torch.randn(tokens, CHANNELS + 3, dtype=torch.float64)[:, 1 : CHANNELS + 1], weight, windows


@pytest.mark.parametrize("lengths", [[1], [9], [1, 2, 3, 4, 5], [5, 1, 1, 7, 2, 1, 3], [3, 3, 3, 3, 3]])
def test_prefill_against_a_walk(lengths: list[int], ragged: Callable[[list[int]], object]) -> None:
    batch = ragged(lengths)
    x, weight, windows = setup(batch.rows, batch.tokens)
    before = windows.clone()
    output = causal_conv_prefill(x, weight, windows, batch.starts, batch.read, batch.write, batch.stores)
    touched = {0, *batch.write.tolist(), *batch.stores.rows.tolist()}
    store = 40
    for sequence, length in enumerate(lengths):
        start, read, write = int(batch.starts[sequence]), int(batch.read[sequence]), int(batch.write[sequence])
        window = before[read] if read else torch.zeros_like(before[0])
        outputs, kept = walk(list(x[start : start + length]), weight, window)
        torch.testing.assert_close(output[start : start + length], torch.stack(outputs))
        for window in kept:
            assert torch.equal(windows[store], window)
            store += 1
        if write:
            assert torch.equal(windows[write], kept[-1])
    for row in set(range(batch.rows)) - touched:
        assert torch.equal(windows[row], before[row])


def test_step_against_a_walk(ragged: Callable[[list[int]], object]) -> None:
    batch = ragged([1] * 6)
    x, weight, windows = setup(batch.rows, 6)
    before = windows.clone()
    output = causal_conv_step(x, weight, windows, batch.read, batch.write)
    for sequence, (read, write) in enumerate(zip(batch.read.tolist(), batch.write.tolist(), strict=True)):
        window = before[read] if read else torch.zeros_like(before[0])
        outputs, kept = walk([x[sequence]], weight, window)
        torch.testing.assert_close(output[sequence], outputs[0])
        if write:
            assert torch.equal(windows[write], kept[0])
    for row in set(range(batch.rows)) - {0, *batch.write.tolist()}:
        assert torch.equal(windows[row], before[row])


def test_bfloat16_keeps_raw_columns_and_sums_in_float32() -> None:
    x = torch.randn(7, CHANNELS).bfloat16()
    weight, windows = torch.randn(CHANNELS, WIDTH).bfloat16(), torch.zeros(3, CHANNELS, WIDTH - 1).bfloat16()
    starts, row = torch.tensor([0, 7]), torch.tensor([1])
    output = causal_conv_prefill(x, weight, windows, starts, torch.tensor([0]), row, None)
    assert output.dtype == torch.bfloat16
    assert torch.equal(windows[1], x[-3:].T)
    outputs, _ = walk(list(x.double()), weight.double(), torch.zeros(CHANNELS, WIDTH - 1))
    torch.testing.assert_close(output, torch.stack(outputs).bfloat16(), rtol=2**-8, atol=0)
