"""The two ends of a decode step, a launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.step import NOT_LIVE, StepInputs
from tokenspeed.kernels.triton.launch import chained, release_next, wait_for_previous

TABLE_BLOCK = 1024


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
    n = places.shape[0]
    tokens, positions, lengths, kv_rows, read_rows, write_rows, following = (
        torch.empty(n, dtype=torch.int64, device=places.device) for _ in range(7)
    )
    live = torch.empty(n, dtype=torch.bool, device=places.device)
    page_table = torch.empty((n, pages), dtype=torch.int64, device=places.device)
    _begin_kernel[(n, triton.cdiv(pages, TABLE_BLOCK))](
        token,
        length,
        ring,
        at,
        finished,
        table,
        embedded,
        places,
        tokens,
        positions,
        lengths,
        kv_rows,
        read_rows,
        write_rows,
        following,
        live,
        page_table,
        table.stride(0),
        pages,
        RING=ring.shape[1],
        PAGE_SIZE=page_size,
        BLOCK=TABLE_BLOCK,
        PDL=False,  # what was launched before a step has ended before any other kernel of it begins
    )
    return StepInputs(tokens, positions, lengths, page_table, kv_rows, read_rows, write_rows, following, live)


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
    told = torch.empty_like(tokens)
    _end_kernel[(places.shape[0],)](
        token,
        length,
        at,
        finished,
        limit,
        stop_ids,
        places,
        tokens,
        lengths,
        following,
        live,
        told,
        DEAD=NOT_LIVE,
        STOPS=stop_ids.shape[1],
        BLOCK=triton.next_power_of_2(stop_ids.shape[1]),
        num_warps=1,
        **chained(places.device),
    )
    return told


@triton.jit(do_not_specialize=["table_stride", "pages"])
def _begin_kernel(
    token,
    length,
    ring,
    at,
    finished,
    table,
    embedded,
    places,
    tokens,
    positions,
    lengths,
    kv_rows,
    read_rows,
    write_rows,
    following,
    live,
    page_table,
    table_stride,
    pages,
    RING: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of a sequence's page table; the first program of each sequence also does the rest."""
    release_next(PDL)
    wait_for_previous(PDL)
    i = tl.program_id(0).to(tl.int64)
    place = tl.load(places + i)
    position = tl.load(length + place)
    start = tl.program_id(1) * BLOCK
    if start * PAGE_SIZE <= position:
        index = start + tl.arange(0, BLOCK)
        needed = (index < pages) & (index * PAGE_SIZE <= position)
        ids = tl.load(table + place * table_stride + index, mask=needed, other=0)
        tl.store(page_table + i * pages + index, ids, mask=needed)
    if start == 0:
        running = tl.load(finished + place) == 0
        current = tl.load(at + place)
        after = (current + 1) % RING
        offset = position % PAGE_SIZE
        page = tl.load(table + place * table_stride + position // PAGE_SIZE)
        tl.store(tokens + i, tl.load(token + place))
        tl.store(positions + i, position)
        tl.store(lengths + i, position + 1)
        tl.store(kv_rows + i, tl.where(running, page * PAGE_SIZE + offset, offset))
        tl.store(read_rows + i, tl.load(ring + place * RING + current))
        tl.store(write_rows + i, tl.where(running, tl.load(ring + place * RING + after), 0))
        tl.store(following + i, after)
        tl.store(live + i, running)
        tl.atomic_add(embedded, running.to(tl.int64))


@triton.jit
def _end_kernel(
    token,
    length,
    at,
    finished,
    limit,
    stop_ids,
    places,
    tokens,
    lengths,
    following,
    live,
    told,
    DEAD: tl.constexpr,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    release_next(PDL)
    wait_for_previous(PDL)
    i = tl.program_id(0).to(tl.int64)
    place = tl.load(places + i)
    running = tl.load(live + i)
    chosen = tl.load(tokens + i)
    tl.store(told + i, tl.where(running, chosen, DEAD))
    if running:
        now = tl.load(lengths + i)
        stop = tl.arange(0, BLOCK)
        stops = tl.load(stop_ids + place * STOPS + stop, mask=stop < STOPS, other=-1)
        stopped = tl.max((stops == chosen).to(tl.int32), 0) > 0
        done = stopped | (chosen < 0) | (now + 1 >= tl.load(limit + place))
        tl.store(token + place, tl.maximum(chosen, 0))
        tl.store(length + place, now)
        tl.store(at + place, tl.load(following + i))
        tl.store(finished + place, done)
