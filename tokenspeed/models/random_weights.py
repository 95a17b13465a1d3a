"""Random weights under the names of a checkpoint: for `dummy` loading, and as small checkpoints for tests.

They are drawn so that every part of the model matters. A library's usual initialisation hides mistakes in the recurrent
state, because its decay forgets everything within a token; here exp(g) lies between 0.9 and 0.999, projections keep the
scale of what they are given, and the router's choices are spread and clear.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tokenspeed.config.model import ModelConfig
from tokenspeed.models.qwen35_weights import OUTPUT, weight_table
from tokenspeed.models.weights import Parameter, Source

FADING = (0.003, 0.06)
"""Range of −g per token at a = 0, of which each head draws one, log-uniformly."""


def random_tensors(
    config: ModelConfig,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    prefix: str = "model.",
    experts_apart: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint of `config`, one at a time.

    A tensor depends on `seed`, its name and the device's generator; it is drawn in float32 and then cast, so that a
    float64 model has the float32 model's weights.

    Args:
        prefix: what stands before every name but `lm_head.weight`.
        experts_apart: a tensor per expert and projection instead of all experts' in one.
    """
    for entry, source in _sources(config, experts_apart):
        # Hashed together, because the CPU's generator looks at 32 bits of its seed alone.
        digest = hashlib.sha256(f"{seed} {source.name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little"))
        drawn = _draw(source.name, entry.source_shape(source), config, generator)
        yield _prefixed(source.name, prefix), drawn.to(dtype)


def random_names(config: ModelConfig) -> list[str]:
    """The names of `random_tensors` with its defaults."""
    return [_prefixed(source.name, "model.") for _, source in _sources(config, experts_apart=False)]


def tiny_config(**changes: Any) -> dict[str, Any]:
    """The content of a config.json for a model of four layers that runs in milliseconds, with fields replaced by
    `changes`. It is a mixture of experts unless `model_type` says otherwise."""
    fields: dict[str, Any] = {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "vocab_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    }
    return {**fields, **changes}


def write_checkpoint(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], files: int = 1) -> None:
    """Writes config.json and the tensors: as model.safetensors, or spread over `files` files with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2), encoding="utf-8")
    if files == 1:
        save_file(dict(tensors), directory / "model.safetensors")
        return
    names = sorted(tensors)
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        chosen = names[number::files]
        save_file({name: tensors[name] for name in chosen}, directory / file)
        weight_map.update(dict.fromkeys(chosen, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def tiny_checkpoint(directory: Path, seed: int = 0, **changes: Any) -> Path:
    """Writes a checkpoint of `tiny_config(**changes)` with random float32 weights. Returns `directory`."""
    raw = tiny_config(**changes)
    config = ModelConfig.parse(raw, directory / "config.json")
    write_checkpoint(directory, raw, dict(random_tensors(config, seed, torch.float32, torch.device("cpu"))))
    return directory


def _sources(config: ModelConfig, experts_apart: bool) -> Iterator[tuple[Parameter, Source]]:
    for entry in weight_table(config):
        pieces = [source for source in entry.sources if source.index is not None]
        for source in pieces if pieces and experts_apart else entry.sources:
            if source.index is None or experts_apart:
                yield entry, source


def _prefixed(name: str, prefix: str) -> str:
    return name if name == OUTPUT else prefix + name


def _draw(name: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator) -> Tensor:
    def normal(std: float, mean: float = 0.0) -> Tensor:
        return torch.empty(shape, device=generator.device).normal_(mean, std, generator=generator)

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(shape, device=generator.device).uniform_(low, high, generator=generator)

    if name.endswith("A_log"):
        return normal(0.3)
    if name.endswith("dt_bias"):
        return uniform(math.log(FADING[0]), math.log(FADING[1])).exp_().expm1_().log_()  # softplus⁻¹
    if name.endswith("linear_attn.norm.weight"):
        return normal(0.1, mean=1.0)
    if name.endswith("norm.weight"):
        return normal(0.1)
    if name == "embed_tokens.weight":
        # Tied, the embedding also makes the logits; a token must not simply predict itself.
        return normal(config.hidden**-0.5 if config.tied else 1.0)
    gain = 0.3 if name.endswith("in_proj_a.weight") else 2.0 if name.endswith("mlp.gate.weight") else 1.0
    return normal(gain * shape[-1] ** -0.5)
