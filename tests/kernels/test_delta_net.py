from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tokenspeed.kernels.delta_net import delta_net_step

KEY_HEADS, KEY_DIM, VALUE_DIM, KEEP, EPS = 2, 3, 4, 3, 1e-6


class Layer:
    """A layer's weights and memory in float64, and its step by the formulas, one head at a time."""

    def __init__(self, ratio: int, rows: int) -> None:
        self.heads = KEY_HEADS * ratio
        self.channels = 2 * KEY_HEADS * KEY_DIM + self.heads * VALUE_DIM
        self.width = self.channels + self.heads * (VALUE_DIM + 2)
        self.conv = torch.randn(self.channels, KEEP + 1, dtype=torch.float64)
        self.a_log, self.dt_bias = torch.randn(2, self.heads, dtype=torch.float64)
        self.norm = torch.randn(VALUE_DIM, dtype=torch.float64)
        self.windows = torch.randn(rows, self.channels, KEEP, dtype=torch.float64)
        self.matrices = torch.randn(rows, self.heads, VALUE_DIM, KEY_DIM, dtype=torch.float64)
        self.windows[0], self.matrices[0] = torch.nan, torch.nan

    def step(self, projected: Tensor, window: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output, window and matrix after the token."""
        columns = torch.cat((window, projected[: self.channels, None]), dim=1)
        summed = (columns * self.conv).sum(1)
        mixed = summed / (1 + torch.exp(-summed))
        z, b, a = projected[self.channels :].split([self.heads * VALUE_DIM, self.heads, self.heads])
        outputs, states = [], []
        for head in range(self.heads):
            place = head // (self.heads // KEY_HEADS) * KEY_DIM
            q, k = mixed[place:][:KEY_DIM], mixed[KEY_HEADS * KEY_DIM + place :][:KEY_DIM]
            v = mixed[2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM :][:VALUE_DIM]
            q = q / torch.sqrt(q @ q + 1e-6) / KEY_DIM**0.5
            k = k / torch.sqrt(k @ k + 1e-6)
            pace = torch.exp(self.a_log[head]) * torch.log1p(torch.exp(a[head] + self.dt_bias[head]))
            state = matrix[head] * torch.exp(-pace)
            state = state + torch.outer(v - state @ k, k) / (1 + torch.exp(-b[head]))
            o, gate = state @ q, z[head * VALUE_DIM :][:VALUE_DIM]
            outputs.append(o / torch.sqrt(o @ o / VALUE_DIM + EPS) * self.norm * gate / (1 + torch.exp(-gate)))
            states.append(state)
        return torch.cat(outputs), columns[:, 1:], torch.stack(states)


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_step_against_the_formulas(ratio: int, ragged: Callable[[list[int]], object]) -> None:
    batch = ragged([1] * 6)
    layer = Layer(ratio, batch.rows)
    windows, matrices = layer.windows.clone(), layer.matrices.clone()
    projected = torch.randn(6, layer.width + 3, dtype=torch.float64)[:, 2 : layer.width + 2]
    weights = (layer.conv, layer.a_log, layer.dt_bias, layer.norm)
    output = delta_net_step(projected, *weights, windows, matrices, batch.read, batch.write, EPS)
    assert output.shape == (6, layer.heads * VALUE_DIM)
    for sequence, (read, write) in enumerate(zip(batch.read.tolist(), batch.write.tolist(), strict=True)):
        known = float(read != 0)
        before = (layer.windows[read].nan_to_num() * known, layer.matrices[read].nan_to_num() * known)
        expected, window, matrix = layer.step(projected[sequence], *before)
        torch.testing.assert_close(output[sequence], expected, rtol=1e-11, atol=1e-11)
        if write:
            torch.testing.assert_close(windows[write], window, rtol=0, atol=0)
            torch.testing.assert_close(matrices[write], matrix, rtol=1e-12, atol=1e-12)
    for row in set(range(batch.rows)) - {0, *batch.write.tolist()}:
        assert torch.equal(windows[row], layer.windows[row])
        assert torch.equal(matrices[row], layer.matrices[row])


def test_the_output_has_the_type_of_the_projection() -> None:
    layer = Layer(2, 3)
    weights = (layer.conv.bfloat16(), layer.a_log.float(), layer.dt_bias.float(), layer.norm.bfloat16())
    windows, matrices = layer.windows.bfloat16(), layer.matrices.float()
    projected, row = torch.randn(1, layer.width).bfloat16(), torch.tensor([1])
    expected, _, matrix = layer.step(projected[0].double(), windows[1].double(), matrices[1].double())
    output = delta_net_step(projected, *weights, windows, matrices, row, row + 1, EPS)
    assert (output.dtype, matrices.dtype) == (torch.bfloat16, torch.float32)
    assert float((output[0].double() - expected).norm() / expected.norm()) < 0.03
    assert float((matrices[2].double() - matrix).norm() / matrix.norm()) < 0.01
