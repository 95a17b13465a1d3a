"""The joining of two softmaxes, on a CPU with its fused kernel in the place of CUDA's."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.kernels import attention, dense_attention

HEADS, KV_HEADS, HEAD_DIM, PAGE = 6, 2, 8, 4


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("lengths", "queries"), [([1], [1]), ([9], [9]), ([90], [13]), ([1, 4, 50, 13, 3], [1, 1, 5, 8, 2])]
)
def test_equals_the_reference(
    lengths: list[int], queries: list[int], known: bool, dtype: torch.dtype, bound: float
) -> None:
    """What stands in a page behind a length, and in the sink, is NaN."""
    needed = [-(-length // PAGE) for length in lengths]
    order = (1 + torch.randperm(sum(needed))).tolist()
    k_pages, v_pages = torch.full((2, len(order) + 1, PAGE, KV_HEADS, HEAD_DIM), torch.nan, dtype=dtype)
    table = torch.zeros(len(lengths), max(needed) + 1, dtype=torch.int64)
    for sequence, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        table[sequence, :count] = torch.tensor([order.pop() for _ in range(count)])
        position = torch.arange(length)
        k, v = torch.randn(2, length, KV_HEADS, HEAD_DIM, dtype=dtype)
        attention.write_kv(k, v, k_pages, v_pages, table[sequence, position // PAGE] * PAGE + position % PAGE)
    positions = [torch.arange(length - count, length) for length, count in zip(lengths, queries, strict=True)]
    q, gate = torch.randn(2, sum(queries), HEADS, HEAD_DIM, dtype=dtype)
    given = (
        (q, gate, k_pages, v_pages, table, torch.cat(positions), torch.tensor([0, *queries]).cumsum(0))
        + (torch.tensor(lengths), max(lengths))
        + ((tuple(zip(queries, lengths, strict=True)),) if known else ())
    )
    got, expected = dense_attention.attention_prefill(*given), attention.attention_prefill(*given)
    assert got.dtype == dtype
    assert (got - expected).norm() < bound * expected.norm()
