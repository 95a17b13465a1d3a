"""Greedy decoding of many prompts at once with the training model: one padded prefill, then a token a row a step."""

from __future__ import annotations

import torch
from torch import Tensor

from model import CHUNK, Layer, Pocket


class Cache:
    """What one layer keeps of each row: conv window and state, or keys and values."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second


class Greedy:
    """Decodes greedily until the end token."""

    def __init__(self, model: Pocket, end: int) -> None:
        self.model, self.end = model, end
        self.device = model.model.embed_tokens.weight.device

    @torch.no_grad()
    def __call__(self, prompts: list[list[int]], limit: int) -> list[list[int]]:
        """The continuations of prompts, end token included, at most `limit` tokens each."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        longest = -(-max(map(len, prompts)) // CHUNK) * CHUNK
        ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=self.device)
        for place, prompt in enumerate(prompts):
            ids[place, : len(prompt)] = torch.tensor(prompt, device=self.device)
        hidden, caches = self.prefill(ids, lengths, limit)
        token = self.model.logits(hidden).argmax(-1)
        outputs = [token]
        ended = token == self.end
        for _ in range(limit - 1):
            if ended.all():
                break
            token = self.step(token, caches, lengths)
            lengths = lengths + 1
            outputs.append(token)
            ended |= token == self.end
        rows = torch.stack(outputs, 1).tolist()
        return [row[: row.index(self.end) + 1] if self.end in row else row for row in rows]

    def prefill(self, ids: Tensor, lengths: Tensor, limit: int) -> tuple[Tensor, list[Cache]]:
        """The hidden vectors at the prompts' ends `[rows, hidden]` and the layers' caches."""
        model = self.model
        rows, tokens = ids.shape
        places = torch.arange(tokens, device=self.device)
        valid = (places < lengths[:, None]).float()
        cos, sin = model.rotary(places.unsqueeze(0))
        x, caches = model.model.embed_tokens(ids), []
        row = torch.arange(rows, device=self.device)[:, None]
        for layer in model.model.stack():
            y = layer.input_layernorm(x, model.dtype)
            if layer.recurrent:
                y, raw, state = layer.linear_attn.prefill(y, valid)
                back = lengths[:, None] + torch.arange(1 - model.shape.linear_conv_kernel_dim, 0, device=self.device)
                window = raw[row, back.clamp(min=0)] * (back >= 0).unsqueeze(-1)
                caches.append(Cache(window, state))
            else:
                y, k, v = layer.self_attn.prefill(y, cos, sin)
                room = k.new_zeros(rows, k.shape[1], limit, k.shape[3])
                caches.append(Cache(torch.cat([k, room], 2), torch.cat([v, room], 2)))
            x, _ = layer.feed_forward(x + y)
        return model.model.norm(x[row[:, 0], lengths - 1], model.dtype), caches

    def step(self, token: Tensor, caches: list[Cache], lengths: Tensor) -> Tensor:
        """The next token of each row, whose new token stands at `lengths`."""
        model = self.model
        cos, sin = model.rotary(lengths[:, None])
        x = model.model.embed_tokens(token[:, None])
        for layer, cache in zip(model.model.stack(), caches, strict=True):
            x = self.mix(layer, x, cache, cos, sin, lengths)
        return model.logits(model.model.norm(x[:, 0], model.dtype)).argmax(-1)

    def mix(self, layer: Layer, x: Tensor, cache: Cache, cos: Tensor, sin: Tensor, lengths: Tensor) -> Tensor:
        """One layer on one token a row; the cache moves on."""
        y = layer.input_layernorm(x, self.model.dtype)
        if layer.recurrent:
            y, cache.first, cache.second = layer.linear_attn.step(y, cache.first, cache.second)
        else:
            y = layer.self_attn.step(y, cos, sin, cache.first, cache.second, lengths)
        return layer.feed_forward(x + y)[0]
