from __future__ import annotations

import cmath
import math

import pytest
import torch

from tokenspeed.kernels.rotary import qk_norm_rope_write, rotary_table

EPS = 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_table_is_exact_far_out(dtype: torch.dtype) -> None:
    positions = [0, 1, 1000, 262_143, 1_000_000]
    cos, sin = rotary_table(torch.tensor(positions), 1e7, 8, dtype)
    expected = [[position * 1e7 ** (-2 * i / 8) for i in range(4)] for position in positions]
    for table, function in ((cos, math.cos), (sin, math.sin)):
        values = torch.tensor([[function(angle) for angle in row] for row in expected], dtype=torch.float64)
        torch.testing.assert_close(table.double(), values, rtol=0, atol=1e-7 if dtype == torch.float32 else 1e-9)


def test_split_norm_and_rotation_against_complex_numbers() -> None:
    tokens, heads, kv_heads, head_dim, rotary_dim, theta = 3, 4, 2, 8, 4, 100.0
    qkv = torch.randn(tokens, (2 * heads + 2 * kv_heads) * head_dim, dtype=torch.float64)
    q_weight, k_weight = torch.randn(2, head_dim, dtype=torch.float64)
    positions = torch.tensor([0, 5, 77])
    table = rotary_table(positions, theta, rotary_dim, torch.float64)
    k_pages, v_pages = torch.full((2, 4, 2, kv_heads, head_dim), torch.nan, dtype=torch.float64)
    rows = torch.tensor([5, 2, 6])
    q, gate = qk_norm_rope_write(qkv, q_weight, k_weight, *table, k_pages, v_pages, rows, heads, kv_heads, EPS)
    assert q.is_contiguous()
    assert gate.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    for pages in (k_pages, v_pages):
        assert pages.view(8, -1).isnan().all(1).tolist() == [row not in rows for row in range(8)]
    k, v = (pages.view(8, kv_heads, head_dim)[rows] for pages in (k_pages, v_pages))

    def rotated(row: list[float], weight: list[float], position: int) -> list[float]:
        size = math.sqrt(sum(value * value for value in row) / head_dim + EPS)
        normed = [value / size * (1 + w) for value, w in zip(row, weight, strict=True)]
        for i in range(rotary_dim // 2):  # the pair is (i, i + half), not (2 i, 2 i + 1)
            angle = position * theta ** (-2 * i / rotary_dim)
            turned = complex(normed[i], normed[i + rotary_dim // 2]) * cmath.exp(1j * angle)
            normed[i], normed[i + rotary_dim // 2] = turned.real, turned.imag
        return normed

    for token, position in enumerate(positions.tolist()):
        row = qkv[token].tolist()
        for head in range(heads):
            start = head * 2 * head_dim
            expected = rotated(row[start : start + head_dim], q_weight.tolist(), position)
            torch.testing.assert_close(q[token, head].tolist(), expected, rtol=1e-12, atol=1e-12)
            assert gate[token, head].tolist() == row[start + head_dim : start + 2 * head_dim]
        for head in range(kv_heads):
            start = (2 * heads + head) * head_dim
            expected = rotated(row[start : start + head_dim], k_weight.tolist(), position)
            torch.testing.assert_close(k[token, head].tolist(), expected, rtol=1e-12, atol=1e-12)
            start += kv_heads * head_dim
            assert v[token, head].tolist() == row[start : start + head_dim]


def test_bfloat16_input_is_normed_in_float32() -> None:
    qkv = torch.full((1, 6 * 8), 3.0, dtype=torch.bfloat16)
    zero = torch.zeros(8, dtype=torch.bfloat16)
    table = rotary_table(torch.tensor([0]), 100.0, 4, torch.bfloat16)
    k_pages, v_pages = torch.zeros(2, 1, 4, 1, 8, dtype=torch.bfloat16)
    q, _ = qk_norm_rope_write(qkv, zero, zero, *table, k_pages, v_pages, torch.tensor([3]), 2, 1, EPS)
    assert q.dtype == torch.bfloat16
    assert torch.equal(q, torch.ones_like(q))
    assert torch.equal(k_pages[0, 3], torch.ones_like(k_pages[0, 3]))
