"""Sequences laid flat, cut into pieces of SIZE tokens that never cross a sequence's end.

Where a piece lies is computed on the device from `starts`: sequence s owns the slots from starts[s] // SIZE + s on. Its
pieces are at most those up to the next sequence's first slot, so a number of slots that the host knows is enough for
any lengths; a few of them are empty.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

GATHER_BLOCK = 4096
"""Elements copied by one program of `gather_rows`."""


def slots(tokens: int, sequences: int, size: int) -> int:
    """How many pieces of `size` tokens there are room for."""
    return tokens // size + sequences


def search_steps(sequences: int) -> int:
    """Halvings that `piece` needs to find a sequence."""
    return max(0, (sequences - 1).bit_length())


@triton.jit
def first_slot(starts, sequence, SIZE: tl.constexpr):
    return tl.load(starts + sequence) // SIZE + sequence


@triton.jit
def piece(slot, starts, sequences, steps, SIZE: tl.constexpr):
    """The sequence of a slot, the sequence's first token, and the tokens from `begin` to `end` of the piece: none
    (begin >= end) in an empty slot."""
    sequence = slot * 0
    for step in range(steps):
        later = sequence + (1 << (steps - 1 - step))
        inside = later < sequences
        reached = inside & (first_slot(starts, tl.where(inside, later, 0), SIZE) <= slot)
        sequence = tl.where(reached, later, sequence)
    start, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    begin = start + (slot - start // SIZE - sequence) * SIZE
    return sequence, start, begin, tl.minimum(begin + SIZE, end)


def gather_rows(states: Tensor, rows: Tensor) -> Tensor:
    """A copy of `states[rows]`, zero where the row is 0, which may hold NaN."""
    gathered = states.new_empty(rows.shape[0], *states.shape[1:])
    size = gathered[0].numel()
    grid = (triton.cdiv(size, GATHER_BLOCK), rows.shape[0])
    _gather_rows_kernel[grid](states, rows, gathered, SIZE=size, BLOCK=GATHER_BLOCK, num_warps=8)
    return gathered


@triton.jit(do_not_specialize=["rows"])
def _gather_rows_kernel(states, rows, gathered, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + index)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(states + row * SIZE + place, mask=(place < SIZE) & (row != 0), other=0.0)
    tl.store(gathered + index * SIZE + place, values, mask=place < SIZE)
