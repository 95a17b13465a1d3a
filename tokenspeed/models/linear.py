"""Linear layers and the formats their weights come in."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tokenspeed.kernels.registry import Operators


class WeightFormat(Protocol):
    """How a weight is stored and multiplied with."""

    def apply(self, x: Tensor) -> Tensor:
        """x [tokens, in] · weightᵀ, [tokens, out] in x's type."""

    def apply_after_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """As `tokenspeed.kernels.linear.add_norm_linear`."""


class Dense:
    """A weight [out, in] in the model's own element type."""

    def __init__(self, weight: Tensor, ops: Operators) -> None:
        self.weight = weight
        self.ops = ops

    def apply(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight)

    def apply_after_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        return self.ops.add_norm_linear(x, residual, norm, eps, self.weight)


class Linear:
    """x [tokens, in] → [tokens, out], without bias, whatever the weight's format."""

    def __init__(self, weight: WeightFormat) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight.apply(x)

    def after_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Adds x to the running residual, both [tokens, in], and norms the sum; the layer's output for that, [tokens,
        out], the normed sum and the sum."""
        return self.weight.apply_after_norm(x, residual, norm, eps)
