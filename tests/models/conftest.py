"""Models of four layers and a bench to run them on: pages and rows handed out by hand, everything else NaN."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed.cache.pools import PagePool, StateRows
from tokenspeed.config.model import ModelConfig
from tokenspeed.kernels.registry import select
from tokenspeed.models.batch import Batch, Stores
from tokenspeed.models.loading import fill
from tokenspeed.models.qwen35 import Qwen35, cache_geometry
from tokenspeed.models.random_weights import random_tensors, tiny_config

CPU = torch.device("cpu")


def build(dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> Qwen35:
    config = ModelConfig.parse(tiny_config(**changes), Path("config.json"))
    model = Qwen35(config, select(CPU, dtype), dtype, CPU)
    fill(model.parameters, model.table, config, random_tensors(config, seed, dtype, CPU))
    return model


@dataclass
class Line:
    """A sequence on the bench: how many tokens its pages and its state hold."""

    row: int
    pages: list[int] = field(default_factory=list)
    length: int = 0


@dataclass(frozen=True)
class Work:
    """What a forward does for one line: which tokens, and where their states go."""

    line: Line
    ids: Sequence[int]
    stores: Sequence[tuple[int, int]] = ()  # (tokens of this work, row)
    live: bool = True
    write_row: int | None = None  # the line's own unless given


class Bench:
    """Pools full of NaN, whose pages are handed out in a shuffled order and whose rows count up."""

    def __init__(self, model: Qwen35, page_size: int = 4, pages: int = 900, rows: int = 300) -> None:
        self.model = model
        self.page_size = page_size
        geometry = cache_geometry(model.config, page_size, model.dtype)
        self.pages, self.rows = PagePool(geometry, pages, CPU), StateRows(geometry, rows, CPU)
        for tensor in (*self.pages.k, *self.pages.v, *self.rows.conv, *self.rows.matrix, self.rows.hidden):
            tensor.fill_(torch.nan)
        self.free_pages = list(range(1, pages))
        random.Random(5).shuffle(self.free_pages)
        self.next_row = 1

    def row(self) -> int:
        self.next_row += 1
        return self.next_row - 1

    def line(self) -> Line:
        return Line(self.row())

    def fork(self, line: Line, length: int, row: int) -> Line:
        """A line that goes on from `line`'s first `length` tokens and the state in `row`; pages are copied."""
        pages = line.pages[: -(-length // self.page_size)]
        copies = [self.free_pages.pop() for _ in pages]
        if pages:
            self.pages.copy(torch.tensor(pages), torch.tensor(copies))
        return Line(row, copies, length)

    def batch(self, works: Sequence[Work]) -> Batch:
        starts, positions, kv_rows, table = [0], [], [], []
        for work in works:
            line, end = work.line, work.line.length + len(work.ids)
            while len(line.pages) * self.page_size < end:
                line.pages.append(self.free_pages.pop())
            own = range(line.length, end)
            positions.extend(own)
            pages = line.pages if work.live else [0] * len(line.pages)
            kv_rows.extend(pages[p // self.page_size] * self.page_size + p % self.page_size for p in own)
            starts.append(starts[-1] + len(work.ids))
            table.append(line.pages)
        widest = max(len(pages) for pages in table) + 1
        written = [work.line.row if work.write_row is None else work.write_row for work in works]
        stores = [
            (index, count, row if work.live else 0) for index, work in enumerate(works) for count, row in work.stores
        ]
        decode = not stores and all(len(work.ids) == 1 for work in works)
        lengths = [work.line.length + len(work.ids) for work in works]
        return Batch(
            positions=torch.tensor(positions),
            starts=torch.tensor(starts),
            lengths=torch.tensor(lengths),
            page_table=torch.tensor([pages + [0] * (widest - len(pages)) for pages in table]),
            kv_rows=torch.tensor(kv_rows),
            read_rows=torch.tensor([work.line.row if work.line.length else 0 for work in works]),
            write_rows=torch.tensor([row if work.live else 0 for row, work in zip(written, works, strict=True)]),
            decode=decode,
            stores=Stores(*(torch.tensor(column) for column in zip(*stores, strict=True))) if stores else None,
            longest_query=max(len(work.ids) for work in works),
            longest=max(lengths),
        )

    def hidden(self, *works: Work) -> list[Tensor]:
        """Runs one forward; the hidden vectors of each work's tokens, [tokens, hidden]."""
        batch = self.batch(works)
        ids = torch.tensor([token for work in works for token in work.ids])
        output = self.model.forward(ids, batch, self.pages, self.rows)
        for work in works:
            if work.live:
                work.line.length += len(work.ids)
                work.line.row = work.line.row if work.write_row is None else work.write_row
        return list(output.split([len(work.ids) for work in works]))

    def logits(self, *works: Work) -> list[Tensor]:
        """Runs one forward; the logits of each work's tokens, [tokens, vocabulary]."""
        return [self.model.logits(hidden) for hidden in self.hidden(*works)]

    def run(self, line: Line, ids: Sequence[int], *chunks: int) -> Tensor:
        """The logits of `ids` appended to the line in forwards of the given lengths, the last one repeated."""
        outputs, place = [], 0
        sizes = list(chunks or [len(ids)])
        while place < len(ids):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            outputs += self.logits(Work(line, ids[place : place + size]))
            place += size
        return torch.cat(outputs)


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected value, over the last axis; NaN counts as infinite."""
    gap = (actual - expected).abs().amax(-1) / expected.abs().amax(-1)
    return float(gap.nan_to_num(torch.inf).max())


@pytest.fixture
def make_model() -> Callable[..., Qwen35]:
    return build


@pytest.fixture
def make_bench() -> type[Bench]:
    return Bench


@pytest.fixture
def make_work() -> type[Work]:
    return Work


@pytest.fixture
def relative_difference() -> Callable[[Tensor, Tensor], float]:
    return difference


@pytest.fixture
def ids() -> list[int]:
    """200 token ids."""
    return torch.randint(0, 96, (200,), generator=torch.Generator().manual_seed(11)).tolist()
