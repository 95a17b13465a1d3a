"""State rows as the operators see them: one tensor per layer, indexed by row, with row 0 as the sink."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Stores(Protocol):
    """States to keep from inside a forward: entry i keeps, in row `rows[i]`, the state of sequence `sequences[i]` after
    `counts[i]` (1 … its query length) of its tokens. Each is [stores] int64."""

    @property
    def sequences(self) -> Tensor: ...
    @property
    def counts(self) -> Tensor: ...
    @property
    def rows(self) -> Tensor: ...


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type the reference operators compute in: float32, or float64 for float64 input."""
    return torch.promote_types(torch.float32, dtype)


def gather_rows(states: Tensor, rows: Tensor) -> Tensor:
    """A copy of `states[rows]`, zero where the row is 0.

    Row 0 holds whatever was last thrown away, NaN included, so it is overwritten rather than multiplied.
    """
    gathered = states.index_select(0, rows)
    return gathered.masked_fill_((rows == 0).view(-1, *[1] * (states.dim() - 1)), 0)
