from __future__ import annotations

import pytest
import torch

from tokenspeed.kernels import linear as reference
from tokenspeed.kernels.triton import linear as kernels


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def rounding(device: torch.device) -> float:
    """Of bfloat16, which the interpreter truncates to."""
    return 4e-3 if device.type == "cuda" else 1e-2


@pytest.mark.parametrize("tokens", [0, 1, 16, 17])
@pytest.mark.parametrize(("outputs", "depth"), [(7, 32), (530, 80), (40, 9000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(tokens: int, outputs: int, depth: int, dtype: torch.dtype, device: torch.device) -> None:
    if depth > 1000 and tokens not in (1, 16):
        pytest.skip("one token and several are enough of a deep product")
    wide = torch.randn(tokens, depth + 5, dtype=dtype, device=device)
    x = wide[:, 2 : depth + 2]
    weight = torch.randn(outputs, depth, dtype=dtype, device=device) * depth**-0.5
    exact = x.double() @ weight.double().T
    for got in (kernels.linear(x, weight), kernels.vocabulary_logits(x, weight)):
        assert got.shape == (tokens, outputs)
        if tokens:
            assert error(got, exact) < (2e-6 if dtype == torch.float32 else rounding(device))
    assert kernels.vocabulary_logits(x, weight).dtype == torch.float32


@pytest.mark.parametrize("tokens", [0, 1, 2, 17])
@pytest.mark.parametrize(("outputs", "hidden"), [(7, 32), (530, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_norm_and_product(tokens: int, outputs: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    x, residual = torch.randn(2, tokens, hidden, dtype=dtype, device=device)
    norm = torch.randn(hidden, dtype=dtype, device=device)
    weight = torch.randn(outputs, hidden, dtype=dtype, device=device)
    got = kernels.add_norm_linear(x, residual, norm, 1e-6, weight)
    expected = reference.add_norm_linear(x, residual, norm, 1e-6, weight)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        if tokens:
            assert error(ours, theirs) < (2e-6 if dtype == torch.float32 else rounding(device))
    if dtype == torch.float32:
        assert torch.equal(got[2], expected[2])


def test_a_nan_stays_in_its_row(device: torch.device) -> None:
    x = torch.randn(3, 32, device=device)
    weight = torch.randn(9, 32, device=device)
    clean = kernels.linear(x, weight)
    x[1] = torch.nan
    dirty = kernels.linear(x, weight)
    assert torch.equal(dirty[[0, 2]], clean[[0, 2]])
    assert dirty[1].isnan().all()
