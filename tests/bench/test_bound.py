"""Bytes and operations counted by hand, for the tiny model in float32: 3 delta net layers, 1 of attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tokenspeed.bench.bound import prefill_bound_s, product_rate, read_bandwidth, step_bytes
from tokenspeed.engine.core import EngineCore
from tokenspeed.models.random_weights import tiny_checkpoint

DELTA_NET = (104 + 32) * 32 + 64 * 4 + 4 + 4 + 8
"""Input and output projection, convolution, decay, its bias, norm."""
ATTENTION = 192 * 32 + 32 * 64 + 16 + 16
AROUND = 2 * 32 + 8 * 32 + 48 * 32 + 32 * 24 + 32
"""Of each layer: norms, router, shared expert and its gate."""
EXPERT = 32 * 32 + 32 * 16
WEIGHTS = 3 * DELTA_NET + ATTENTION + 4 * AROUND + 32 + 96 * 32
"""With the last norm and the output; of the embedding a step reads a row."""
STATE = 3 * (64 * 3 + 4 * 8 * 8) + 32
KV = 2 * 2 * 16


@pytest.mark.parametrize(("contexts", "experts"), [([100], 8), ([100, 7, 40], 21)])
def test_bytes_of_a_step(start: Callable[..., EngineCore], contexts: list[int], experts: int) -> None:
    executor = start().executor
    counted = WEIGHTS + experts * EXPERT + 2 * len(contexts) * STATE + sum(contexts) * KV
    assert step_bytes(executor.model, executor.pages.geometry, contexts, experts) == 4 * counted


def test_bytes_of_a_dense_step_with_a_tied_embedding(start: Callable[..., EngineCore], tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, model_type="qwen3_5_text", tie_word_embeddings=True)
    executor = start(model, dtype="float64").executor
    feed_forward = 2 * 48 * 32 + 32 * 48
    weights = 3 * DELTA_NET + ATTENTION + 4 * (2 * 32 + feed_forward) + 32 + 96 * 32
    assert step_bytes(executor.model, executor.pages.geometry, [9], 0) == 8 * (weights + 2 * STATE + 9 * KV)


def test_what_a_prefill_takes(start: Callable[..., EngineCore]) -> None:
    model = start().executor.model
    dense = 3 * ((104 + 32) * 32 + 64 * 4) + (192 * 32 + 32 * 64) + 4 * (8 * 32 + 48 * 32 + 32 * 24 + 32)
    keys = 11 + 12 + 13
    attention = 4 * 4 * 16 * keys
    routed = 4 * 2 * 2 * 3 * EXPERT
    by_arithmetic = 2 * 3 * dense + attention + routed
    assert prefill_bound_s(model, 10, 3, math.inf, 1.0) == by_arithmetic
    # With slow memory the experts cost one pass over all of them.
    assert prefill_bound_s(model, 10, 3, 1.0, 1e9) == pytest.approx(4 * 4 * 8 * EXPERT, rel=1e-3)


def test_rates_of_a_cpu() -> None:
    device = torch.device("cpu")
    assert read_bandwidth(device) > 0
    assert product_rate(device) > 0
