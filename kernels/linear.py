"""Dense products with a weight."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ.

    Args:
        x: [tokens, in].
        weight: [out, in], of x's type.
    Returns:
        [tokens, out] in x's type.
    """
    return F.linear(x, weight)
