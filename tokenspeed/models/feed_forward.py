"""Feed-forward layers: dense SwiGLU, and the mixture of experts beside a shared one."""

from __future__ import annotations

from torch import Tensor

from tokenspeed.config.model import ModelConfig
from tokenspeed.kernels.registry import Operators
from tokenspeed.models.linear import Dense, Linear
from tokenspeed.models.weights import Parameters


class SwiGLU:
    """down(SiLU(gate(x)) · up(x))"""

    def __init__(self, ops: Operators, parameters: Parameters) -> None:
        self.ops = ops
        self.input = Linear(Dense(parameters["gate_up"], ops))
        self.down = Linear(Dense(parameters["down"], ops))

    def forward(self, projected: Tensor, x: Tensor) -> Tensor:
        """projected: [tokens, 2 * width], of `input` for x [tokens, hidden]. Returns [tokens, hidden]."""
        return self.down(self.ops.swiglu(projected))


class Mixture:
    """Each token's routed experts, plus the shared expert times sigmoid(x · shared_gate)."""

    def __init__(self, config: ModelConfig, ops: Operators, parameters: Parameters) -> None:
        self.ops = ops
        self.experts_per_token = config.experts_per_token
        self.input = Linear(Dense(parameters["router"], ops))
        self.gate_up = parameters["gate_up"]
        self.down = parameters["down"]
        self.shared_gate_up = parameters["shared.gate_up"]
        self.shared_down = parameters["shared.down"]
        self.shared_gate = parameters["shared_gate"]

    def forward(self, projected: Tensor, x: Tensor) -> Tensor:
        """projected: [tokens, experts], of `input`, the router, for x [tokens, hidden]. Returns [tokens, hidden]."""
        weights, experts = self.ops.route(projected, self.experts_per_token)
        return self.ops.mixture(
            x,
            weights,
            experts,
            self.gate_up,
            self.down,
            self.shared_gate_up,
            self.shared_down,
            self.shared_gate,
        )
