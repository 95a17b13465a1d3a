"""Mixture of experts: routing, the routed SwiGLU experts, and the gated shared expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels.state_rows import compute_dtype


def route(logits: Tensor, experts_per_token: int) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, the largest few, their weights scaled to sum to 1.

    Of equal logits the expert with the lower number comes first. A NaN counts as the largest, so that the experts are
    valid and different ones whatever a padding token holds.

    Args:
        logits: [tokens, experts], of any float type.
    Returns:
        weights [tokens, experts_per_token] in promote(float32, logits' type), and the experts, int64, of that shape.
    """
    values, experts = logits.sort(dim=-1, descending=True, stable=True)  # topk leaves the order of equals open
    # The sum over all experts cancels out.
    weights = values[:, :experts_per_token].to(compute_dtype(logits.dtype)).softmax(-1)
    return weights, experts[:, :experts_per_token].contiguous()


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU(gate) · up of [tokens, 2 * width], the gate first. Returns [tokens, width] in the input's type."""
    gate, up = gate_up.to(compute_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def mixture(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared_gate_up: Tensor,
    shared_down: Tensor,
    shared_gate: Tensor,
) -> Tensor:
    """Σ_e weight_e · down_e(SwiGLU(gate_up_e(x))) over each token's experts, plus the shared expert's output times
    sigmoid(x · shared_gate).

    Args:
        x: [tokens, hidden].
        weights, experts: [tokens, experts_per_token], of `route`.
        gate_up: [experts, 2 * width, hidden], the gate first.
        down: [experts, hidden, width].
        shared_gate_up: [2 * shared width, hidden], the gate first.
        shared_down: [hidden, shared width].
        shared_gate: [1, hidden].
    Returns:
        [tokens, hidden] in x's type.
    """
    routed = routed_experts(x, weights, experts, gate_up, down)
    shared = F.linear(swiglu(F.linear(x, shared_gate_up)), shared_down)
    return add_shared_expert(routed, shared, x, shared_gate)


def routed_experts(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Σ_e weight_e · down_e(SwiGLU(gate_up_e(x))) over each token's experts.

    Args:
        x: [tokens, hidden].
        weights, experts: [tokens, experts_per_token], of `route`.
        gate_up: [experts, 2 * width, hidden], the gate first.
        down: [experts, hidden, width].
    Returns:
        [tokens, hidden] in x's type.
    """
    compute = compute_dtype(x.dtype)
    if x.shape[0] == 1:
        chosen = experts[0].tolist()
        outputs = [F.linear(swiglu(F.linear(x, gate_up[expert])), down[expert]) for expert in chosen]
        return (weights @ torch.cat(outputs).to(compute)).to(x.dtype)
    total = torch.zeros(x.shape, dtype=compute, device=x.device)
    by_expert = experts.flatten().argsort(stable=True)
    tokens = by_expert // experts.shape[1]
    factors = weights.flatten()[by_expert, None]
    start = 0
    for expert, count in enumerate(experts.flatten().bincount(minlength=gate_up.shape[0]).tolist()):
        if count:
            chosen_tokens = tokens[start : start + count]
            output = F.linear(swiglu(F.linear(x[chosen_tokens], gate_up[expert])), down[expert])
            total.index_add_(0, chosen_tokens, output.to(compute) * factors[start : start + count])
            start += count
    return total.to(x.dtype)


def add_shared_expert(routed: Tensor, shared: Tensor, x: Tensor, gate_weight: Tensor) -> Tensor:
    """routed + sigmoid(x · gate_weight) · shared.

    Args:
        routed, shared, x: [tokens, hidden]; x is the input of the experts.
        gate_weight: [1, hidden].
    Returns:
        [tokens, hidden] in routed's type.
    """
    compute = compute_dtype(routed.dtype)
    gate = F.linear(x, gate_weight).to(compute).sigmoid()
    return torch.addcmul(routed.to(compute), shared.to(compute), gate).to(routed.dtype)
