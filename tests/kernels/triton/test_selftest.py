"""A whole model's operators together: what the start of an engine on a GPU checks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenspeed.execution.selftest import check_operators
from tokenspeed.kernels.registry import Implementation, Operators, implementations
from tokenspeed.kernels.triton.table import TABLE
from tokenspeed.models.loading import load_model
from tokenspeed.models.qwen35 import cache_geometry
from tokenspeed.models.random_weights import tiny_checkpoint


@pytest.mark.parametrize("kind", ["qwen3_5_moe_text", "qwen3_5_text"])
def test_all_agree_with_the_reference(kind: str, tmp_path: Path, device: torch.device) -> None:
    directory = tiny_checkpoint(tmp_path, seed=1, model_type=kind)
    ops = Operators({name: Implementation("triton", TABLE[name], lambda *_: True) for name in implementations()})
    model = load_model(directory, ops, torch.float32, device, "auto", 0, None)
    check_operators(model, cache_geometry(model.config, 16, model.dtype), lengths=(1, 18, 66))
