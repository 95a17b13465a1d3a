"""Linear layers and the formats their weights come in."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tokenspeed.kernels.registry import Operators


class WeightFormat(Protocol):
    """How a weight is stored and multiplied with."""

    def apply(self, x: Tensor) -> Tensor:
        """x [tokens, in] · weightᵀ, [tokens, out] in x's type."""


class Dense:
    """A weight [out, in] in the model's own element type."""

    def __init__(self, weight: Tensor, ops: Operators) -> None:
        self.weight = weight
        self.ops = ops

    def apply(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight)


class Linear:
    """x [tokens, in] → [tokens, out], without bias, whatever the weight's format."""

    def __init__(self, weight: WeightFormat) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight.apply(x)
