from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.config.model import SUPPORTED, ConfigError, ModelConfig
from tokenspeed.models.qwen35 import cache_geometry
from tokenspeed.models.random_weights import tiny_config

PATH = Path("somewhere/config.json")

# The published shape of the 35B-A3B model.
LARGE = {
    "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "vocab_size": 248320,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "eos_token_id": 248044,
        "dtype": "bfloat16",
    },
}


def parse(raw: dict[str, Any], **options: Any) -> ModelConfig:
    return ModelConfig.parse(raw, PATH, **options)


def test_the_nested_large_model() -> None:
    config = parse(LARGE, eos_ids=(248046, 248044))
    assert (config.hidden, config.heads, config.kv_heads, config.head_dim) == (2048, 16, 2, 256)
    assert (config.rotary_dim, config.rope_theta, config.max_positions) == (64, 1e7, 262_144)
    assert config.layer_types.count("full_attention") == 10
    assert [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"][:3] == [3, 7, 11]
    assert (config.experts, config.experts_per_token, config.expert_width, config.shared_width) == (256, 8, 512, 512)
    assert config.intermediate == 0
    assert config.eos_ids == (248046, 248044)
    assert (config.tied, config.dtype) == (False, "bfloat16")


def test_geometry_has_the_published_sizes() -> None:
    geometry = cache_geometry(parse(LARGE), 16, torch.bfloat16)
    assert geometry.page_bytes == 16 * 20 * 1024  # 20 KiB of KV a token
    assert geometry.row_bytes == pytest.approx(64.4e6, rel=1e-3)
    assert geometry.matrix_dtype == torch.float32
    assert cache_geometry(parse(tiny_config()), 4, torch.float64).matrix_dtype == torch.float64


def test_both_spellings_of_rope() -> None:
    flat = tiny_config(rope_theta=5000.0, partial_rotary_factor=0.5)
    del flat["rope_parameters"]
    nested = tiny_config(rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5})
    beside = tiny_config(rope_parameters={"rope_theta": 5000.0}, partial_rotary_factor=0.5)
    assert parse(flat) == parse(nested) == parse(beside)
    assert (parse(flat).rope_theta, parse(flat).rotary_dim) == (5000.0, 8)


def test_defaults_are_the_architectures() -> None:
    sparse = tiny_config()
    for name in ("rope_parameters", "tie_word_embeddings", "rms_norm_eps", "linear_conv_kernel_dim", "eos_token_id"):
        del sparse[name]
    config = parse(sparse)
    assert (config.rotary_dim, config.eps, config.conv_width, config.tied, config.eos_ids) == (4, 1e-6, 4, False, ())


def test_layer_types_are_read_or_follow_from_the_interval() -> None:
    types = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    assert list(parse(tiny_config(layer_types=types)).layer_types) == types
    assert parse(tiny_config(full_attention_interval=2)).layer_types == ("linear_attention", "full_attention") * 2


@pytest.mark.parametrize("kind", SUPPORTED)
def test_supported_kinds_nested_and_flat(kind: str) -> None:
    text = tiny_config(model_type=kind)
    assert parse({"model_type": kind, "text_config": text}) == parse(text)
    assert (parse(text).experts > 0) == ("moe" in kind)
    assert (parse(text).intermediate > 0) == ("moe" not in kind)


def test_the_outer_config_may_say_that_embeddings_are_tied() -> None:
    text = tiny_config()
    del text["tie_word_embeddings"]
    assert parse({"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": True}).tied


def test_end_ids_of_both_files_without_repeats(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(eos_token_id=[7, 5])))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert ModelConfig.read(tmp_path).eos_ids == (9, 7, 5)
    (tmp_path / "generation_config.json").unlink()
    assert ModelConfig.read(tmp_path).eos_ids == (7, 5)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'; supported are qwen3_5, qwen3_5_text, qwen3_5_moe"),
        ({"model_type": None}, "model_type is None"),
        ({"text_config": []}, "text_config is not an object"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be a positive integer"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; it must be a number"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"linear_num_value_heads": 5}, "5 value heads cannot share 2 key heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9 of 8 experts"),
        ({"layer_types": ["linear_attention"]}, "layer_types must be 4 of"),
        ({"layer_types": ["sliding"] * 4}, "layer_types must be 4 of"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_parameters": 3}, "rope_parameters is not an object"),
        ({"rope_parameters": {"partial_rotary_factor": 0.2}}, "3 rotated elements of a head of 16"),
        ({"rope_parameters": {"partial_rotary_factor": 2}}, "32 rotated elements of a head of 16"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0.0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"attn_output_gate": False}, "attn_output_gate is false"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers is set"),
        ({"eos_token_id": "end"}, "eos_token_id is 'end'"),
        ({"quantization_config": {}}, "quantization_config"),
    ],
)
def test_what_makes_no_sense_is_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse(tiny_config(**changes))
    assert str(caught.value).startswith(str(PATH))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "there is no such file"), (b"{", "cannot be read"), (b"\xff\xfe", "cannot be read"), (b"[]", "a list")],
)
def test_unreadable_files(content: bytes | None, complaint: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        ModelConfig.read(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert caught.value.code == "bad_config"
