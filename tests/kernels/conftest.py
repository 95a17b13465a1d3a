"""Ragged sequences over state rows, as the operators' tests use them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

SINK, FORK, UNUSED = 0, 3, 9


@dataclass(frozen=True)
class Kept:
    sequences: Tensor
    counts: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Ragged:
    """Sequences laid flat, with every arrangement of rows that an engine makes.

    Of the first five: 0 has no history and is kept; 1 reads and writes the row 2; 2 and 3 both continue from row 3, 2
    into row 4, 3 into row 5; 4 reads row 4, which 2 overwrites, and is thrown away. Further ones have rows of their own
    from 20 on. Every token of every sequence is also stored, in rows from 40 on.
    """

    lengths: list[int]
    starts: Tensor
    read: Tensor
    write: Tensor
    stores: Kept

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def rows(self) -> int:
        return 40 + self.tokens


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def ragged() -> Callable[[list[int]], Ragged]:
    def build(lengths: list[int]) -> Ragged:
        read, write = [0, 2, FORK, FORK, 4], [1, 2, 4, 5, SINK]
        for extra in range(len(lengths) - 5):
            read.append(20 + extra)
            write.append(20 + extra)
        pairs = [(sequence, count + 1) for sequence, length in enumerate(lengths) for count in range(length)]
        stores = Kept(
            torch.tensor([sequence for sequence, _ in pairs]),
            torch.tensor([count for _, count in pairs]),
            torch.arange(40, 40 + len(pairs)),
        )
        starts = torch.tensor([0, *lengths]).cumsum(0)
        return Ragged(lengths, starts, torch.tensor(read[: len(lengths)]), torch.tensor(write[: len(lengths)]), stores)

    return build
