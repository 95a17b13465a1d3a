from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tokenspeed.kernels.delta_rule import gated_delta_prefill as reference
from tokenspeed.kernels.triton.delta_rule import gated_delta_prefill

KEY_HEADS = 2


@dataclass
class Stores:
    sequences: Tensor
    counts: Tensor
    rows: Tensor


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


class Case:
    """Sequences over rows that are NaN where nobody has written, the sink included.

    Sequence 0 has no history. 1 and 2 go on from row 5, which 3 overwrites; 3 goes on from the row that 0 writes, and 4
    is thrown away. `decays`: between which two a token's decay lies.
    """

    def __init__(
        self,
        lengths: list[int],
        ratio: int,
        dims: tuple[int, int],
        dtype: torch.dtype,
        decays: tuple[float, float],
        counts: list[tuple[int, int]],
        device: torch.device,
    ) -> None:
        sequences, tokens = len(lengths), sum(lengths)
        self.read = [0, 5, 5, 1, *range(20, 20 + sequences)][:sequences]
        self.write = [1, 2, 3, 5, 0, *range(30, 30 + sequences)][:sequences]
        heads, (key_dim, value_dim) = KEY_HEADS * ratio, dims
        width = 2 * KEY_HEADS * key_dim + heads * value_dim
        wide = torch.randn(tokens, width + 2 * heads + 7, device=device) + 0.5
        rate = torch.empty(tokens, heads, device=device).uniform_(*decays).clamp(1e-30, 1 - 1e-7).log().neg()
        wide[:, width + 1 : width + 1 + heads] = torch.expm1(rate).log()  # softplus gives the rate
        wide = wide.to(dtype)
        # Slices of wider tensors, as a model has them.
        self.qkv, self.a = wide[:, :width], wide[:, width + 1 : width + 1 + heads]
        self.b = wide[:, width + 3 + heads : width + 3 + 2 * heads]
        self.a_log, self.dt_bias = torch.zeros(2, heads, device=device)
        self.matrices = torch.full((40 + len(counts), heads, value_dim, key_dim), torch.nan, device=device)
        for row in {*self.read, 1} - {0}:
            self.matrices[row] = torch.randn_like(self.matrices[row])
        self.starts = torch.tensor([0, *lengths], device=device).cumsum(0)
        listed = [torch.tensor(part, device=device) for part in zip(*counts, strict=True)]
        self.stores = Stores(*listed, torch.arange(40, 40 + len(counts), device=device)) if counts else None

    def run(self, operator, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Output and matrices of the operator on inputs in `dtype`, by default as they are."""
        inputs = [self.qkv, self.a, self.b, self.a_log, self.dt_bias]
        matrices = self.matrices.clone()
        if dtype is not None:
            inputs, matrices = [tensor.to(dtype) for tensor in inputs], matrices.to(dtype)
        rows = [torch.tensor(rows, device=self.qkv.device) for rows in (self.read, self.write)]
        return operator(*inputs, matrices, self.starts, *rows, self.stores), matrices

    def check(self, output_bound: float, state_bound: float) -> None:
        expected, matrices_expected = self.run(reference, torch.float64)
        output, matrices = self.run(gated_delta_prefill)
        assert (output.dtype, output.shape) == (self.qkv.dtype, expected.shape)
        for start, end in zip(self.starts.tolist(), self.starts[1:].tolist(), strict=False):
            assert error(output[start:end], expected[start:end]) < output_bound
            assert error(output[start : start + 2], expected[start : start + 2]) < 2 * output_bound
            assert error(output[end - 1], expected[end - 1]) < 2 * output_bound
        touched = {*self.write, *(self.stores.rows.tolist() if self.stores else [])} - {0}
        for row in touched:
            assert error(matrices[row], matrices_expected[row]) < state_bound, row
        for row in set(range(1, matrices.shape[0])) - touched:
            assert torch.equal(matrices[row].nan_to_num(7), self.matrices[row].nan_to_num(7)), row


EVERYWHERE = [
    (0, 1),
    (2, 1),
    (2, 63),
    (2, 64),
    (3, 1),
    (3, 64),
    (3, 65),
    (5, 64),
    (5, 65),
    (5, 130),
    (5, 199),
    (5, 200),
]
SLOW, FAST, MIXED = (0.9, 0.9999), (1e-6, 0.5), (0.0, 1.0)


@pytest.mark.parametrize(
    ("lengths", "ratio", "dims", "dtype", "decays", "counts", "output_bound", "state_bound"),
    [
        ([1, 63, 64, 65, 2, 200], 1, (16, 16), torch.float32, SLOW, EVERYWHERE, 1e-5, 1e-5),
        ([1], 2, (16, 16), torch.float32, SLOW, [], 1e-5, 1e-5),
        ([130], 3, (16, 16), torch.float32, MIXED, [(0, 128), (0, 70)], 1e-5, 1e-5),
        ([64, 2], 4, (8, 20), torch.float32, FAST, [(0, 64)], 1e-5, 1e-5),
        ([140], 1, (16, 16), torch.bfloat16, SLOW, [(0, 100), (0, 128)], 1e-2, 1e-4),
        ([3, 70], 1, (64, 80), torch.bfloat16, MIXED, [], 1e-2, 1e-4),
    ],
)
def test_against_the_reference(
    lengths: list[int],
    ratio: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    decays: tuple[float, float],
    counts: list[tuple[int, int]],
    output_bound: float,
    state_bound: float,
    device: torch.device,
) -> None:
    Case(lengths, ratio, dims, dtype, decays, counts, device).check(output_bound, state_bound)


def test_equal_keys_and_no_decay(device: torch.device) -> None:
    """The triangular system is furthest from the identity: each token is to undo what the last one wrote."""
    case = Case([150], 1, (16, 16), torch.float32, (1.0, 1.0), [(0, 150)], device)
    case.qkv[:, 2 * 16 : 4 * 16] = case.qkv[0, 2 * 16 : 4 * 16]
    case.b.fill_(20)
    case.check(1e-5, 1e-5)


def test_smaller_chunks(device: torch.device) -> None:
    case = Case([40, 17], 2, (16, 16), torch.float32, SLOW, [(0, 17), (1, 16)], device)

    def by_sixteen(*arguments: object) -> Tensor:
        return gated_delta_prefill(*arguments, chunk=16)

    output, matrices = case.run(by_sixteen)
    expected, matrices_expected = case.run(reference, torch.float64)
    assert error(output, expected) < 1e-5
    assert error(matrices[[1, 2, 40, 41]], matrices_expected[[1, 2, 40, 41]]) < 1e-5


def test_no_sequences(device: torch.device) -> None:
    case = Case([1], 1, (16, 16), torch.bfloat16, SLOW, [], device)
    rows, starts = case.starts[:0], torch.zeros(1, dtype=torch.int64, device=device)
    rest = (case.a_log, case.dt_bias, case.matrices, starts, rows, rows, None)
    assert gated_delta_prefill(case.qkv[:0], case.a[:0], case.b[:0], *rest).shape == (0, KEY_HEADS, 16)
