from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed.kernels import moe as reference
from tokenspeed.kernels.triton import grouped
from tokenspeed.kernels.triton import moe as kernels

HIDDEN, EXPERTS, WIDTH, SHARED_WIDTH, CHOSEN = 24, 6, 40, 72, 2  # no block's multiple, and like the pocket model's
KINDS = [torch.float32, torch.bfloat16]


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def bound(dtype: torch.dtype) -> float:
    """bfloat16 is rounded to three times on the way; the interpreter truncates."""
    return 1e-6 if dtype == torch.float32 else 1.5e-2


class Layer:
    """A mixture's weights, in the order of the operator's arguments."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        hidden: int = HIDDEN,
        width: int = WIDTH,
        shared: int = SHARED_WIDTH,
    ) -> None:
        def normal(*shape: int) -> Tensor:
            return (torch.randn(*shape, device=device) * shape[-1] ** -0.5).to(dtype)

        self.weights = (
            normal(EXPERTS, 2 * width, hidden),
            normal(EXPERTS, hidden, width),
            normal(2 * shared, hidden),
            normal(hidden, shared),
            normal(1, hidden),
        )

    def exact(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        doubles = [tensor.double() for tensor in self.weights]
        return reference.mixture(x.double(), weights.double(), experts, *doubles)


def inputs(
    tokens: int, dtype: torch.dtype, device: torch.device, hidden: int = HIDDEN
) -> tuple[Tensor, Tensor, Tensor]:
    """x, a view of a wider tensor whose other elements are NaN, and random choices of the first five experts."""
    wide = torch.full((tokens, hidden + 24), torch.nan, dtype=dtype, device=device)
    x = wide[:, 8 : hidden + 8]
    x.copy_(torch.randn(tokens, hidden))
    logits = torch.randn(tokens, EXPERTS, device=device)
    logits[:, 5] = -torch.inf
    return x, *reference.route(logits, CHOSEN)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    new_empty = Tensor.new_empty

    def unwritten(self: Tensor, *shape: int, **options: Any) -> Tensor:
        made = new_empty(self, *shape, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", unwritten)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("experts", "chosen"), [(6, 1), (8, 2), (300, 10), (512, 16)])
def test_routing(dtype: torch.dtype, experts: int, chosen: int, device: torch.device) -> None:
    wide = torch.full((5, experts + 7), torch.nan, dtype=dtype, device=device)
    logits = wide[:, 3 : experts + 3]
    logits.copy_(torch.randn(5, experts) * 2)
    weights, ids = kernels.route(logits, chosen)
    expected, expected_ids = reference.route(logits, chosen)
    assert torch.equal(ids, expected_ids)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [*KINDS, torch.float16])
def test_routing_of_equal_and_odd_logits(dtype: torch.dtype, device: torch.device) -> None:
    nan, inf = torch.nan, torch.inf
    rows = [
        [1.0, 3.0, 1.0, 3.0, -0.0, 0.0, 1.0],
        [-1.0, -3.0, -1.0, -3.0, -2.0, -2.0, -2.0],
        [0.0, nan, 5.0, -nan, 1.0, inf, 1.0],
        [nan] * 7,
        [-inf] * 5 + [-9.0, -inf],
        [-inf] * 7,
        [2.0, 2.0078125, 2.015625, 2.0, 2.0234375, -2.0078125, -2.0],  # neighbours in bfloat16
    ]
    logits = torch.tensor(rows, dtype=dtype, device=device)
    weights, ids = kernels.route(logits, 6)
    expected, expected_ids = reference.route(logits.cpu(), 6)  # a GPU's sort puts a NaN with a sign last
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(weights.cpu(), expected, rtol=1e-6, atol=0, equal_nan=True)
    assert kernels.route(logits[:0], 6)[1].shape == (0, 6)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("tokens", "width"), [(0, 8), (3, 80), (2, 1100)])
def test_swiglu(dtype: torch.dtype, tokens: int, width: int, device: torch.device) -> None:
    gate_up = torch.randn(tokens, 2 * width + 9, device=device).to(dtype)[:, 5 : 2 * width + 5]
    got = kernels.swiglu(gate_up)
    assert got.shape == (tokens, width)
    assert got.dtype == dtype
    if tokens:
        assert error(got, reference.swiglu(gate_up.double())) < bound(dtype)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("tokens", [0, 1, 4, 5, 32, 33, 70])
def test_mixture(dtype: torch.dtype, tokens: int, device: torch.device) -> None:
    """One token, and both sides of each border between the ways. The last expert has no token."""
    assert (kernels.STREAMED_TOKENS, grouped.FEW_TOKENS) == (4, 32)
    layer = Layer(dtype, device)
    x, weights, experts = inputs(tokens, dtype, device)
    y = kernels.mixture(x, weights, experts, *layer.weights)
    assert y.shape == (tokens, HIDDEN)
    assert y.dtype == dtype
    if tokens:
        assert error(y, layer.exact(x, weights, experts)) < bound(dtype)


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize(("hidden", "width", "shared"), [(64, 128, 128), (24, 130, 24), (160, 16, 200)])
def test_widths(tokens: int, hidden: int, width: int, shared: int, device: torch.device) -> None:
    """Multiples of the blocks, and several blocks of which the last is not full."""
    layer = Layer(torch.float32, device, hidden, width, shared)
    x, weights, experts = inputs(tokens, torch.float32, device, hidden)
    y = kernels.mixture(x, weights, experts, *layer.weights)
    assert error(y, layer.exact(x, weights, experts)) < bound(torch.float32)


@pytest.mark.parametrize("option", grouped.TILINGS, ids=lambda option: f"{option.places} places")
def test_every_tiling(option: grouped.Tiling, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "TILINGS", (option,))
    layer = Layer(torch.float32, device)
    x, weights, experts = inputs(45, torch.float32, device)
    y = kernels.mixture(x, weights, experts, *layer.weights)
    assert error(y, layer.exact(x, weights, experts)) < bound(torch.float32)


def test_tiles_that_nobody_wrote_are_not_read(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def group(*arguments: Any) -> grouped.Groups:
        groups = original(*arguments)
        assert int(groups.count) < groups.tiles.shape[0]
        groups.tiles[int(groups.count) :] = torch.tensor([5, 0, 8], dtype=torch.int32)
        return groups

    original = grouped.group
    monkeypatch.setattr(grouped, "group", group)
    layer = Layer(torch.float32, device)
    x, weights, experts = inputs(33, torch.float32, device)
    y = kernels.mixture(x, weights, experts, *layer.weights)
    assert error(y, layer.exact(x, weights, experts)) < bound(torch.float32)


@pytest.mark.parametrize("tokens", [3, 32, 40])
def test_all_tokens_choose_the_same_experts(tokens: int, device: torch.device) -> None:
    layer = Layer(torch.float32, device)
    x, weights, experts = inputs(tokens, torch.float32, device)
    experts[:] = torch.tensor([5, 0])
    y = kernels.mixture(x, weights, experts, *layer.weights)
    assert error(y, layer.exact(x, weights, experts)) < bound(torch.float32)


@pytest.mark.parametrize("tokens", [3, 20, 40])
def test_a_token_that_is_nan_stays_alone(tokens: int, device: torch.device) -> None:
    layer = Layer(torch.float32, device)
    x, weights, experts = inputs(tokens, torch.float32, device)
    clean = kernels.mixture(x, weights, experts, *layer.weights)
    x[1] = torch.nan
    weights[1], experts[1] = (
        row[0] for row in kernels.route(torch.full((1, EXPERTS), torch.nan, device=device), CHOSEN)
    )
    assert weights[1].isnan().all()
    dirty = kernels.mixture(x, weights, experts, *layer.weights)
    assert dirty[1].isnan().all()
    assert torch.equal(dirty[2:], clean[2:])
    assert torch.equal(dirty[0], clean[0])


@pytest.mark.parametrize("tokens", [5, 32, 33, 200])
@pytest.mark.parametrize("tile", [16, 64])
def test_groups(tokens: int, tile: int, device: torch.device) -> None:
    """Every pair is in exactly one tile, with its expert; there are no more tiles than needed."""
    shares = torch.tensor([0.0, 9, 1, 0, 3, 0.1, 0, 30, 1], device=device)
    experts = torch.stack([shares.multinomial(3) for _ in range(tokens)])
    groups = grouped.group(experts, 9, tile)
    assert sorted(groups.order.tolist()) == list(range(3 * tokens))
    counted = int(groups.count)
    assert counted == sum(-(-count // tile) for count in experts.flatten().bincount().tolist())
    assert counted <= groups.tiles.shape[0]
    assert grouped.group(experts.zero_(), 9, tile).tiles.shape[0] >= -(-3 * tokens // tile)
    experts_of = {}
    for expert, first, end in groups.tiles[:counted].tolist():
        for pair in groups.order[first : min(first + tile, end)].tolist():
            assert pair not in experts_of
            experts_of[pair] = expert
    assert len(experts_of) == 3 * tokens


def test_a_tiling_is_chosen_by_pairs_per_expert() -> None:
    """A tile has room for 1.25 times the pairs of an average expert, of which a token brings 8 / 256."""
    chosen = [grouped.tiling(tokens * 8, 256).places for tokens in (5, 32, 409, 410, 800, 819, 820, 1639, 8192)]
    assert chosen == [16, 16, 16, 32, 32, 32, 64, 128, 128]
