from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tokenspeed.kernels.moe import add_shared_expert, mixture, route, routed_experts, swiglu


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def test_route_is_a_softmax_over_all_then_the_largest_rescaled() -> None:
    logits = torch.randn(20, 6, dtype=torch.float64) * 2
    weights, experts = route(logits, 3)
    for row, (weight, expert) in zip(
        logits.tolist(), zip(weights.tolist(), experts.tolist(), strict=True), strict=True
    ):
        chosen = sorted(range(6), key=lambda e, row=row: -row[e])[:3]
        assert expert == chosen
        share = [math.exp(row[e]) for e in chosen]
        torch.testing.assert_close(weight, [value / sum(share) for value in share], rtol=1e-12, atol=0)


def test_route_of_bfloat16_logits_is_in_float32() -> None:
    weights, experts = route(torch.tensor([[2.0, 1.0, 0.0]]).bfloat16(), 2)
    assert weights.dtype == torch.float32
    assert experts.tolist() == [[0, 1]]
    torch.testing.assert_close(weights[0, 0].item(), 1 / (1 + math.exp(-1)), rtol=1e-6, atol=0)


def test_equal_logits_go_by_number_and_nan_is_the_largest() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, -0.0, 0.0, 1.0], [0.0, torch.nan, 5.0, torch.nan, 1.0, 1.0, 1.0]])
    for kind in (torch.float32, torch.bfloat16, torch.float64):
        weights, experts = route(logits.to(kind), 6)
        assert experts.tolist() == [[1, 3, 0, 2, 6, 4], [1, 3, 2, 4, 5, 6]]
        assert weights[1].isnan().all()
    many = torch.zeros(1, 300)
    assert route(many, 5)[1].tolist() == [[0, 1, 2, 3, 4]]


def test_swiglu_takes_the_gate_first() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    expected = [[silu(row[i]) * row[i + 4] for i in range(4)] for row in x.tolist()]
    torch.testing.assert_close(swiglu(x), torch.tensor(expected, dtype=torch.float64))


def one_by_one(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    width = down.shape[2]
    total = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].tolist(), experts[token].tolist(), strict=True):
            both = gate_up[expert] @ x[token]
            inner = torch.tensor(
                [silu(g) * u for g, u in zip(both[:width].tolist(), both[width:].tolist(), strict=True)]
            )
            total[token] += weight * (down[expert] @ inner.to(x.dtype))
    return total


@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
def test_experts_against_one_token_at_a_time(tokens: int) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        x, gate_up, down = torch.randn(tokens, 5), torch.randn(9, 6, 5), torch.randn(9, 5, 3)
        weights, experts = route(torch.randn(tokens, 9), 3)
        expected = one_by_one(x, gate_up, down, weights, experts)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(routed_experts(x, weights, experts, gate_up, down), expected)


def test_a_token_that_is_nan_stays_alone() -> None:
    """A padding token's garbage must not reach its neighbours through an expert that they share."""
    x, gate_up, down = torch.randn(4, 5), torch.randn(2, 6, 5), torch.randn(2, 5, 3)
    weights, experts = torch.full((4, 2), 0.5), torch.tensor([[0, 1]] * 4)
    clean = routed_experts(x, weights, experts, gate_up, down)
    x[2], weights[2] = torch.nan, torch.nan
    dirty = routed_experts(x, weights, experts, gate_up, down)
    assert torch.equal(dirty[[0, 1, 3]], clean[[0, 1, 3]])
    assert dirty[2].isnan().all()


def test_shared_expert_is_gated_and_added() -> None:
    routed, shared, x = torch.randn(3, 4, 5, dtype=torch.float64)
    gate_weight = torch.randn(1, 5, dtype=torch.float64)
    output = add_shared_expert(routed, shared, x, gate_weight)
    for token in range(4):
        gate = 1 / (1 + math.exp(-float(x[token] @ gate_weight[0])))
        torch.testing.assert_close(output[token], routed[token] + gate * shared[token])


def test_the_mixture_is_the_routed_experts_and_the_shared_one() -> None:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    x, gate_up, down = normal(7, 5), normal(9, 6, 5), normal(9, 5, 3)
    shared_gate_up, shared_down, shared_gate = normal(8, 5), normal(5, 4), normal(1, 5)
    weights, experts = route(normal(7, 9), 3)
    output = mixture(x, weights, experts, gate_up, down, shared_gate_up, shared_down, shared_gate)
    # The shared expert is one that every token chooses, with a weight of its own.
    alone = torch.zeros(7, 1, dtype=torch.int64)
    share = one_by_one(x, shared_gate_up[None], shared_down[None], torch.sigmoid(x @ shared_gate.T), alone)
    torch.testing.assert_close(output, one_by_one(x, gate_up, down, weights, experts) + share)
