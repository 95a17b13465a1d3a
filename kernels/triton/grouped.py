"""The mixture of experts for several tokens: (token, expert) pairs are grouped by expert, so that each expert's weights
are read once a tile of its tokens, and multiplied on the matrix units.

A *pair* is token * experts_per_token + slot. The shared expert's pairs, one for each token, come behind all others. A
*place* is where a pair stands when they are sorted by expert; the shared expert's pairs keep their numbers as places.
A *tile* is up to `tile` places of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.triton.launch import chained, dot, release_next, wait_for_previous

FEW_TOKENS = 32
"""Up to so many tokens are grouped in one program, which compares all pairs with each other."""
PAIRS_BLOCK = 1024


@dataclass(frozen=True)
class Product:
    """A program's share of a product: `rows` of a weight (of the gate and of the up, each), `depth` of them a step."""

    rows: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiling:
    """Places in a tile, and how the two products of its expert are cut."""

    places: int
    gate_up: Product
    down: Product


TILINGS = (
    Tiling(16, Product(64, 128, 4, 3), Product(128, 128, 4, 3)),
    Tiling(32, Product(64, 64, 4, 4), Product(128, 64, 4, 4)),
    Tiling(64, Product(64, 64, 4, 4), Product(128, 64, 4, 4)),
    Tiling(128, Product(128, 64, 8, 4), Product(128, 64, 8, 3)),
)
TILE_ROOM = 1.25
"""Places in a tile, at least, for each pair of an average expert: most experts should need one tile."""


def tiling(pairs: int, experts: int) -> Tiling:
    """For few pairs an expert the weights are what costs, for many the padding of tiles is small."""
    enough = (option for option in TILINGS if option.places * experts >= TILE_ROOM * pairs)
    return next(enough, TILINGS[-1])


@dataclass(frozen=True)
class Groups:
    """Pairs by expert.

    Attributes:
        order: [pairs], the pair at each place.
        tiles: [at least as many as there can be, 3]: expert, first place, end of the expert's places.
        count: [1], how many tiles there are.
    """

    order: Tensor
    tiles: Tensor
    count: Tensor


def grouped_mixture(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared_gate_up: Tensor,
    shared_down: Tensor,
    shared_gate: Tensor,
) -> Tensor:
    """`mixture`, for any number of tokens."""
    (tokens, hidden), (pairs, chosen) = x.shape, (experts.numel(), experts.shape[1])
    width, shared_width = down.shape[2], shared_down.shape[1]
    y = x.new_empty(tokens, hidden)
    if not tokens:
        return y
    cut = tiling(pairs, gate_up.shape[0])
    groups = group(experts, gate_up.shape[0], cut.places)
    shared_tiles = triton.cdiv(tokens, cut.places)
    tiles = shared_tiles + groups.tiles.shape[0]
    inner = x.new_empty(pairs + tokens, max(width, shared_width))
    outer = x.new_empty(pairs + tokens, hidden)
    sizes = {"HIDDEN": hidden, "WIDTH": width, "SHARED_WIDTH": shared_width, "PLACES": cut.places}
    _gate_up_kernel[(triton.cdiv(inner.shape[1], cut.gate_up.rows) * tiles,)](
        x,
        gate_up,
        shared_gate_up,
        groups.order,
        groups.tiles,
        groups.count,
        inner,
        tokens,
        pairs,
        shared_tiles,
        x.stride(0),
        **sizes,
        CHOSEN=chosen,
        ROWS=cut.gate_up.rows,
        DEPTH=min(cut.gate_up.depth, triton.next_power_of_2(hidden)),
        num_warps=cut.gate_up.warps,
        num_stages=cut.gate_up.stages,
        **chained(x.device),
    )
    _down_kernel[(triton.cdiv(hidden, cut.down.rows) * tiles,)](
        inner,
        down,
        shared_down,
        groups.order,
        groups.tiles,
        groups.count,
        outer,
        tokens,
        pairs,
        shared_tiles,
        **sizes,
        ROWS=cut.down.rows,
        DEPTH=cut.down.depth,
        num_warps=cut.down.warps,
        num_stages=cut.down.stages,
        **chained(x.device),
    )
    block = triton.next_power_of_2(hidden)
    _combine_kernel[(tokens,)](
        x,
        weights,
        shared_gate,
        outer,
        y,
        pairs,
        x.stride(0),
        HIDDEN=hidden,
        CHOSEN=chosen,
        BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
        **chained(x.device),
    )
    return y


def group(experts: Tensor, count: int, tile: int) -> Groups:
    """experts [tokens, experts_per_token], each below `count`, in tiles of up to `tile` places."""
    device, pairs = experts.device, experts.numel()
    most = min(count, pairs)  # of which every one may have a tile that is not full
    tiles = torch.empty(((pairs + most * (tile - 1)) // tile, 3), dtype=torch.int32, device=device)
    order, tile_count = (torch.empty(size, dtype=torch.int32, device=device) for size in (pairs, 1))
    groups = Groups(order, tiles, tile_count)
    block = triton.next_power_of_2(count)
    if experts.shape[0] <= FEW_TOKENS:
        _group_kernel[(1,)](
            experts,
            order,
            tiles,
            tile_count,
            pairs,
            BLOCK=block,
            PAIRS=triton.next_power_of_2(FEW_TOKENS * experts.shape[1]),
            CHUNK=16,
            TILE=tile,
            num_warps=16,
            **chained(device),
        )
        return groups
    totals = torch.zeros(count, dtype=torch.int32, device=device)
    starts, ranks = torch.empty_like(totals), torch.empty_like(order)
    grid = (triton.cdiv(pairs, PAIRS_BLOCK),)
    _rank_kernel[grid](experts, totals, ranks, pairs, BLOCK=PAIRS_BLOCK)
    _tiles_kernel[(1,)](totals, starts, tiles, tile_count, EXPERTS=count, BLOCK=block, TILE=tile)
    _order_kernel[grid](experts, starts, ranks, order, pairs, BLOCK=PAIRS_BLOCK)
    return groups


@triton.jit
def _write_tiles(total, expert, tiles, tile_count, TILE: tl.constexpr):
    """Writes the tiles of experts that have `total` pairs each; returns their first places. All are [experts]."""
    start = tl.cumsum(total, 0) - total
    own = (total + TILE - 1) // TILE
    tile = tl.cumsum(own, 0) - own
    tl.store(tile_count, tl.sum(own, 0))
    most = tl.max(own, 0)
    turn = 0
    while turn < most:
        at = tiles + 3 * (tile + turn)
        has = turn < own
        tl.store(at, expert, mask=has)
        tl.store(at + 1, start + turn * TILE, mask=has)
        tl.store(at + 2, start + total, mask=has)
        turn += 1
    return start


@triton.jit(do_not_specialize=["pairs"])
def _group_kernel(
    experts,
    order,
    tiles,
    tile_count,
    pairs,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """All of `Groups` in one program, for up to PAIRS pairs."""
    wait_for_previous(PDL)
    release_next(PDL)
    pair = tl.arange(0, PAIRS)
    chunk = tl.arange(0, CHUNK)
    expert = tl.arange(0, BLOCK)
    key = tl.load(experts + pair, mask=pair < pairs, other=0).to(tl.int32) * PAIRS + pair
    equal = tl.zeros((BLOCK, CHUNK), tl.int32)
    before = tl.zeros((PAIRS, CHUNK), tl.int32)
    start = 0
    while start < pairs:
        other = start + chunk
        others = tl.load(experts + other, mask=other < pairs, other=BLOCK).to(tl.int32)
        equal += (others[None, :] == expert[:, None]).to(tl.int32)
        before += ((others * PAIRS + other)[None, :] < key[:, None]).to(tl.int32)
        start += CHUNK
    _write_tiles(tl.sum(equal, 1), expert, tiles, tile_count, TILE)
    tl.store(order + tl.sum(before, 1), pair, mask=pair < pairs)


@triton.jit(do_not_specialize=["pairs"])
def _rank_kernel(experts, totals, ranks, pairs, BLOCK: tl.constexpr):
    """Numbers an expert's pairs as they come, and counts them in `totals`. The numbers differ from run to run; a pair's
    products do not depend on its place."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = pair < pairs
    expert = tl.load(experts + pair, mask=there, other=0)
    rank = tl.atomic_add(totals + expert, 1, mask=there, sem="relaxed")
    tl.store(ranks + pair, rank, mask=there)


@triton.jit
def _tiles_kernel(totals, starts, tiles, tile_count, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    expert = tl.arange(0, BLOCK)
    total = tl.load(totals + expert, mask=expert < EXPERTS, other=0)
    tl.store(starts + expert, _write_tiles(total, expert, tiles, tile_count, TILE), mask=expert < EXPERTS)


@triton.jit(do_not_specialize=["pairs"])
def _order_kernel(experts, starts, ranks, order, pairs, BLOCK: tl.constexpr):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = pair < pairs
    expert = tl.load(experts + pair, mask=there, other=0)
    place = tl.load(starts + expert, mask=there, other=0) + tl.load(ranks + pair, mask=there, other=0)
    tl.store(order + place, pair, mask=there)


@triton.jit
def _places(tile, order, tiles, tokens, pairs, shared_tiles, PLACES: tl.constexpr):
    """The expert of a tile, its places and their pairs, and which of them there are. The shared expert's tiles come
    first; its number is 0."""
    is_shared = tile < shared_tiles
    at = tiles + 3 * (tile - shared_tiles)
    expert = tl.load(at, mask=not is_shared, other=0).to(tl.int64)
    first = tl.where(is_shared, pairs + tile * PLACES, tl.load(at + 1, mask=not is_shared, other=0))
    end = tl.where(is_shared, pairs + tokens, tl.load(at + 2, mask=not is_shared, other=0))
    place = first + tl.arange(0, PLACES)
    there = place < end
    pair = tl.where(is_shared, place, tl.load(order + place, mask=there & (place < pairs), other=0))
    return expert, place, pair, there


@triton.jit(do_not_specialize=["tokens", "pairs", "shared_tiles"])
def _gate_up_kernel(
    x,
    gate_up,
    shared_gate_up,
    order,
    tiles,
    tile_count,
    inner,
    tokens,
    pairs,
    shared_tiles,
    x_stride,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED_WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS of the SwiGLU of one tile. inner: [places, the larger width]

    A tile's programs follow each other, so that what they share comes from the L2. Weights are the left operand: there
    are always enough of their rows for the matrix units.
    """
    INNER: tl.constexpr = max(WIDTH, SHARED_WIDTH)
    BLOCKS: tl.constexpr = (INNER + ROWS - 1) // ROWS
    tile = tl.program_id(0) // BLOCKS
    wait_for_previous(PDL)
    release_next(PDL)
    if tile >= shared_tiles + tl.load(tile_count):
        return
    expert, place, pair, there = _places(tile, order, tiles, tokens, pairs, shared_tiles, PLACES)
    weight = gate_up + expert * (2 * WIDTH * HIDDEN)
    token = pair // CHOSEN
    width = WIDTH
    if tile < shared_tiles:
        weight = shared_gate_up
        token = pair - pairs
        width = SHARED_WIDTH
    row = tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    gate_at = weight + row[:, None] * HIDDEN + depth[None, :]
    up_at = gate_at + width * HIDDEN
    x_at = x + token.to(tl.int64)[None, :] * x_stride + depth[:, None]
    gate = tl.zeros((ROWS, PLACES), tl.float32)
    up = tl.zeros((ROWS, PLACES), tl.float32)
    for start in range(0, HIDDEN, DEPTH):
        mask = (row < width)[:, None]
        x_mask = there[None, :]
        if HIDDEN % DEPTH:
            mask = mask & (start + depth < HIDDEN)[None, :]
            x_mask = x_mask & (start + depth < HIDDEN)[:, None]
        value = tl.load(x_at + start, mask=x_mask, other=0.0)
        gate = dot(tl.load(gate_at + start, mask=mask, other=0.0), value, gate)
        up = dot(tl.load(up_at + start, mask=mask, other=0.0), value, up)
    result = gate * tl.sigmoid(gate) * up
    at = inner + place.to(tl.int64)[None, :] * INNER + row[:, None]
    tl.store(at, result.to(inner.dtype.element_ty), mask=(row < width)[:, None] & there[None, :])


@triton.jit(do_not_specialize=["tokens", "pairs", "shared_tiles"])
def _down_kernel(
    inner,
    down,
    shared_down,
    order,
    tiles,
    tile_count,
    outer,
    tokens,
    pairs,
    shared_tiles,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED_WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS of the output of one tile. outer: [pairs, HIDDEN], the shared expert's behind the others."""
    INNER: tl.constexpr = max(WIDTH, SHARED_WIDTH)
    BLOCKS: tl.constexpr = (HIDDEN + ROWS - 1) // ROWS
    tile = tl.program_id(0) // BLOCKS
    wait_for_previous(PDL)
    release_next(PDL)
    if tile >= shared_tiles + tl.load(tile_count):
        return
    expert, place, pair, there = _places(tile, order, tiles, tokens, pairs, shared_tiles, PLACES)
    row = tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    at = down + expert * (HIDDEN * WIDTH) + row[:, None] * WIDTH + depth[None, :]
    width = WIDTH
    if tile < shared_tiles:
        at = shared_down + row[:, None] * SHARED_WIDTH + depth[None, :]
        width = SHARED_WIDTH
    inner_at = inner + place.to(tl.int64)[None, :] * INNER + depth[:, None]
    total = tl.zeros((ROWS, PLACES), tl.float32)
    for start in range(0, INNER, DEPTH):
        mask = (row < HIDDEN)[:, None]
        inner_mask = there[None, :]
        if INNER % DEPTH or WIDTH != SHARED_WIDTH:
            mask = mask & (start + depth < width)[None, :]
            inner_mask = inner_mask & (start + depth < width)[:, None]
        value = tl.load(inner_at + start, mask=inner_mask, other=0.0)
        total = dot(tl.load(at + start, mask=mask, other=0.0), value, total)
    at = outer + pair.to(tl.int64)[None, :] * HIDDEN + row[:, None]
    tl.store(at, total.to(outer.dtype.element_ty), mask=(row < HIDDEN)[:, None] & there[None, :])


@triton.jit(do_not_specialize=["pairs"])
def _combine_kernel(
    x,
    weights,
    shared_gate,
    outer,
    y,
    pairs,
    x_stride,
    HIDDEN: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token's output: the sum over its pairs by weight, and the shared expert's by sigmoid(x · shared_gate)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    share = tl.load(shared_gate + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    release_next(PDL)
    value = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    at = outer + (pairs + token) * HIDDEN + column
    total = tl.sigmoid(tl.sum(value * share, 0)) * tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for slot in tl.static_range(CHOSEN):
        pair = token * CHOSEN + slot
        routed = tl.load(outer + pair * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * routed
    tl.store(y + token * HIDDEN + column, total.to(y.dtype.element_ty), mask=inside)
