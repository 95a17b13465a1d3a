"""The shards of 2, 4 and 8 ranks rebuild every parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed.config.model import ModelConfig
from tokenspeed.models.loading import fill
from tokenspeed.models.qwen35_weights import weight_table
from tokenspeed.models.random_weights import random_tensors, tiny_config
from tokenspeed.models.weights import Part, Shard, ShardError, allocate

CPU = torch.device("cpu")
WIDE = {
    "vocab_size": 96,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 24,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
MODELS = {"moe": WIDE, "dense, tied": {**WIDE, "model_type": "qwen3_5_text", "tie_word_embeddings": True}}


def filled(config: ModelConfig, shard: Shard, experts_apart: bool = False) -> dict[str, Tensor]:
    table = weight_table(config)
    parameters = allocate(table, shard, torch.float32, CPU)
    for tensor in parameters.values():
        tensor.fill_(torch.nan)
    fill(parameters, table, config, random_tensors(config, 0, torch.float32, CPU, experts_apart=experts_apart), shard)
    return parameters


def pieces(name: str, config: ModelConfig) -> tuple[int, list[tuple[int, int]]] | None:
    """By the parameter's role, its split axis and the (units, width) that stand along it; None if it is not split.
    Written out here, apart from the table under test."""
    key, value = (config.key_heads, config.key_dim), (config.value_heads, config.value_dim)
    kv, per_head = (config.kv_heads, config.head_dim), (config.value_heads, 1)
    width = config.expert_width if config.experts else config.intermediate
    layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
    linear = config.layer_types[layer] == "linear_attention"
    match name.split(".")[2:] if name.startswith("layers.") else [name]:
        case ["embedding" | "output"]:
            return 0, [(config.vocabulary, 1)]
        case ["mixer", "input"] if linear:
            return 0, [key, key, value, value, per_head, per_head]
        case ["mixer", "input"]:
            return 0, [(config.heads, 2 * config.head_dim), kv, kv]
        case ["mixer", "conv"]:
            return 0, [key, key, value]
        case ["mixer", "a_log" | "dt_bias"]:
            return 0, [per_head]
        case ["mixer", "output"]:
            return 1, [value if linear else (config.heads, config.head_dim)]
        case ["feed_forward", "shared", "gate_up"]:
            return 0, [(config.shared_width, 1)] * 2
        case ["feed_forward", "shared", "down"]:
            return 1, [(config.shared_width, 1)]
        case ["feed_forward", "gate_up"]:
            return (1 if config.experts else 0), [(width, 1)] * 2
        case ["feed_forward", "down"]:
            return (2 if config.experts else 1), [(width, 1)]
    return None


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_shards_rebuild_every_parameter(world: int, changes: dict[str, Any]) -> None:
    config = ModelConfig.parse(tiny_config(**changes), Path("config.json"))
    whole = filled(config, Shard())
    ranks = [filled(config, Shard(rank, world)) for rank in range(world)]
    split = 0
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), name
        layout = pieces(name, config)
        if layout is None:
            assert all(torch.equal(rank[name], tensor) for rank in ranks), name
            continue
        split += 1
        axis, parts = layout
        # Each rank holds its units of every part, one part after the other; with fewer units than ranks, neighbouring
        # ranks hold the same one.
        local = [max(units // world, 1) * width for units, width in parts]
        by_part = zip(*(rank[name].split(local, axis) for rank in ranks), strict=True)
        rebuilt = []
        for (units, _), held in zip(parts, by_part, strict=True):
            copies = max(world // units, 1)
            for group in _groups(held, copies):
                assert all(torch.equal(one, group[0]) for one in group)
                rebuilt.append(group[0])
        assert torch.equal(torch.cat(rebuilt, axis), tensor), name
    per_layer = 5 * 3 + 2 * 1 + (4 if config.experts else 2) * 4
    assert split == per_layer + (1 if config.tied else 2)


def _groups(items: tuple[Tensor, ...], size: int) -> list[tuple[Tensor, ...]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


@pytest.mark.parametrize("rank", [0, 3])
def test_experts_apart_fill_the_same_shards(rank: int) -> None:
    """One file per expert, cut for one rank, is the whole of the same file cut by hand."""
    config = ModelConfig.parse(tiny_config(**WIDE), Path("config.json"))
    whole, mine = filled(config, Shard(), experts_apart=True), filled(config, Shard(rank, 4), experts_apart=True)
    gate, up = whole["layers.0.feed_forward.gate_up"].chunk(2, dim=1)
    own = slice(rank * 4, rank * 4 + 4)
    assert torch.equal(mine["layers.0.feed_forward.gate_up"], torch.cat((gate[:, own], up[:, own]), dim=1))
    assert torch.equal(mine["layers.0.feed_forward.down"], whole["layers.0.feed_forward.down"][:, :, own])


def test_what_does_not_divide_is_named() -> None:
    config = ModelConfig.parse(tiny_config(**WIDE, moe_intermediate_size=12), Path("config.json"))
    with pytest.raises(ShardError, match="12 columns of gate cannot be split over 8 ranks"):
        allocate(weight_table(config), Shard(0, 8), torch.float32, CPU)


def test_replicated_units_must_divide_the_ranks() -> None:
    heads = Part("KV heads", 3, 5, replicated=True)
    assert [heads.local(Shard(rank, 6)) for rank in range(6)] == [(0, 5), (0, 5), (5, 5), (5, 5), (10, 5), (10, 5)]
    assert heads.local(Shard(2, 3)) == (10, 5)
    with pytest.raises(ShardError):
        heads.local(Shard(0, 4))
