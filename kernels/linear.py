"""Dense products with a weight."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels.norms import add_rms_norm
from tokenspeed.kernels.state_rows import compute_dtype


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ.

    Args:
        x: [tokens, in].
        weight: [out, in], of x's type.
    Returns:
        [tokens, out] in x's type.
    """
    return F.linear(x, weight)


def add_norm_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds a layer's output to the running residual, norms the sum (Gemma flavour) and multiplies by a weight.

    Args:
        x, residual: [tokens, in].
        norm_weight: [in].
        weight: [out, in], of x's type.
    Returns:
        the product [tokens, out], the norm and the sum, both [tokens, in]; all in x's type.
    """
    normed, residual = add_rms_norm(x, residual, norm_weight, eps)
    return linear(normed, weight), normed, residual


def vocabulary_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden · weightᵀ, for sampling.

    Args:
        hidden: [n, in].
        weight: [vocabulary, in], of hidden's type.
    Returns:
        [n, vocabulary] in promote(float32, hidden's type); whether it was rounded to hidden's type is left open.
    """
    return F.linear(hidden, weight).to(compute_dtype(hidden.dtype))
