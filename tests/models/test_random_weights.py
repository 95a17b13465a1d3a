"""Random weights make a model whose state matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.config.model import ModelConfig
from tokenspeed.models.random_weights import random_names, random_tensors, tiny_checkpoint, tiny_config

CPU = torch.device("cpu")


def config_of(**changes: Any) -> ModelConfig:
    return ModelConfig.parse(tiny_config(**changes), Path("config.json"))


@pytest.mark.parametrize("hidden", [32, 512])
def test_heads_forget_slowly_and_layers_keep_the_scale(hidden: int, make_model: Any, make_bench: Any) -> None:
    model = make_model(torch.float32, hidden_size=hidden, num_hidden_layers=8)
    decays: list[torch.Tensor] = []
    scales: list[float] = []
    ids = torch.randint(0, 96, (120,), generator=torch.Generator().manual_seed(2)).tolist()
    for layer in model.layers:
        original = layer.forward

        def watched(output: Any, residual: Any, *others: Any, original: Any = original) -> Any:
            result = original(output, residual, *others)
            scales.append(float(result[0].square().mean().sqrt()))
            return result

        layer.forward = watched
    step = model.ops.gated_delta_prefill

    def spy(qkv: Any, a: Any, b: Any, a_log: Any, dt_bias: Any, *others: Any) -> Any:
        decays.append((-a_log.exp() * torch.nn.functional.softplus(a + dt_bias)).exp())
        return step(qkv, a, b, a_log, dt_bias, *others)

    model.ops.gated_delta_prefill = spy
    bench = make_bench(model)
    logits = bench.run(bench.line(), ids)
    kept = torch.cat([decay.flatten() for decay in decays])
    assert float(((kept > 0.9) & (kept < 0.999)).float().mean()) > 0.9
    assert len(scales) == 8
    assert all(0.1 < scale < 5 for scale in scales)
    assert 0.3 < float(logits.std()) < 3


def test_every_expert_is_used_and_no_token_has_only_one(make_model: Any, make_bench: Any, ids: list[int]) -> None:
    model = make_model(torch.float32)
    counts = torch.zeros(len(model.layers), 8)
    smaller: list[torch.Tensor] = []
    route = model.ops.route
    calls = iter(range(100))

    def spy(logits: Any, k: int) -> Any:
        weights, experts = route(logits, k)
        counts[next(calls)] += experts.flatten().bincount(minlength=8)
        smaller.append(weights[:, -1])
        return weights, experts

    model.ops.route = spy
    bench = make_bench(model)
    bench.run(bench.line(), ids)
    assert int(counts.min()) >= 10  # of 400 choices a layer
    assert 0.1 < float(torch.cat(smaller).mean()) < 0.4


def test_a_float64_model_has_the_float32_models_weights() -> None:
    config = config_of()
    single = dict(random_tensors(config, 5, torch.float32, CPU))
    double = dict(random_tensors(config, 5, torch.float64, CPU))
    assert all(torch.equal(double[name], tensor.double()) for name, tensor in single.items())


def test_names_and_prefixes() -> None:
    config = config_of()
    drawn = [name for name, _ in random_tensors(config, 0, torch.float32, CPU)]
    assert drawn == random_names(config)
    assert {"lm_head.weight", "model.layers.0.linear_attn.A_log", "model.layers.3.mlp.experts.gate_up_proj"} <= set(
        drawn
    )
    nested = [name for name, _ in random_tensors(config, 0, torch.float32, CPU, prefix="model.language_model.")]
    assert [name.replace("model.language_model.", "model.") for name in nested] == drawn
    apart = [name for name, _ in random_tensors(config, 0, torch.float32, CPU, experts_apart=True)]
    assert "model.layers.3.mlp.experts.7.up_proj.weight" in apart
    assert not any(name.endswith("gate_up_proj") for name in apart)


def test_transformers_loads_a_tiny_checkpoint(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tiny_checkpoint(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = dict(random_tensors(config_of(), 0, torch.float32, CPU))
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
