from __future__ import annotations

import pytest
import torch

from tokenspeed.kernels import rotary as reference
from tokenspeed.kernels.triton import rotary as kernels

EPS = 1e-6
PAGE = 4


def test_table_is_exact_far_out(device: torch.device) -> None:
    positions = torch.tensor([0, 1, 1000, 262_143, 1_000_000, 77, 3], device=device)
    for dtype in (torch.float32, torch.bfloat16):
        got = kernels.rotary_table(positions, 1e7, 64, dtype)
        expected = reference.rotary_table(positions, 1e7, 64, torch.float64)
        for table, exact in zip(got, expected, strict=True):
            assert table.dtype == torch.float32
            torch.testing.assert_close(table.double(), exact, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "rotary_dim"),
    [(0, 4, 2, 16, 4), (1, 4, 2, 256, 64), (3, 6, 2, 16, 4), (11, 4, 1, 32, 32)],
)
@pytest.mark.parametrize("few", [0, 64])
def test_norm_rotation_and_write(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    few: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways of tiling; rows out of order, the last two tokens' in the sink; qkv a part of a wider tensor."""
    monkeypatch.setattr(kernels, "FEW_TOKENS", few)
    width = (2 * heads + 2 * kv_heads) * head_dim
    qkv = torch.full((tokens + 1, width + 16), torch.nan, dtype=dtype, device=device)[:tokens, 8 : 8 + width]
    qkv.normal_()
    weights = torch.randn(2, head_dim, dtype=dtype, device=device)
    table = reference.rotary_table(torch.arange(tokens, device=device) * 1000, 1e4, rotary_dim, torch.float32)
    rows = PAGE + torch.randperm(20, device=device)[:tokens]
    rows[-2:] = torch.tensor([3, 0], device=device)[: len(rows[-2:])]
    pools = [torch.full((2, 7, PAGE, kv_heads, head_dim), torch.nan, dtype=dtype, device=device) for _ in range(2)]
    (q, gate), (expected_q, expected_gate) = (
        module.qk_norm_rope_write(qkv, *weights, *table, *pool, rows, heads, kv_heads, EPS)
        for module, pool in zip((kernels, reference), pools, strict=True)
    )
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
    assert q.is_contiguous()
    torch.testing.assert_close(q, expected_q, **tolerance)
    assert gate.stride() == expected_gate.stride()
    assert gate.data_ptr() == expected_gate.data_ptr()
    assert torch.equal(gate, expected_gate)
    got, expected = (pool.flatten(1, 2)[:, PAGE:] for pool in pools)  # without the sink
    torch.testing.assert_close(got, expected, equal_nan=True, **tolerance)  # what nobody wrote is still NaN
    assert int(got[0].isnan().all(-1).all(-1).sum()) == got.shape[1] - max(tokens - 2, 0)
