"""Offsets are of 64 bits: operators on the last page and the last row of pools of more than 2³¹ elements and more than
8 GiB give what they give in small pools, bit for bit, and touch nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tokenspeed.kernels.registry import Operators, select
from tokenspeed.models.batch import Stores

pytestmark = pytest.mark.xdist_group("large pools")

BYTES = (8 << 30) + (1 << 26)
SMALL_BYTES = 1 << 22
"""On a CPU, where this only tries the tests themselves."""
FILLING = 0.25
PAGE, HEADS, KV_HEADS, HEAD_DIM, ROTARY = 64, 8, 2, 256, 64
WIDTH = 4
EPS = 1e-6


@pytest.fixture
def ops(device: torch.device) -> Operators:
    torch.manual_seed(0)
    return select(device, torch.bfloat16)


def pool(entries: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((entries, *shape), FILLING, dtype=dtype, device=device)


def large_entries(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> int:
    entry_bytes = dtype.itemsize
    for size in shape:
        entry_bytes *= size
    return -(-(BYTES if device.type == "cuda" else SMALL_BYTES) // entry_bytes) + 4


def check_size(tensor: Tensor) -> None:
    """Of a GPU's pool."""
    if tensor.is_cuda:
        assert tensor.numel() * tensor.itemsize > 8 << 30
        assert tensor.numel() > 1 << 31


def touched(tensor: Tensor) -> list[int]:
    """Entries of a pool that are not as it was filled; looked at in parts, since all at once is as large again."""
    found: list[int] = []
    step = max(1, (1 << 28) // tensor[0].numel())
    for start in range(0, len(tensor), step):
        changed = (tensor[start : start + step] != FILLING).flatten(1).any(1)
        found += (changed.nonzero()[:, 0] + start).tolist()
    return found


@dataclass
class Attended:
    """What the attention's operators left and gave."""

    k: Tensor
    v: Tensor
    q: Tensor
    decoded: Tensor
    prefilled: Tensor


def attend(ops: Operators, k_pages: Tensor, v_pages: Tensor, pages: list[int], given: dict[str, Tensor]) -> Attended:
    """A sequence over two pages: its K and V are written, then its last token attends, then all its tokens do."""
    device, count = k_pages.device, len(given["qkv"])
    table = torch.tensor([pages], device=device)
    positions = torch.arange(count, device=device)
    rows = table[0, positions // PAGE] * PAGE + positions % PAGE
    cos, sin = ops.rotary_table(positions, 1e7, ROTARY, torch.bfloat16)
    q, gate = ops.qk_norm_rope_write(
        given["qkv"],
        given["q_weight"],
        given["k_weight"],
        cos,
        sin,
        k_pages,
        v_pages,
        rows,
        HEADS,
        KV_HEADS,
        EPS,
    )
    lengths = torch.tensor([count], device=device)
    decoded = ops.attention_decode(q[-1:], gate[-1:], k_pages, v_pages, table, lengths, count)
    starts = torch.tensor([0, count], device=device)
    prefilled = ops.attention_prefill(
        q, gate, k_pages, v_pages, table, positions, starts, lengths, count, [(count, count)]
    )
    return Attended(k_pages[pages].clone(), v_pages[pages].clone(), q, decoded, prefilled)


@pytest.mark.parametrize("count", [PAGE + 5, 2 * PAGE])
def test_the_last_pages(ops: Operators, device: torch.device, count: int) -> None:
    shape, dtype = (PAGE, KV_HEADS, HEAD_DIM), torch.bfloat16
    width = HEADS * 2 * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM
    given = {
        "qkv": torch.randn(count, width, dtype=dtype, device=device),
        "q_weight": torch.randn(HEAD_DIM, dtype=dtype, device=device) * 0.1,
        "k_weight": torch.randn(HEAD_DIM, dtype=dtype, device=device) * 0.1,
    }
    expected = attend(ops, *(pool(4, shape, dtype, device) for _ in range(2)), [1, 2], given)
    entries = large_entries(shape, dtype, device)
    k_pages, v_pages = (pool(entries, shape, dtype, device) for _ in range(2))
    check_size(k_pages)
    pages = [entries - 2, entries - 1]
    got = attend(ops, k_pages, v_pages, pages, given)
    for name, value in vars(expected).items():
        assert bool(value.isfinite().all())
        assert torch.equal(getattr(got, name), value), name
    assert touched(k_pages) == pages
    assert touched(v_pages) == pages
    whole = count % PAGE or PAGE
    assert bool((k_pages[-1, whole:] == FILLING).all())


@dataclass
class Delta:
    """Sizes of a delta net and what its operators are given."""

    key_heads: int
    value_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    count: int = 100

    def __post_init__(self) -> None:
        self.sizes = [
            (2 * self.key_heads + self.value_heads) * self.dim,
            self.value_heads * self.dim,
            self.value_heads,
            self.value_heads,
        ]
        self.channels = self.sizes[0]
        self.shapes = {
            "windows": ((self.channels, WIDTH - 1), self.dtype),
            "matrices": ((self.value_heads, self.dim, self.dim), torch.float32),
        }
        self.projected = self._normal(self.count, sum(self.sizes))
        self.conv_weight = self._normal(self.channels, WIDTH) * 0.5
        self.a_log = self._normal(self.value_heads) * 0.3
        self.dt_bias = self._normal(self.value_heads) - 3
        self.norm_weight = self._normal(self.dim) * 0.1 + 1
        self.window = self._normal(self.channels, WIDTH - 1)
        self.matrix = torch.randn(self.shapes["matrices"][0], device=self.device) * 0.1

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def pools(self, rows: int) -> tuple[Tensor, Tensor]:
        windows, matrices = (pool(rows, shape, dtype, self.device) for shape, dtype in self.shapes.values())
        return windows, matrices

    def step(self, ops: Operators, windows: Tensor, matrices: Tensor, rows: list[int]) -> list[Tensor]:
        """A step from the state in one row to another."""
        read, write = (torch.tensor([row], device=self.device) for row in rows)
        windows[rows[0]], matrices[rows[0]] = self.window, self.matrix
        weights = self.conv_weight, self.a_log, self.dt_bias, self.norm_weight
        if windows.is_cuda:
            # A step's operator may fetch a state before the launches right in front of it have ended.
            torch.cuda.synchronize(self.device)
        output = ops.delta_net_step(self.projected[:1], *weights, windows, matrices, read, write, EPS)
        return [output, windows[rows[1]].clone(), matrices[rows[1]].clone()]

    def prefill(self, ops: Operators, windows: Tensor, matrices: Tensor, rows: list[int]) -> list[Tensor]:
        """A prompt from the state in one row to another, with a state from inside kept in a third."""
        read, write, kept = (torch.tensor([row], device=self.device) for row in rows)
        windows[rows[0]], matrices[rows[0]] = self.window, self.matrix
        stores = Stores(torch.zeros_like(kept), torch.full_like(kept, self.count // 2), kept)
        starts = torch.tensor([0, self.count], device=self.device)
        columns, _, b, a = torch.split(self.projected, self.sizes, dim=-1)
        qkv = ops.causal_conv_prefill(columns, self.conv_weight, windows, starts, read, write, stores)
        output = ops.gated_delta_prefill(qkv, a, b, self.a_log, self.dt_bias, matrices, starts, read, write, stores)
        return [qkv, output, *(tensor[row].clone() for row in rows[1:] for tensor in (windows, matrices))]


@pytest.mark.parametrize(
    ("large", "sizes"),
    [("matrices", (4, 8, 128, torch.bfloat16)), ("windows", (2, 2, 8, torch.float32))],
)
def test_the_last_rows(
    ops: Operators, device: torch.device, large: str, sizes: tuple[int, int, int, torch.dtype]
) -> None:
    """One tensor at a time is the large one; the other has as many rows."""
    delta = Delta(*sizes, device)
    rows = large_entries(*delta.shapes[large], device)
    expected = [
        delta.step(ops, *delta.pools(8), [1, 2]),
        delta.prefill(ops, *delta.pools(8), [1, 2, 3]),
        delta.prefill(ops, *delta.pools(8), [3, 2, 1]),
    ]
    windows, matrices = delta.pools(rows)
    check_size({"windows": windows, "matrices": matrices}[large])
    last = rows - 1
    got = [
        delta.step(ops, windows, matrices, [last - 1, last]),
        delta.prefill(ops, windows, matrices, [last - 3, last - 2, last]),
        delta.prefill(ops, windows, matrices, [last, last - 2, last - 3]),
    ]
    for one, other in zip(got, expected, strict=True):
        for number, (value, right) in enumerate(zip(one, other, strict=True)):
            assert bool(right.isfinite().all())
            assert torch.equal(value, right), number
    assert touched(windows) == touched(matrices) == [last - 3, last - 2, last - 1, last]
