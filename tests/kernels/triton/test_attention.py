from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenspeed.kernels import attention as reference
from tokenspeed.kernels.triton import attention as kernels

DEAD = 1  # a finished sequence: its pages hold NaN


def norm_error(got: Tensor, expected: Tensor) -> float:
    """Relative to the expected tensor's norm."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


class Case:
    """Sequences over scattered pages of a pool that is NaN wherever no live sequence has written, the sink included.

    q is dense; gate a part of a wider projection; the page table a part of a wider table, whose entries past a length
    point to a page of NaN."""

    def __init__(
        self,
        lengths: list[int],
        queries: list[int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        page: int,
        dtype: torch.dtype,
        device: torch.device,
        dead: int | None = None,
    ) -> None:
        needed = [-(-length // page) for length in lengths]
        order = (2 + torch.randperm(sum(needed))).tolist()
        self.k, self.v = torch.full(
            (2, len(order) + 2, page, kv_heads, head_dim), torch.nan, dtype=dtype, device=device
        )
        table = torch.ones(len(lengths), 2 * max(needed) + 3, dtype=torch.int64)  # page 1 is never written
        for sequence, (length, count) in enumerate(zip(lengths, needed, strict=True)):
            table[sequence, :count] = torch.tensor([order.pop() for _ in range(count)])
            position = torch.arange(length)
            rows = (table[sequence, position // page] * page + position % page).to(device)
            if sequence != dead:
                k, v = torch.randn(2, length, kv_heads, head_dim, dtype=dtype, device=device)
                reference.write_kv(k, v, self.k, self.v, rows)
        self.table = table.to(device)[:, : max(needed) + 1]
        self.lengths = torch.tensor(lengths, device=device)
        self.starts = torch.tensor([0, *queries], device=device).cumsum(0)
        self.positions = torch.cat(
            [torch.arange(length - count, length) for length, count in zip(lengths, queries, strict=True)]
        ).to(device)
        self.bounds = list(zip(queries, lengths, strict=True))
        tokens = sum(queries)
        self.q = torch.randn(tokens, heads, head_dim, dtype=dtype, device=device)
        wide = torch.randn(tokens, heads * 2 * head_dim + 8, dtype=dtype, device=device)
        self.gate = wide[:, : heads * 2 * head_dim].view(tokens, heads, 2 * head_dim)[..., head_dim:]
        self.longest = max(lengths)

    def decode(self, module, longest: int | None = None) -> Tensor:
        longest = self.longest if longest is None else longest
        return module.attention_decode(self.q, self.gate, self.k, self.v, self.table, self.lengths, longest)

    def prefill(self, function, *bounds) -> Tensor:
        pages = self.k, self.v, self.table
        return function(self.q, self.gate, *pages, self.positions, self.starts, self.lengths, self.longest, *bounds)


BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # the interpreter rounds to bfloat16 by cutting off
SHAPES = [
    (16, 2, 256, 64, torch.bfloat16),
    (16, 2, 256, 64, torch.float32),
    (32, 2, 32, 16, torch.float32),
    (12, 2, 32, 32, torch.bfloat16),
    (6, 2, 16, 4, torch.float32),
    (4, 1, 16, 24, torch.float32),
]
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")  # in padding


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PREFILL_ROWS", 64)
    monkeypatch.setattr(kernels, "PREFILL_KEYS", 16)
    monkeypatch.setattr(kernels, "PREFILL_PART_KEYS", 16)
    monkeypatch.setattr(kernels, "DECODE_KEYS", 16)
    monkeypatch.setattr(kernels, "DECODE_PARTS", (2, 4))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "page", "dtype"), SHAPES)
@pytest.mark.parametrize("lengths", [[65], [40, 1, 17, 16]])
def test_decode(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, page: int, dtype: torch.dtype, device: torch.device
) -> None:
    case = Case(lengths, [1] * len(lengths), heads, kv_heads, head_dim, page, dtype, device)
    got = case.decode(kernels, longest=1)
    assert got.dtype == dtype
    assert norm_error(got, case.decode(reference)) < BOUNDS[dtype]


def test_decode_shares_programs_by_length(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One long sequence among short ones is cut into many parts, the short ones into one each."""
    seen: list[Tensor] = []

    def spy(joined: Tensor, weights: Tensor, *rest, **names) -> None:
        seen.append(weights.isfinite().sum(1))
        join(joined, weights, *rest, **names)

    join = kernels._join
    monkeypatch.setattr(kernels, "_join", spy)
    monkeypatch.setattr(kernels, "_multiprocessors", lambda device: 4)
    monkeypatch.setattr(kernels, "DECODE_PARTS", (8, 8))
    monkeypatch.setattr(kernels, "DECODE_PROGRAMS", 2)
    case = Case([400, 8, 8, 8], [1] * 4, 2, 1, 16, 16, torch.float32, device)
    assert norm_error(case.decode(kernels), case.decode(reference)) < 1e-5
    assert seen[0].view(4, 2)[:, 0].tolist() == [7, 1, 1, 1]  # 28 blocks over 8 programs: 4 blocks in a part


def test_dead_sequences_harm_nobody(device: torch.device) -> None:
    case = Case([40, 33, 70], [1, 1, 1], 4, 2, 16, 16, torch.float32, device, dead=DEAD)
    got, expected = case.decode(kernels), case.decode(reference)
    assert got[DEAD].isnan().all()
    assert norm_error(got[[0, 2]], expected[[0, 2]]) < 1e-5
    case = Case([40, 33, 20], [3, 5, 20], 4, 2, 16, 16, torch.float32, device, dead=DEAD)
    got, expected = case.prefill(kernels.attention_prefill), case.prefill(reference.attention_prefill)
    assert got[3:8].isnan().all()
    assert norm_error(got[:3], expected[:3]) < 1e-5
    assert norm_error(got[8:], expected[8:]) < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "page", "dtype"), SHAPES)
@pytest.mark.parametrize(
    ("lengths", "queries", "parts"), [([70], [6], 1), ([70], [6], 3), ([3, 40, 33, 7], [1, 5, 17, 7], 1)]
)
def test_prefill(
    lengths: list[int],
    queries: list[int],
    parts: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "prefill_parts", lambda *_: parts)
    case = Case(lengths, queries, heads, kv_heads, head_dim, page, dtype, device)
    got = case.prefill(kernels.attention_prefill)
    assert got.dtype == dtype
    assert norm_error(got, case.prefill(reference.attention_prefill)) < BOUNDS[dtype]


def test_no_tokens(device: torch.device) -> None:
    case = Case([5], [0], 4, 2, 16, 16, torch.float32, device)
    assert case.prefill(kernels.attention_prefill).shape == (0, 64)
    empty = case.q, case.gate, case.k, case.v, case.table[:0], case.lengths[:0]
    assert kernels.attention_decode(*empty, 1).shape == (0, 64)


def test_keys_are_split_when_multiprocessors_would_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PREFILL_PART_KEYS", 1024)
    assert kernels.prefill_parts(100, 50_000, 132) > 1
    assert kernels.prefill_parts(100, 1500, 132) == 1  # too few keys
    assert kernels.prefill_parts(1000, 50_000, 132) == 1  # many waves
    assert kernels.prefill_parts(132, 50_000, 132) == 1
    assert kernels.prefill_parts(1, 10**6, 132) == kernels.PREFILL_PARTS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN serves on a GPU alone")
def test_the_chunk_of_a_long_prompt_is_attended_alike_by_cudnn(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk, length = kernels.PLANNED_CHUNK, kernels.PLANNED_LEAST
    case = Case([length], [chunk], 16, 2, 256, 64, torch.bfloat16, device)
    bounds = ((chunk, length),)
    assert kernels._planned(case.q, 2, bounds)
    assert not kernels._planned(case.q, 2, ((chunk, length + 1),))
    planned = case.prefill(kernels.attention_prefill, bounds)
    monkeypatch.setattr(kernels, "_planned", lambda *_: False)
    assert norm_error(planned, case.prefill(kernels.attention_prefill)) < 1e-2


@pytest.mark.parametrize("bounds", [((8192, 8192),), ((8192, 16384 + 1),), ((8191, 3 * 8192),), ((8192, 1 << 19),)])
def test_other_chunks_have_no_plan(bounds: tuple[tuple[int, int], ...], device: torch.device) -> None:
    q = torch.empty(1, 16, 256, dtype=torch.bfloat16, device=device)
    assert not kernels._planned(q, 2, bounds)
    assert not kernels._planned(q, 2, (*bounds, (8192, 3 * 8192)))
