"""Checks the chunked delta rule and its gradients against the step recurrence in float64, on the device at hand.

python examples/pocket/check.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from model import delta_rule, unit

BOUND = {torch.float32: 2e-3, torch.bfloat16: 3e-2}  # relative error; float32 products may run as tf32


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The rule as FORMULA: decay, correct, read, one token after the other."""
    state = torch.zeros(*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1], dtype=v.dtype, device=v.device)
    outputs = []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        error = (v[:, t] - (state * k[:, t].unsqueeze(-1)).sum(-2)) * beta[:, t].unsqueeze(-1)
        state = state + k[:, t].unsqueeze(-1) * error.unsqueeze(-2)
        outputs.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(outputs, 1)


def worst(dtype: torch.dtype, device: torch.device) -> float:
    """The largest relative error of the output and of the five gradients."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows, tokens, heads, size = 2, 256, 4, 64
    exact = [
        unit(draw(rows, tokens, heads, size)) * size**-0.5,
        unit(draw(rows, tokens, heads, size) + 1.0),
        draw(rows, tokens, heads, size),
        -0.1 * draw(rows, tokens, heads).sigmoid(),
        draw(rows, tokens, heads).sigmoid(),
    ]
    rounded = [x.to(dtype if i < 3 else torch.float32).to(device).requires_grad_() for i, x in enumerate(exact)]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    weight = draw(rows, tokens, heads, size).to(device)
    rule = torch.compile(delta_rule) if device.type == "cuda" else delta_rule
    out, reference = rule(*rounded)[0], recurrence(*exact)
    pairs = [(out, reference)]
    pairs += zip(
        torch.autograd.grad((out.double() * weight).sum(), rounded),
        torch.autograd.grad((reference * weight).sum(), exact),
        strict=True,
    )
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    for dtype, bound in BOUND.items():
        error = worst(dtype, device)
        print(f"{dtype}: relative error {error:.1e} (bound {bound:.0e})")
        if not error < bound:
            raise SystemExit("the chunked rule is wrong")


if __name__ == "__main__":
    main()
