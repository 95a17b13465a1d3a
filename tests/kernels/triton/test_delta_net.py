from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed.kernels.delta_net import delta_net_step as reference_step
from tokenspeed.kernels.norms import gated_rms_norm as reference_norm
from tokenspeed.kernels.triton.delta_net import delta_net_step, gated_rms_norm

KEY_HEADS, WIDTH, EPS = 2, 4, 1e-6
SEQUENCES, ROWS, UNUSED = 6, 12, 11
READ, WRITE = [0, 2, 3, 3, 0, 8], [1, 4, 5, 6, 0, 7]  # 2 and 3 fork from row 3; 4 is padding


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


class Layer:
    """A layer's input and memory as a model has them: the projection a slice of a wider tensor, rows that nobody has
    written, the sink and the padding sequence full of NaN."""

    def __init__(self, ratio: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        heads = KEY_HEADS * ratio
        channels, values = 2 * KEY_HEADS * key_dim + heads * value_dim, heads * value_dim
        wide = torch.randn(SEQUENCES, channels + values + 2 * heads + 5, device=device).to(dtype)
        self.projected = wide[:, 3:-2]
        self.projected[4] = torch.nan
        self.weights = (
            torch.randn(channels, WIDTH, device=device).to(dtype),
            torch.randn(heads, device=device),
            torch.randn(heads, device=device) - 3,
            torch.randn(value_dim, device=device).to(dtype),
        )
        self.windows = torch.full((ROWS, channels, WIDTH - 1), torch.nan, device=device, dtype=dtype)
        self.matrices = torch.full((ROWS, heads, value_dim, key_dim), torch.nan, device=device)
        for row in set(READ) - {0}:
            self.windows[row] = torch.randn_like(self.windows[row])
            self.matrices[row] = torch.randn_like(self.matrices[row])
        self.read, self.write = (torch.tensor(rows, device=device) for rows in (READ, WRITE))

    def step(self, operator: Any, cast: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Output, windows and matrices after the operator, on copies in the type `cast`."""
        projected, *weights, windows, matrices = (
            tensor.clone() if cast is None else tensor.to(cast, copy=True)
            for tensor in (self.projected, *self.weights, self.windows, self.matrices)
        )
        if cast is None:
            projected = self.projected
        output = operator(projected, *weights, windows, matrices, self.read, self.write, EPS)
        return output, windows, matrices


@pytest.mark.parametrize(
    ("ratio", "key_dim", "value_dim", "dtype", "output_bound", "matrix_bound"),
    [
        (1, 16, 16, torch.float32, 2e-6, 1e-6),
        (2, 64, 32, torch.float32, 2e-6, 1e-6),
        (3, 16, 16, torch.float32, 2e-6, 1e-6),
        (2, 8, 12, torch.float32, 2e-6, 1e-6),
        (2, 128, 128, torch.bfloat16, 6e-3, 1e-5),  # the interpreter cuts bfloat16 instead of rounding it
    ],
)
def test_step_against_the_reference(
    ratio: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    output_bound: float,
    matrix_bound: float,
    device: torch.device,
) -> None:
    layer = Layer(ratio, key_dim, value_dim, dtype, device)
    expected, windows_expected, matrices_expected = layer.step(reference_step, torch.float64)
    output, windows, matrices = layer.step(delta_net_step)
    assert (output.dtype, output.shape) == (dtype, expected.shape)
    for sequence, write in enumerate(WRITE):
        if write:
            assert error(output[sequence], expected[sequence]) < output_bound
            assert torch.equal(windows[write].double(), windows_expected[write])
            assert error(matrices[write], matrices_expected[write]) < matrix_bound
    for row in set(range(1, ROWS)) - set(WRITE):
        assert torch.equal(windows[row].nan_to_num(7), layer.windows[row].nan_to_num(7))
        assert torch.equal(matrices[row].nan_to_num(7), layer.matrices[row].nan_to_num(7))


def test_step_of_slow_and_fast_decays(device: torch.device) -> None:
    """softplus far below and above zero: a decay of 1 − 1e-4 keeps its digits, and a fast one yields 0, not NaN."""
    layer = Layer(4, 16, 16, torch.float32, device)
    heads = layer.weights[1].shape[0]
    layer.weights[1].fill_(4)
    layer.weights[2].copy_(torch.linspace(-14, 50, heads, device=device))
    layer.projected[:, -heads:] = 0
    layer.projected[:, -2 * heads : -heads] = -100  # beta = 0: the matrix decays, and no more
    _, _, matrices = layer.step(delta_net_step)
    for sequence, (read, write) in enumerate(zip(READ, WRITE, strict=True)):
        if not read or not write:
            continue
        for head in range(heads):
            lost = -torch.expm1(-math.exp(4) * torch.nn.functional.softplus(layer.weights[2][head].double()))
            before = layer.matrices[read, head].double()
            change = before - matrices[write, head].double()
            rounding = 2**-24 * before.norm()
            assert float((change - lost * before).norm()) < 1e-6 * float(lost * before.norm()) + rounding, sequence


def test_no_sequences(device: torch.device) -> None:
    layer = Layer(2, 16, 16, torch.bfloat16, device)
    rows = layer.read[:0]
    output = delta_net_step(layer.projected[:0], *layer.weights, layer.windows, layer.matrices, rows, rows, EPS)
    assert output.shape == (0, 64)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 2, 16), (23, 3, 64), (5, 4, 20)])
def test_norm_against_the_reference(
    tokens: int, heads: int, size: int, dtype: torch.dtype, bound: float, device: torch.device
) -> None:
    x = torch.randn(tokens, heads, size, device=device).to(dtype)
    x[0] *= 1e-3  # eps counts
    wide = torch.randn(tokens, heads * size + 5, device=device).to(dtype)
    gate = wide[:, 2:-3].unflatten(-1, (heads, size))
    weight = torch.randn(size, device=device).to(dtype)
    if tokens > 1:
        x[-1], gate[-2] = torch.nan, torch.nan
    output = gated_rms_norm(x, gate, weight, EPS)
    expected = reference_norm(x.double(), gate.double(), weight.double(), EPS)
    assert (output.dtype, output.shape) == (dtype, expected.shape)
    good = slice(0, max(1, tokens - 2))
    assert error(output[good], expected[good]) < bound
    assert error(output[0], expected[0]) < bound


def test_norm_of_nothing(device: torch.device) -> None:
    nothing = torch.empty(0, 2, 16, device=device)
    assert gated_rms_norm(nothing, nothing, torch.ones(16, device=device), EPS).shape == (0, 2, 16)
