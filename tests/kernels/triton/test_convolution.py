from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tokenspeed.kernels.convolution import causal_conv_prefill as reference
from tokenspeed.kernels.triton.convolution import CHANNELS, causal_conv_prefill

WIDTH, PAD = 4, 3


@dataclass
class Stores:
    sequences: Tensor
    counts: Tensor
    rows: Tensor


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("lengths", "channels", "dtype", "bound"),
    [
        ([1], 40, torch.float32, 1e-6),
        ([200], CHANNELS + 24, torch.float32, 1e-6),
        ([2, 1, 64, 3, 65, 63, 128, 4], 40, torch.float32, 1e-6),
        ([2, 1, 3, 65, 4], 40, torch.bfloat16, 6e-3),  # the interpreter cuts bfloat16 instead of rounding it
    ],
)
def test_against_the_reference(
    lengths: list[int], channels: int, dtype: torch.dtype, bound: float, device: torch.device
) -> None:
    sequences, tokens = len(lengths), sum(lengths)
    # Sequence 0 has no history. 1 and 2 go on from row 5, which 3 overwrites; 3 goes on from the row that 0 writes.
    read = [0, 5, 5, 1, *range(20, 20 + sequences)][:sequences]
    write = [1, 2, 3, 5, 0, *range(30, 30 + sequences)][:sequences]
    counts = [
        (s, c) for s, length in enumerate(lengths) for c in {1, 2, 3, 63, 64, 65, length - 1, length} if 0 < c <= length
    ]
    rows = 40 + len(counts) + 1
    stores = Stores(
        torch.tensor([sequence for sequence, _ in counts], device=device),
        torch.tensor([count for _, count in counts], device=device),
        torch.arange(40, 40 + len(counts), device=device),
    )
    stores.rows[0] = 0  # discarded
    x = torch.randn(tokens, channels + 2 * PAD, device=device).to(dtype)[:, PAD:-PAD]
    weight = torch.randn(channels, WIDTH, device=device).to(dtype)
    windows = torch.full((rows, channels, WIDTH - 1), torch.nan, device=device, dtype=dtype)
    for row in {*read, 1} - {0}:
        windows[row] = torch.randn_like(windows[row])
    starts = torch.tensor([0, *lengths], device=device).cumsum(0)
    reads, writes = (torch.tensor(rows, device=device) for rows in (read, write))
    for kept in (stores, None)[: 1 if tokens > 200 else 2]:
        expected_windows, actual_windows = windows.double(), windows.clone()
        expected = reference(x.double(), weight.double(), expected_windows, starts, reads, writes, kept)
        output = causal_conv_prefill(x, weight, actual_windows, starts, reads, writes, kept)
        assert (output.dtype, output.shape) == (dtype, expected.shape)
        assert error(output, expected) < bound
        for sequence, length in enumerate(lengths):
            token = int(starts[sequence])
            assert error(output[token : token + min(3, length)], expected[token : token + min(3, length)]) < 2 * bound
        assert torch.equal(actual_windows[1:].double().nan_to_num(7), expected_windows[1:].nan_to_num(7))
        assert not actual_windows[[row for row in write if row]].isnan().any()


def test_no_sequences(device: torch.device) -> None:
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    x, windows = torch.empty(0, 8, device=device), torch.empty(2, 8, WIDTH - 1, device=device)
    starts = torch.zeros(1, dtype=torch.int64, device=device)
    output = causal_conv_prefill(x, torch.ones(8, WIDTH, device=device), windows, starts, nothing, nothing, None)
    assert output.shape == (0, 8)
