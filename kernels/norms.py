"""Root-mean-square norms: the Gemma flavour x̂ · (1 + w) of the layers, and the plain x̂ · w, gated, of the delta net."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels.state_rows import compute_dtype


def normalise(x: Tensor, eps: float) -> Tensor:
    """x divided by its root mean square over the last axis, in `compute_dtype`."""
    x = x.to(compute_dtype(x.dtype))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x̂ · (1 + weight) over the last axis.

    Args:
        x: [..., n].
        weight: [n].
    Returns:
        [..., n] in x's type.
    """
    scaled = normalise(x, eps)
    return torch.addcmul(scaled, scaled, weight.to(scaled.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds a layer's output to the running residual and norms the sum (Gemma flavour).

    Args:
        x, residual: [..., n].
        weight: [n].
    Returns:
        The norm of the sum and the sum itself, both [..., n] in x's type.
    """
    residual = residual + x
    return gemma_rms_norm(residual, weight, eps), residual


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x̂ · weight · SiLU(gate), normed over the last axis: the delta net's output norm.

    Args:
        x, gate: [..., n]. The gate does not take part in the norm.
        weight: [n].
    Returns:
        [..., n] in the gate's type.
    """
    scaled = normalise(x, eps) * weight
    return (scaled * F.silu(gate.to(scaled.dtype))).to(gate.dtype)
