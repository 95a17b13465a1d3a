from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tokenspeed.kernels import attention
from tokenspeed.kernels.attention import attention_decode, attention_prefill, write_kv

HEADS, KV_HEADS, HEAD_DIM, PAGE = 6, 2, 4, 4


class Pages:
    """Sequences of given lengths over scattered pages; everything that is no token of theirs is NaN."""

    def __init__(self, lengths: list[int], dtype: torch.dtype = torch.float64) -> None:
        widest = -(-max(lengths) // PAGE) + 2
        needed = [-(-length // PAGE) for length in lengths]
        order = (1 + torch.randperm(sum(needed) + 3)).tolist()
        self.k = torch.full((len(order) + 1, PAGE, KV_HEADS, HEAD_DIM), torch.nan, dtype=dtype)
        self.v = self.k.clone()
        self.table = torch.zeros(len(lengths), widest, dtype=torch.int64)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for sequence, (length, count) in enumerate(zip(lengths, needed, strict=True)):
            self.table[sequence, :count] = torch.tensor([order.pop() for _ in range(count)])
            k, v = torch.randn(2, length, KV_HEADS, HEAD_DIM, dtype=dtype)
            self.keys.append(k)
            self.values.append(v)
            positions = torch.arange(length)
            write_kv(k, v, self.k, self.v, self.table[sequence, positions // PAGE] * PAGE + positions % PAGE)

    def attend(self, sequence: int, q: Tensor, gate: Tensor, position: int) -> Tensor:
        """[heads * head_dim], by a loop over heads."""
        rows = []
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            keys = self.keys[sequence][: position + 1, kv_head].double()
            values = self.values[sequence][: position + 1, kv_head].double()
            weights = (keys @ q[head].double() / math.sqrt(HEAD_DIM)).exp()
            attended = (weights[:, None] * values).sum(0) / weights.sum()
            rows.append(attended / (1 + (-gate[head].double()).exp()))
        return torch.cat(rows)


@pytest.mark.parametrize("lengths", [[1], [4], [5], [1, 4, 5, 13, 3], [8, 8]])
def test_decode(lengths: list[int]) -> None:
    pages = Pages(lengths)
    q, gate = torch.randn(2, len(lengths), HEADS, HEAD_DIM, dtype=torch.float64)
    output = attention_decode(q, gate, pages.k, pages.v, pages.table, torch.tensor(lengths), max(lengths) + 3)
    for sequence, length in enumerate(lengths):
        torch.testing.assert_close(output[sequence], pages.attend(sequence, q[sequence], gate[sequence], length - 1))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("block", [3, 512])
@pytest.mark.parametrize(
    ("lengths", "queries"), [([1], [1]), ([9], [9]), ([9], [4]), ([1, 4, 5, 13, 3], [1, 1, 5, 8, 2])]
)
def test_prefill(
    lengths: list[int], queries: list[int], block: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    pages = Pages(lengths)
    positions = [
        position for length, count in zip(lengths, queries, strict=True) for position in range(length - count, length)
    ]
    q, gate = torch.randn(2, len(positions), HEADS, HEAD_DIM, dtype=torch.float64)
    starts = torch.tensor([0, *queries]).cumsum(0)
    bounds = list(zip(queries, lengths, strict=True)) if known else None
    output = attention_prefill(
        q,
        gate,
        pages.k,
        pages.v,
        pages.table,
        torch.tensor(positions),
        starts,
        torch.tensor(lengths),
        max(lengths) + 3,
        bounds,
    )
    owners = [sequence for sequence, count in enumerate(queries) for _ in range(count)]
    for token, (sequence, position) in enumerate(zip(owners, positions, strict=True)):
        torch.testing.assert_close(output[token], pages.attend(sequence, q[token], gate[token], position))


def test_bfloat16_pages_are_attended_in_float32() -> None:
    pages = Pages([40, 7], torch.bfloat16)
    q, gate = torch.randn(2, 2, HEADS, HEAD_DIM).bfloat16()
    output = attention_decode(q, gate, pages.k, pages.v, pages.table, torch.tensor([40, 7]), 40)
    assert output.dtype == torch.bfloat16
    for sequence, length in enumerate([40, 7]):
        expected = pages.attend(sequence, q[sequence], gate[sequence], length - 1)
        torch.testing.assert_close(output[sequence].double(), expected, rtol=2**-8, atol=1e-6)


def test_writes_go_to_their_rows_and_nowhere_else() -> None:
    k_pages, v_pages = torch.zeros(2, 3, PAGE, KV_HEADS, HEAD_DIM)
    k, v = torch.randn(2, 3, KV_HEADS, HEAD_DIM)
    write_kv(k, v, k_pages, v_pages, torch.tensor([11, 2, 4]))
    for pages, written in ((k_pages, k), (v_pages, v)):
        flat = pages.view(-1, KV_HEADS, HEAD_DIM)
        assert torch.equal(flat[[11, 2, 4]], written)
        assert not flat[[0, 1, 3, 5, 6, 7, 8, 9, 10]].any()
