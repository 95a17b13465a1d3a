"""Muon for the matrices and AdamW for the rest, over float32 master parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def orthogonalise(update: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices of `[count, rows, columns]` by five Newton-Schulz steps in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.transpose(-1, -2) if tall else x).float()


class Optimizer:
    """Both optimizers under one step; `scale` multiplies their learning rates."""

    def __init__(self, model: nn.Module, muon_lr: float, adam_lr: float, decay: float) -> None:
        self.muon_lr, self.decay, self.momentum = muon_lr, decay, 0.95
        matrices: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        others = []
        for name, parameter in model.named_parameters():
            small = min(parameter.shape[-2:]) < 16 if parameter.ndim > 1 else True
            if small or "embed_tokens" in name or "conv1d" in name:
                others.append(parameter)
            else:
                matrices[tuple(parameter.shape)].append(parameter)
        self.groups = list(matrices.values())
        self.buffers = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self.groups]
        self.others = others
        self.adam = torch.optim.AdamW(
            others, lr=adam_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=others[0].is_cuda
        )
        self.adam_lr = adam_lr
        self.orthogonalise = torch.compile(orthogonalise) if others[0].is_cuda else orthogonalise

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update from the parameters' gradients, which are then cleared."""
        nn.utils.clip_grad_norm_(self.others, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale
        self.adam.step()
        for parameters, buffer in zip(self.groups, self.buffers, strict=True):
            gradients = torch.stack([p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters])
            buffer.lerp_(gradients, 1 - self.momentum)
            update = gradients.lerp(buffer, self.momentum)
            rows, columns = update.shape[-2:]
            update = self.orthogonalise(update.reshape(-1, rows, columns)).view_as(buffer)
            rate = self.muon_lr * scale
            updates = (update * (-rate * 0.2 * max(rows, columns) ** 0.5)).unbind(0)
            torch._foreach_mul_(parameters, 1 - rate * self.decay)
            torch._foreach_add_(parameters, updates)
        for parameter in self.parameters():
            parameter.grad = None

    def parameters(self) -> Iterable[Tensor]:
        yield from self.others
        for group in self.groups:
            yield from group

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "muon": self.buffers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        for buffer, stored in zip(self.buffers, state["muon"], strict=True):
            buffer.copy_(stored)
