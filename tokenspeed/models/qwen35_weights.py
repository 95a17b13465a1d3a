"""Where every tensor of a Qwen3.5 checkpoint goes."""

from __future__ import annotations

from collections.abc import Iterator

from tokenspeed.config.model import ModelConfig
from tokenspeed.models.weights import Parameter, Part, Source

PREFIXES = ("model.language_model.", "model.")
"""Where the text model's tensors stand, in checkpoints with and without other modalities."""

IGNORED = ("model.visual.", "mtp.")
"""Beginnings of tensors that the text model has no use for."""

OUTPUT = "lm_head.weight"


def table_name(name: str, config: ModelConfig) -> str | None:
    """A checkpoint tensor's name as the table spells its sources; None if it is ignored by rule."""
    if name.startswith(IGNORED) or (name == OUTPUT and config.tied):
        return None
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def weight_table(config: ModelConfig) -> list[Parameter]:
    """Every parameter of the model. Source names lack the prefix, but for `lm_head.weight`."""
    vocabulary = Part("vocabulary ids", config.vocabulary)
    table = [
        Parameter("embedding", (vocabulary,), _all("embed_tokens.weight", vocabulary), after=(config.hidden,)),
        _vector("norm", "norm.weight", config.hidden),
    ]
    if not config.tied:
        table.append(Parameter("output", (vocabulary,), _all(OUTPUT, vocabulary), after=(config.hidden,)))
    for layer, kind in enumerate(config.layer_types):
        name, source = f"layers.{layer}.", f"layers.{layer}."
        table.append(_vector(f"{name}mixer_norm", f"{source}input_layernorm.weight", config.hidden))
        table.append(_vector(f"{name}feed_forward_norm", f"{source}post_attention_layernorm.weight", config.hidden))
        if kind == "linear_attention":
            table.extend(_delta_net(config, f"{name}mixer.", f"{source}linear_attn."))
        else:
            table.extend(_attention(config, f"{name}mixer.", f"{source}self_attn."))
        if config.experts:
            table.extend(_mixture(config, f"{name}feed_forward.", f"{source}mlp."))
        else:
            table.extend(_swiglu(f"{name}feed_forward.", f"{source}mlp.", config.hidden, config.intermediate))
    return table


def _delta_net(config: ModelConfig, name: str, source: str) -> Iterator[Parameter]:
    q = Part("key heads of q", config.key_heads, config.key_dim)
    k = Part("key heads of k", config.key_heads, config.key_dim)
    v = Part("value heads of v", config.value_heads, config.value_dim)
    z = Part("value heads of z", config.value_heads, config.value_dim)
    b = Part("value heads of b", config.value_heads)
    a = Part("value heads of a", config.value_heads)
    projections = (
        Source(f"{source}in_proj_qkv.weight", (q.name, k.name, v.name)),
        Source(f"{source}in_proj_z.weight", (z.name,)),
        Source(f"{source}in_proj_b.weight", (b.name,)),
        Source(f"{source}in_proj_a.weight", (a.name,)),
    )
    yield Parameter(f"{name}input", (q, k, v, z, b, a), projections, after=(config.hidden,))
    conv = Source(f"{source}conv1d.weight", (q.name, k.name, v.name), squeeze=1)
    yield Parameter(f"{name}conv", (q, k, v), (conv,), after=(config.conv_width,))
    heads = Part("value heads", config.value_heads)
    yield Parameter(f"{name}a_log", (heads,), _all(f"{source}A_log", heads), exact=True)
    yield Parameter(f"{name}dt_bias", (heads,), _all(f"{source}dt_bias", heads), exact=True)
    yield _vector(f"{name}norm", f"{source}norm.weight", config.value_dim)
    yield Parameter(f"{name}output", (z,), _all(f"{source}out_proj.weight", z), before=(config.hidden,))


def _attention(config: ModelConfig, name: str, source: str) -> Iterator[Parameter]:
    q = Part("query heads", config.heads, 2 * config.head_dim)  # the query and its gate
    k = Part("KV heads of k", config.kv_heads, config.head_dim, replicated=True)
    v = Part("KV heads of v", config.kv_heads, config.head_dim, replicated=True)
    projections = tuple(
        Source(f"{source}{letter}_proj.weight", (part.name,)) for letter, part in (("q", q), ("k", k), ("v", v))
    )
    yield Parameter(f"{name}input", (q, k, v), projections, after=(config.hidden,))
    yield _vector(f"{name}q_norm", f"{source}q_norm.weight", config.head_dim)
    yield _vector(f"{name}k_norm", f"{source}k_norm.weight", config.head_dim)
    heads = Part("query heads", config.heads, config.head_dim)
    yield Parameter(f"{name}output", (heads,), _all(f"{source}o_proj.weight", heads), before=(config.hidden,))


def _swiglu(name: str, source: str, hidden: int, width: int) -> Iterator[Parameter]:
    gate, up = Part("columns of gate", width), Part("columns of up", width)
    projections = (Source(f"{source}gate_proj.weight", (gate.name,)), Source(f"{source}up_proj.weight", (up.name,)))
    yield Parameter(f"{name}gate_up", (gate, up), projections, after=(hidden,))
    columns = Part("columns of down", width)
    yield Parameter(f"{name}down", (columns,), _all(f"{source}down_proj.weight", columns), before=(hidden,))


def _mixture(config: ModelConfig, name: str, source: str) -> Iterator[Parameter]:
    experts, hidden = config.experts, config.hidden
    gate, up = Part("columns of gate", config.expert_width), Part("columns of up", config.expert_width)
    columns = Part("columns of down", config.expert_width)
    gate_up = [Source(f"{source}experts.gate_up_proj", (gate.name, up.name))]
    down = [Source(f"{source}experts.down_proj", (columns.name,))]
    for expert in range(experts):
        one = f"{source}experts.{expert}."
        gate_up.append(Source(f"{one}gate_proj.weight", (gate.name,), index=expert))
        gate_up.append(Source(f"{one}up_proj.weight", (up.name,), index=expert))
        down.append(Source(f"{one}down_proj.weight", (columns.name,), index=expert))
    router = Part("experts", experts)
    yield Parameter(f"{name}router", (router,), _all(f"{source}gate.weight", router), after=(hidden,), whole=True)
    yield Parameter(f"{name}gate_up", (gate, up), tuple(gate_up), before=(experts,), after=(hidden,))
    yield Parameter(f"{name}down", (columns,), tuple(down), before=(experts, hidden))
    yield from _swiglu(f"{name}shared.", f"{source}shared_expert.", hidden, config.shared_width)
    one_row = Part("row", 1)
    gate_source = _all(f"{source}shared_expert_gate.weight", one_row)
    yield Parameter(f"{name}shared_gate", (one_row,), gate_source, after=(hidden,), whole=True)


def _vector(name: str, source: str, length: int) -> Parameter:
    elements = Part("elements", length)
    return Parameter(name, (elements,), _all(source, elements), whole=True)


def _all(name: str, part: Part) -> tuple[Source]:
    return (Source(name, (part.name,)),)
