from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tokenspeed.kernels.delta_rule import gated_delta_prefill, gated_delta_step

KEY_HEADS, KEY_DIM, VALUE_DIM = 2, 3, 4


class Inputs:
    def __init__(self, tokens: int, rows: int, ratio: int, dtype: torch.dtype = torch.float64) -> None:
        self.heads = KEY_HEADS * ratio
        width = 2 * KEY_HEADS * KEY_DIM + self.heads * VALUE_DIM
        joined = torch.randn(tokens, width + 2 * self.heads, dtype=dtype)
        self.qkv, self.a, self.b = joined.split([width, self.heads, self.heads], dim=-1)
        self.a_log = torch.randn(self.heads, dtype=torch.promote_types(torch.float32, dtype))
        self.dt_bias = torch.randn_like(self.a_log) - 3
        self.matrices = torch.randn(rows, self.heads, VALUE_DIM, KEY_DIM, dtype=self.a_log.dtype)
        self.matrices[0] = torch.nan

    def walk(self, tokens: range, state: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and matrices after each token, by the recurrence of the paper, head by head."""
        outputs, states = [], []
        state = state.double().clone()
        for token in tokens:
            row = self.qkv[token].double()
            output = torch.zeros(self.heads, VALUE_DIM, dtype=torch.float64)
            for head in range(self.heads):
                key_head = head // (self.heads // KEY_HEADS)
                q = row[key_head * KEY_DIM :][:KEY_DIM]
                k = row[(KEY_HEADS + key_head) * KEY_DIM :][:KEY_DIM]
                v = row[2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM :][:VALUE_DIM]
                q = q / math.sqrt(float(q @ q) + 1e-6) / math.sqrt(KEY_DIM)
                k = k / math.sqrt(float(k @ k) + 1e-6)
                pace = math.log1p(math.exp(float(self.a[token, head]) + float(self.dt_bias[head])))
                decay = math.exp(-math.exp(float(self.a_log[head])) * pace)
                beta = 1 / (1 + math.exp(-float(self.b[token, head])))
                decayed = decay * state[head]
                state[head] = decayed + beta * torch.outer(v - decayed @ k, k)
                output[head] = state[head] @ q
            outputs.append(output)
            states.append(state.clone())
        return outputs, states


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("lengths", "chunk"),
    [([1], 64), ([9], 4), ([8], 4), ([1, 2, 3, 4, 5], 64), ([5, 1, 1, 7, 2, 1, 12], 4), ([6, 3, 4, 9, 8], 1)],
)
def test_prefill_against_the_recurrence(
    lengths: list[int], chunk: int, ratio: int, ragged: Callable[[list[int]], object]
) -> None:
    batch = ragged(lengths)
    inputs = Inputs(batch.tokens, batch.rows, ratio)
    before = inputs.matrices.clone()
    output = gated_delta_prefill(
        inputs.qkv,
        inputs.a,
        inputs.b,
        inputs.a_log,
        inputs.dt_bias,
        inputs.matrices,
        batch.starts,
        batch.read,
        batch.write,
        batch.stores,
        chunk,
    )
    touched = {0, *batch.write.tolist(), *batch.stores.rows.tolist()}
    store = 40
    for sequence, length in enumerate(lengths):
        start, read, write = int(batch.starts[sequence]), int(batch.read[sequence]), int(batch.write[sequence])
        state = before[read] if read else torch.zeros_like(before[0])
        outputs, states = inputs.walk(range(start, start + length), state)
        torch.testing.assert_close(output[start : start + length], torch.stack(outputs), rtol=1e-10, atol=1e-10)
        for state in states:
            torch.testing.assert_close(inputs.matrices[store], state, rtol=1e-10, atol=1e-10)
            store += 1
        if write:
            torch.testing.assert_close(inputs.matrices[write], states[-1], rtol=1e-10, atol=1e-10)
    for row in set(range(batch.rows)) - touched:
        assert torch.equal(inputs.matrices[row], before[row])


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_step_against_the_recurrence(ratio: int, ragged: Callable[[list[int]], object]) -> None:
    batch = ragged([1] * 6)
    inputs = Inputs(6, batch.rows, ratio)
    before = inputs.matrices.clone()
    output = gated_delta_step(
        inputs.qkv, inputs.a, inputs.b, inputs.a_log, inputs.dt_bias, inputs.matrices, batch.read, batch.write
    )
    for sequence, (read, write) in enumerate(zip(batch.read.tolist(), batch.write.tolist(), strict=True)):
        state = before[read] if read else torch.zeros_like(before[0])
        outputs, states = inputs.walk(range(sequence, sequence + 1), state)
        torch.testing.assert_close(output[sequence], outputs[0], rtol=1e-12, atol=1e-12)
        if write:
            torch.testing.assert_close(inputs.matrices[write], states[0], rtol=1e-12, atol=1e-12)
    for row in set(range(batch.rows)) - {0, *batch.write.tolist()}:
        assert torch.equal(inputs.matrices[row], before[row])


def test_a_head_that_forgets_within_a_chunk_does_not_overflow() -> None:
    """Decays of e⁻⁵⁰ a token: exp(G_i − G_j) of a future j would be infinite, and infinity times zero is NaN."""
    inputs = Inputs(40, 2, 2)
    inputs.dt_bias += 50
    inputs.a_log.clamp_(min=0)
    output = gated_delta_prefill(
        inputs.qkv,
        inputs.a,
        inputs.b,
        inputs.a_log,
        inputs.dt_bias,
        inputs.matrices,
        torch.tensor([0, 40]),
        torch.tensor([0]),
        torch.tensor([1]),
        None,
    )
    outputs, states = inputs.walk(range(40), torch.zeros_like(inputs.matrices[0]))
    torch.testing.assert_close(output, torch.stack(outputs))
    torch.testing.assert_close(inputs.matrices[1], states[-1])


def test_bfloat16_input_keeps_a_float32_matrix() -> None:
    inputs = Inputs(20, 3, 2, torch.bfloat16)
    outputs, states = inputs.walk(range(20), torch.zeros_like(inputs.matrices[0]))
    output = gated_delta_prefill(
        inputs.qkv,
        inputs.a,
        inputs.b,
        inputs.a_log,
        inputs.dt_bias,
        inputs.matrices,
        torch.tensor([0, 20]),
        torch.tensor([0]),
        torch.tensor([1]),
        None,
        8,
    )
    assert (output.dtype, inputs.matrices.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(inputs.matrices[1].double(), states[-1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.double(), torch.stack(outputs), rtol=2**-7, atol=1e-5)
