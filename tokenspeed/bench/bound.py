"""What memory allows: the rate of a read-only stream, and the bytes of a decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed.cache.pools import CacheGeometry
from tokenspeed.models.qwen35 import Qwen35

STREAM_BYTES = 4 << 30
REPEATS = 20


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of the fastest read-only stream at hand: a product of a tall matrix with a vector, by Triton's
    kernel and by torch's, and a plain sum. The best of some runs each: it is to be a bound."""
    from tokenspeed.kernels.triton.linear import linear

    wide = 2048
    matrix = torch.randn(STREAM_BYTES // (2 * wide), wide, device=device, dtype=torch.bfloat16)
    vector = torch.randn(1, wide, device=device, dtype=torch.bfloat16)
    flat = matrix.view(torch.int32)
    ways = (lambda: linear(vector, matrix), lambda: torch.mv(matrix, vector[0]), lambda: flat.sum())
    return STREAM_BYTES / min(_best_s(way) for way in ways)


def _best_s(run: object) -> float:
    assert callable(run)
    times = []
    for _ in range(REPEATS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) / 1e3)
    return min(times)


def step_bytes(model: Qwen35, geometry: CacheGeometry, contexts: list[int], experts: int) -> int:
    """Bytes that a decode step of one token for each context must move: every weight but the routed experts once, those
    of `experts` (summed over the layers), a state read and written for each sequence, and the K and V of all tokens."""
    apart = {
        name
        for name, value in model.parameters.items()
        if value.dim() == 3 and name.endswith(("feed_forward.gate_up", "feed_forward.down"))
    }
    if not model.config.tied:
        apart.add("embedding")  # of which a step reads a row for each sequence
    weights = sum(_bytes(value) for name, value in model.parameters.items() if name not in apart)
    mixtures = model.config.experts * len(model.layers)
    routed = sum(_bytes(model.parameters[name]) for name in apart if name != "embedding")
    kv = sum(contexts) * (geometry.page_bytes // geometry.page_size)
    states = 2 * len(contexts) * geometry.row_bytes
    return weights + (experts * routed // mixtures if mixtures else 0) + states + kv


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
