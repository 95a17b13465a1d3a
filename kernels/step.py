"""The two ends of a decode step: from what the device knows of each place to a batch, and from chosen tokens back.

A place is an index into arrays that live as long as the engine; a step runs some of them. What is finished takes part
in the step but leaves no trace: its K and V go to page 0 and its state to row 0, the sinks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NOT_LIVE = -2


@dataclass(frozen=True)
class StepInputs:
    """A decode step's sequences, all [n] int64 unless said otherwise.

    Attributes:
        tokens, positions: the token that goes through the model, and where. lengths: with it.
        page_table: [n, pages]; entries past the length hold anything.
        kv_rows: where its K and V go.
        read_rows, write_rows: the state before and after it.
        following: index of the row after it in the place's ring.
        live: [n] bool.
    """

    tokens: Tensor
    positions: Tensor
    lengths: Tensor
    page_table: Tensor
    kv_rows: Tensor
    read_rows: Tensor
    write_rows: Tensor
    following: Tensor
    live: Tensor


def begin_step(
    token: Tensor,
    length: Tensor,
    ring: Tensor,
    at: Tensor,
    finished: Tensor,
    table: Tensor,
    embedded: Tensor,
    places: Tensor,
    page_size: int,
    pages: int,
) -> StepInputs:
    """The next step of some places.

    Args:
        token, length, at: [places] int64, the next token, tokens that went through, the index of the state after them.
        ring: [places, rows] int64, the rows that the states go through in turn.
        finished: [places] bool.
        table: [places, pages of a full context] int64, page ids.
        embedded: [] int64, counts tokens of live sequences; changed in place.
        places: [n] int64, which ones.
        pages: how many of the table's columns the longest of them needs, at least.
    """
    positions, live = length[places], ~finished[places]
    rows, current = ring[places], at[places]
    following = (current + 1) % ring.shape[1]
    offset = positions % page_size
    page = table[places, positions // page_size]
    embedded += live.sum()
    return StepInputs(
        tokens=token[places],
        positions=positions,
        lengths=positions + 1,
        page_table=table[places, :pages],
        kv_rows=torch.where(live, page * page_size + offset, offset),
        read_rows=rows.gather(1, current[:, None])[:, 0],
        write_rows=torch.where(live, rows.gather(1, following[:, None])[:, 0], 0),
        following=following,
        live=live,
    )


def end_step(
    token: Tensor,
    length: Tensor,
    at: Tensor,
    finished: Tensor,
    limit: Tensor,
    stop_ids: Tensor,
    places: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    following: Tensor,
    live: Tensor,
) -> Tensor:
    """Writes what a step chose back to its places. What is not live stays as it is, and finished.

    Args:
        token, length, at, finished: as in `begin_step`; changed in place.
        limit: [places] int64, the length, with the chosen token, at which a place is finished.
        stop_ids: [places, n] int64, padded with -1: tokens that finish it.
        places: [n] int64; distinct but for those not live.
        tokens: [n] int64, chosen; -1, no valid one, finishes.
        lengths: [n] int64, tokens that went through the model.
        following: [n] int64, the index in the ring of the state after them.
        live: [n] bool.
    Returns:
        [n] int64, what the host is told: the token, -1, or `NOT_LIVE`.
    """
    stopped = (stop_ids[places] == tokens[:, None]).any(-1)
    token[places] = torch.where(live, tokens.clamp(min=0), token[places])
    finished[places] = stopped | (tokens < 0) | (lengths + 1 >= limit[places]) | ~live
    length[places] = torch.where(live, lengths, length[places])
    at[places] = torch.where(live, following, at[places])
    return torch.where(live, tokens, NOT_LIVE)
