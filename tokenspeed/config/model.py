"""A model's shape, read from a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

SUPPORTED = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")

LayerType = Literal["linear_attention", "full_attention"]


class ModelError(Exception):
    """A model that cannot be served. `code` is stable; the message names the file and what is wrong with it."""

    code = "bad_model"


class ConfigError(ModelError):
    """A config.json that is missing, unreadable, unsupported or makes no sense."""

    code = "bad_config"


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Qwen3.5 hybrid. Sizes are in elements, positions in tokens.

    Attributes:
        hidden, vocabulary, eps: as everywhere.
        layer_types: per layer "linear_attention" (gated delta net) or "full_attention".
        heads, kv_heads, head_dim: of the attention layers.
        rotary_dim, rope_theta: the first `rotary_dim` elements of a head are rotated.
        key_heads, value_heads, key_dim, value_dim, conv_width: of the delta net layers.
        intermediate: width of the dense feed-forward; 0 in a mixture of experts.
        experts, experts_per_token, expert_width, shared_width: of the mixture; 0 in a dense model.
        tied: the output projection is the embedding.
        max_positions: longest context the checkpoint claims.
        eos_ids: ids that end a turn, of generation_config.json and config.json, in this order.
        dtype: name of the element type the checkpoint was written in, or None.
    """

    hidden: int
    vocabulary: int
    eps: float
    layer_types: tuple[LayerType, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    intermediate: int
    experts: int
    experts_per_token: int
    expert_width: int
    shared_width: int
    tied: bool
    max_positions: int
    eos_ids: tuple[int, ...]
    dtype: str | None

    @property
    def conv_channels(self) -> int:
        """Channels of the delta net's convolution: queries, keys and values by head."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @classmethod
    def read(cls, directory: Path) -> ModelConfig:
        """From `directory`/config.json and, where it exists, generation_config.json.

        Raises:
            ConfigError: naming the file and what is wrong.
        """
        path = directory / "config.json"
        generation = directory / "generation_config.json"
        eos_ids = _ids(_read_json(generation), "eos_token_id", generation) if generation.exists() else ()
        return cls.parse(_read_json(path), path, eos_ids)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], path: Path, eos_ids: tuple[int, ...] = ()) -> ModelConfig:
        """From the content of a config.json; `path` is for messages, `eos_ids` come before the config's own.

        Raises:
            ConfigError: naming the path and what is wrong.
        """
        kind = raw.get("model_type")
        if kind not in SUPPORTED:
            raise ConfigError(f"{path}: model_type is {kind!r}; supported are {', '.join(SUPPORTED)}")
        text = raw.get("text_config", raw)
        if not isinstance(text, Mapping):
            raise ConfigError(f"{path}: text_config is not an object")
        if "quantization_config" in raw or "quantization_config" in text:
            raise ConfigError(f"{path}: it has a quantization_config; only unquantised checkpoints are supported")
        fields = _Fields(text, path)
        mixture = "moe" in kind
        layer_types = fields.layer_types()
        head_dim = fields.size("head_dim", default=256)
        rope = fields.rope()
        config = cls(
            hidden=fields.size("hidden_size"),
            vocabulary=fields.size("vocab_size"),
            eps=fields.number("rms_norm_eps", default=1e-6),
            layer_types=layer_types,
            heads=fields.size("num_attention_heads"),
            kv_heads=fields.size("num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=int(head_dim * rope.number("partial_rotary_factor", default=0.25)),
            rope_theta=rope.number("rope_theta", default=1e7),
            key_heads=fields.size("linear_num_key_heads"),
            value_heads=fields.size("linear_num_value_heads"),
            key_dim=fields.size("linear_key_head_dim"),
            value_dim=fields.size("linear_value_head_dim"),
            conv_width=fields.size("linear_conv_kernel_dim", default=4),
            intermediate=0 if mixture else fields.size("intermediate_size"),
            experts=fields.size("num_experts") if mixture else 0,
            experts_per_token=fields.size("num_experts_per_tok") if mixture else 0,
            expert_width=fields.size("moe_intermediate_size") if mixture else 0,
            shared_width=fields.size("shared_expert_intermediate_size") if mixture else 0,
            tied=bool(text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))),
            max_positions=fields.size("max_position_embeddings"),
            eos_ids=tuple(
                dict.fromkeys((*eos_ids, *_ids(text, "eos_token_id", path), *_ids(raw, "eos_token_id", path)))
            ),
            dtype=text.get("dtype") or text.get("torch_dtype") or raw.get("dtype") or raw.get("torch_dtype"),
        )
        config._check(path, text)
        return config

    def _check(self, path: Path, text: Mapping[str, Any]) -> None:
        rules = [
            (self.heads % self.kv_heads == 0, f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly"),
            (
                self.value_heads % self.key_heads == 0,
                f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly",
            ),
            (self.conv_width >= 2, f"linear_conv_kernel_dim is {self.conv_width}; it must be at least 2"),
            (
                0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
                f"{self.rotary_dim} rotated elements of a head of {self.head_dim}; it must be even and fit",
            ),
            (
                self.experts_per_token <= self.experts,
                f"num_experts_per_tok is {self.experts_per_token} of {self.experts} experts",
            ),
            (self.eps > 0, f"rms_norm_eps is {self.eps}; it must be above 0"),
            (self.rope_theta > 1, f"rope_theta is {self.rope_theta}; it must be above 1"),
            (text.get("hidden_act", "silu") == "silu", f"hidden_act is {text.get('hidden_act')!r}; supported is silu"),
            (
                not text.get("attention_bias", False),
                "attention_bias is true; only projections without bias are supported",
            ),
            (text.get("attn_output_gate", True), "attn_output_gate is false; only gated attention is supported"),
            (not text.get("mlp_only_layers"), "mlp_only_layers is set; every layer must be a mixture of experts"),
        ]
        for holds, complaint in rules:
            if not holds:
                raise ConfigError(f"{path}: {complaint}")


class _Fields:
    """Typed access to a JSON object whose complaints name the file and the field."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def size(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if value is None:
            raise ConfigError(f"{self.path}: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.path}: {name} is {value!r}; it must be a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.path}: {name} is {value!r}; it must be a number")
        return float(value)

    def layer_types(self) -> tuple[LayerType, ...]:
        layers = self.size("num_hidden_layers")
        every = self.size("full_attention_interval", default=4)
        default = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
        types = self.values.get("layer_types") or default
        known = {"linear_attention", "full_attention"}
        if not isinstance(types, list) or len(types) != layers or not known.issuperset(types):
            raise ConfigError(
                f"{self.path}: layer_types must be {layers} of {', '.join(sorted(known))}; it is {types!r}"
            )
        return tuple(types)

    def rope(self) -> _Fields:
        """The rotary parameters, of `rope_parameters` or, in the older spelling, beside everything else."""
        nested = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(nested, Mapping):
            raise ConfigError(f"{self.path}: rope_parameters is not an object")
        kind = nested.get("rope_type", nested.get("type", "default"))
        # The three axes of "mrope" are equal for text, which makes it the plain kind.
        if kind not in ("default", "mrope"):
            raise ConfigError(f"{self.path}: rope_type is {kind!r}; supported is default")
        flat = {name: self.values[name] for name in ("rope_theta", "partial_rotary_factor") if name in self.values}
        return _Fields({**flat, **nested}, self.path)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: it holds a {type(content).__name__}, not an object")
    return content


def _ids(values: Mapping[str, Any], name: str, path: Path) -> tuple[int, ...]:
    value = values.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise ConfigError(f"{path}: {name} is {value!r}; it must be an id or a list of ids")
    return tuple(ids)
