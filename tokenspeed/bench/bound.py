"""What a machine allows: the rates of a read-only stream and of a large product, and what a step needs of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tokenspeed.cache.pools import CacheGeometry
from tokenspeed.models.qwen35 import Qwen35

STREAM_BYTES = {"cuda": 4 << 30, "cpu": 512 << 20}
"""By kind of device: so much that no cache holds a part that matters."""
REPEATS = {"cuda": 20, "cpu": 5}
SIDE = {"cuda": 8192, "cpu": 1024}
"""Rows and columns of the matrices whose product is timed."""
ROUTED = ("feed_forward.gate_up", "feed_forward.down")
"""Ends of the names of the routed experts' weights, if they have three dimensions."""


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of the fastest read-only stream at hand: on a GPU a product of a tall matrix with a vector, by
    Triton's kernel and by torch's, and a plain sum; on a CPU the sum. The best of some runs each: it is to be a bound.
    """
    size = STREAM_BYTES[device.type]
    if device.type != "cuda":
        numbers = torch.ones(size // 4, device=device)
        return size / _best_s(lambda: numbers.sum(), device)
    wide = 2048
    matrix = torch.randn(size // (2 * wide), wide, device=device, dtype=torch.bfloat16)
    vector = torch.randn(1, wide, device=device, dtype=torch.bfloat16)
    flat = matrix.view(torch.int32)
    ways: list[Callable[[], object]] = [lambda: torch.mv(matrix, vector[0]), lambda: flat.sum()]
    if find_spec("triton") is not None:
        from tokenspeed.kernels.triton.linear import linear

        ways.append(lambda: linear(vector, matrix))
    return size / min(_best_s(way, device) for way in ways)


def product_rate(device: torch.device) -> float:
    """FLOP/s of a large product of matrices, in bfloat16 on a GPU and in float32 on a CPU."""
    side = SIDE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / _best_s(lambda: a @ b, device)


def _best_s(run: Callable[[], object], device: torch.device) -> float:
    times: list[float] = []
    event: Any = torch.cuda.Event
    run()
    for _ in range(REPEATS[device.type]):
        if device.type == "cuda":
            begun, ended = (event(enable_timing=True) for _ in range(2))
            begun.record()
            run()
            ended.record()
            ended.synchronize()
            times.append(begun.elapsed_time(ended) / 1e3)
        else:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return min(times)


def step_bytes(model: Qwen35, geometry: CacheGeometry, contexts: list[int], experts: int) -> int:
    """Bytes that a decode step of one token for each context must move: every weight but the routed experts once, those
    of `experts` (summed over the layers), a state read and written for each sequence, and the K and V of all tokens."""
    routed = _routed(model)
    weights = sum(_bytes(value) for name, value in model.parameters.items() if name not in routed)
    if not model.config.tied:
        weights -= _bytes(model.embedding)  # of which a step reads a row for each sequence
    mixtures = model.config.experts * len(model.layers)
    routed_bytes = sum(_bytes(value) for value in routed.values())
    kv = sum(contexts) * (geometry.page_bytes // geometry.page_size)
    states = 2 * len(contexts) * geometry.row_bytes
    return weights + (experts * routed_bytes // mixtures if mixtures else 0) + states + kv


def prefill_bound_s(model: Qwen35, start: int, tokens: int, bandwidth: float, flops_per_s: float) -> float:
    """Seconds that the dense products and the attention of `tokens` tokens behind `start` others take at least.

    A chunk of more than about a hundred tokens touches nearly every expert, so that those of the mixture cost no less
    than one pass over their weights, whatever the length. The delta rule, the norms and the launches come on top.
    """
    config, routed = model.config, _routed(model)
    apart = {*routed, "embedding", "output"}
    dense = sum(value.numel() for name, value in model.parameters.items() if name not in apart and value.dim() == 2)
    attention_layers = config.layer_types.count("full_attention")
    keys = tokens * start + tokens * (tokens + 1) // 2
    attention = 4 * attention_layers * config.heads * config.head_dim * keys
    chosen = config.experts_per_token / config.experts if config.experts else 0.0
    experts = 2 * tokens * chosen * sum(value.numel() for value in routed.values())
    streamed_s = sum(_bytes(value) for value in routed.values()) / bandwidth
    return max(streamed_s, experts / flops_per_s) + (2 * tokens * dense + attention) / flops_per_s


def _routed(model: Qwen35) -> dict[str, Tensor]:
    return {name: value for name, value in model.parameters.items() if value.dim() == 3 and name.endswith(ROUTED)}


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
