"""The pocket model in plain torch, for training and for checking: names and formulas are those of the checkpoint.

Everything here works on padded batches `[rows, tokens]`. Parameters are kept in float32 and cast to the type of the
activations where they are used, so the same module trains in bfloat16 and is checked in float32.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

CHUNK = 64
DIAGONAL = 8  # block size inside which the chunk's triangular system is inverted by a power series


@dataclass(frozen=True)
class Shape:
    """The sizes that `config.json` states, under its names."""

    vocab_size: int = 3072
    hidden_size: int = 256
    num_hidden_layers: int = 9
    full_attention_interval: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 56
    shared_expert_intermediate_size: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.25

    @property
    def layer_types(self) -> list[str]:
        """Which mixer each layer has, in `config.json`'s words."""
        interval = self.full_attention_interval
        return [
            "linear_attention" if (layer + 1) % interval else "full_attention"
            for layer in range(self.num_hidden_layers)
        ]


def config_json(shape: Shape, end: int, pad: int, context: int) -> dict[str, Any]:
    """The checkpoint's `config.json` for a shape; `end` and `pad` are token ids, `context` is in tokens."""
    sizes = asdict(shape)
    theta, partial = sizes.pop("rope_theta"), sizes.pop("partial_rotary_factor")
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        **sizes,
        "layer_types": shape.layer_types,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": partial,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "use_cache": True,
    }


def shape_of(config: dict[str, Any]) -> Shape:
    """The shape that a `config.json` describes."""
    rope = config["rope_parameters"]
    known = {name: config[name] for name in asdict(Shape()) if name in config}
    return Shape(**known, rope_theta=rope["rope_theta"], partial_rotary_factor=rope["partial_rotary_factor"])


class Linear(nn.Linear):
    """A linear map without bias whose float32 weight is used in the type of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=0.5 / math.sqrt(inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm in the Gemma flavour, `x / rms(x) * (1 + w)`, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight)).to(dtype)


class UnitLowerInverse(torch.autograd.Function):
    """`(I + A)^-1` for strictly lower triangular `A: [..., CHUNK, CHUNK]`.

    Blocks of the diagonal are inverted by the (finite) power series, then joined pairwise; the product of powers over
    the whole chunk would lose all digits where keys repeat.
    """

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        size, block = lower.shape[-1], DIAGONAL
        eye = torch.eye(block, dtype=lower.dtype, device=lower.device)
        starts = range(0, size, block)
        diagonal = torch.stack([lower[..., s : s + block, s : s + block] for s in starts], dim=-3)
        power, inverse = -diagonal, eye - diagonal
        for _ in range(block.bit_length() - 2):
            power = power @ power
            inverse = inverse + inverse @ power
        while block < size:
            first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
            corner = torch.stack(
                [lower[..., s + block : s + 2 * block, s : s + block] for s in range(0, size, 2 * block)], dim=-3
            )
            corner = -(second @ corner @ first)
            top = torch.cat([first, torch.zeros_like(first)], dim=-1)
            inverse = torch.cat([top, torch.cat([corner, second], dim=-1)], dim=-2)
            block *= 2
        inverse = inverse.squeeze(-3)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed).tril(-1)


def scan_states(decay: Tensor, write: Tensor) -> Tensor:
    """States after each chunk of `S_n = decay_n @ S_(n-1) + write_n`, from zero, in logarithmic depth.

    decay: `[batch, chunks, k, k]`, write: `[batch, chunks, k, v]`; returns `[batch, chunks, k, v]`.
    """
    chunks = write.shape[1]
    if chunks == 1:
        return write
    if chunks % 2:
        head = scan_states(decay[:, :-1], write[:, :-1])
        return torch.cat([head, decay[:, -1:] @ head[:, -1:] + write[:, -1:]], dim=1)
    even, odd = decay[:, 0::2], decay[:, 1::2]
    after_odd = scan_states(odd @ even, odd @ write[:, 0::2] + write[:, 1::2])
    before_even = F.pad(after_odd[:, :-1], (0, 0, 0, 0, 1, 0))
    after_even = even @ before_even + write[:, 0::2]
    return torch.stack([after_even, after_odd], dim=2).flatten(1, 2)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule over whole rows from an empty state, in chunks.

    q, k: `[rows, tokens, heads, k]` (normalised, q scaled), v: `[rows, tokens, heads, v]`, g (log decay) and beta:
    `[rows, tokens, heads]` in float32; tokens a multiple of `CHUNK`. Returns the outputs `[rows, tokens, heads, v]` and
    the states at the rows' ends `[rows, heads, k, v]` in float32.
    """
    rows, tokens, heads, _ = k.shape
    dtype = q.dtype

    def chunked(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(rows * heads, tokens // CHUNK, CHUNK, *x.shape[3:])

    q, k, v, g, beta = chunked(q), chunked(k), chunked(v), chunked(g), chunked(beta)
    total = g.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~causal, float("-inf")).exp()
    k_t = k.transpose(-1, -2)
    lower = ((k @ k_t).float() * between * beta.unsqueeze(-1)).tril(-1)
    inverse = UnitLowerInverse.apply(lower).to(dtype)
    values = inverse @ (v * beta.unsqueeze(-1).to(dtype))
    reads = inverse @ (k * (beta * total.exp()).unsqueeze(-1).to(dtype))
    last = total[..., -1:]
    writes = (k * (last - total).exp().unsqueeze(-1).to(dtype)).transpose(-1, -2)
    eye = torch.eye(k.shape[-1], device=q.device)
    decay = eye * last.exp().unsqueeze(-1) - (writes @ reads).float()
    states = scan_states(decay, (writes @ values).float())
    before = F.pad(states[:, :-1], (0, 0, 0, 0, 1, 0)).to(dtype)
    values = values - reads @ before
    inside = (q @ k_t) * between.to(dtype)
    out = (q * total.exp().unsqueeze(-1).to(dtype)) @ before + inside @ values
    out = out.reshape(rows, heads, tokens, -1).transpose(1, 2)
    return out, states[:, -1].reshape(rows, heads, *states.shape[2:])


def unit(x: Tensor) -> Tensor:
    """Rows of the last dimension at length one, computed in float32."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


class DepthwiseConv(nn.Module):
    """Holds `conv1d.weight: [channels, 1, width]`."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, width) * 0.2)
        with torch.no_grad():
            self.weight[:, 0, -1] += 0.6


class HeadNorm(nn.Module):
    """The mixer's output norm: RMSNorm by head times `w`, then times `SiLU(z)`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return (y * F.silu(z.float())).to(x.dtype)


class GatedDeltaNet(nn.Module):
    """The recurrent mixer. Its state for one row is the last raw conv columns and one matrix a value head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        keys = shape.linear_num_key_heads * shape.linear_key_head_dim
        values = shape.linear_num_value_heads * shape.linear_value_head_dim
        self.keys, self.values = keys, values
        self.in_proj_qkv = Linear(shape.hidden_size, 2 * keys + values)
        self.in_proj_z = Linear(shape.hidden_size, values)
        self.in_proj_b = Linear(shape.hidden_size, shape.linear_num_value_heads)
        self.in_proj_a = Linear(shape.hidden_size, shape.linear_num_value_heads)
        self.conv1d = DepthwiseConv(2 * keys + values, shape.linear_conv_kernel_dim)
        step = torch.exp(torch.empty(shape.linear_num_value_heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.A_log = nn.Parameter(torch.empty(shape.linear_num_value_heads).uniform_(1.0, 16.0).log())
        self.norm = HeadNorm(shape.linear_value_head_dim, shape.rms_norm_eps)
        self.out_proj = Linear(values, shape.hidden_size)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The log decay and the write strength, `[rows, tokens, value heads]` each, in float32."""
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        return g, torch.sigmoid(self.in_proj_b(x).float())

    def heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v by value head of convolved columns `[rows, tokens, channels]`."""
        shape = self.shape
        q, k, v = mixed.split([self.keys, self.keys, self.values], dim=-1)
        ratio = shape.linear_num_value_heads // shape.linear_num_key_heads
        q = unit(q.unflatten(-1, (-1, shape.linear_key_head_dim))) * shape.linear_key_head_dim**-0.5
        k = unit(k.unflatten(-1, (-1, shape.linear_key_head_dim)))
        v = v.unflatten(-1, (-1, shape.linear_value_head_dim))
        return q.repeat_interleave(ratio, 2), k.repeat_interleave(ratio, 2), v

    def forward(self, x: Tensor) -> Tensor:
        return self.prefill(x, None)[0]

    def prefill(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, raw conv columns and final states of whole rows; where `valid` is false, nothing is written."""
        raw = self.in_proj_qkv(x)
        width = self.shape.linear_conv_kernel_dim
        taps = self.conv1d.weight.squeeze(1).to(x.dtype)
        padded = F.pad(raw, (0, 0, width - 1, 0))
        tokens = x.shape[1]
        mixed = padded[:, 0:tokens] * taps[:, 0]
        for tap in range(1, width):
            mixed = mixed + padded[:, tap : tap + tokens] * taps[:, tap]
        q, k, v = self.heads(F.silu(mixed))
        g, beta = self.gates(x)
        if valid is not None:
            g, beta = g * valid.unsqueeze(-1), beta * valid.unsqueeze(-1)
        out, state = delta_rule(q, k, v, g, beta)
        z = self.in_proj_z(x).unflatten(-1, (-1, self.shape.linear_value_head_dim))
        return self.out_proj(self.norm(out, z).flatten(-2)), raw, state

    def step(self, x: Tensor, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One token a row: x `[rows, 1, hidden]`, window `[rows, 3, channels]`, state `[rows, heads, k, v]`."""
        columns = torch.cat([window, self.in_proj_qkv(x)], dim=1)
        mixed = (columns * self.conv1d.weight.squeeze(1).T.to(x.dtype)).sum(1, keepdim=True)
        q, k, v = (part.squeeze(1).float() for part in self.heads(F.silu(mixed)))
        g, beta = (part.squeeze(1) for part in self.gates(x))
        state = state * g.exp()[..., None, None]
        error = (v - (state * k.unsqueeze(-1)).sum(-2)) * beta.unsqueeze(-1)
        state = state + k.unsqueeze(-1) * error.unsqueeze(-2)
        out = (state * q.unsqueeze(-1)).sum(-2).unsqueeze(1).to(x.dtype)
        z = self.in_proj_z(x).unflatten(-1, (-1, self.shape.linear_value_head_dim))
        return self.out_proj(self.norm(out, z).flatten(-2)), columns[:, 1:], state


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Partial neox RoPE: x `[rows, tokens, heads, head]`, cos and sin `[rows or 1, tokens, rotary / 2]`."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class GatedAttention(nn.Module):
    """Full attention with normalised heads, partial RoPE and an output gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.head_dim
        self.q_proj = Linear(shape.hidden_size, shape.num_attention_heads * shape.head_dim * 2)
        self.k_proj = Linear(shape.hidden_size, shape.num_key_value_heads * shape.head_dim)
        self.v_proj = Linear(shape.hidden_size, shape.num_key_value_heads * shape.head_dim)
        self.o_proj = Linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size)
        self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v `[rows, tokens, heads, head]` (rotated) and the gate `[rows, tokens, heads * head]`."""
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head)).chunk(2, dim=-1)
        k = self.k_proj(x).unflatten(-1, (-1, self.head))
        v = self.v_proj(x).unflatten(-1, (-1, self.head))
        q, k = rotate(self.q_norm(q, x.dtype), cos, sin), rotate(self.k_norm(k, x.dtype), cos, sin)
        return q, k, v, gate.flatten(-2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.prefill(x, cos, sin)[0]

    def prefill(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, gate = self.project(x, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2) * torch.sigmoid(gate)), k, v

    def step(self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        """One token a row at position `lengths: [rows]`; keys and values `[rows, heads, room, head]` are written."""
        q, k, v, gate = self.project(x, cos, sin)
        row = torch.arange(x.shape[0], device=x.device)
        keys[row, :, lengths], values[row, :, lengths] = k.squeeze(1), v.squeeze(1)
        seen = torch.arange(keys.shape[2], device=x.device) <= lengths[:, None]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=seen[:, None, None], enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(-2) * torch.sigmoid(gate))


class Experts(nn.Module):
    """Fused expert weights: `gate_up_proj: [experts, 2 * width, hidden]`, `down_proj: [experts, hidden, width]`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        count, width, hidden = shape.num_experts, shape.moe_intermediate_size, shape.hidden_size
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * width, hidden) * (0.5 / math.sqrt(hidden)))
        self.down_proj = nn.Parameter(torch.randn(count, hidden, width) * (0.5 / math.sqrt(2 * width)))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """All experts in one product, each token's unselected ones weighted zero; weights: `[..., experts]`."""
        count, double, hidden = self.gate_up_proj.shape
        inner = F.linear(x, self.gate_up_proj.reshape(count * double, hidden).to(x.dtype))
        gate, up = inner.unflatten(-1, (count, double)).chunk(2, dim=-1)
        inner = F.silu(gate) * up * weights.unsqueeze(-1).to(x.dtype)
        return inner.flatten(-2) @ self.down_proj.transpose(1, 2).reshape(count * double // 2, hidden).to(x.dtype)


class SharedExpert(nn.Module):
    """A SwiGLU feed-forward."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(hidden, width), Linear(hidden, width)
        self.down_proj = Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MixtureOfExperts(nn.Module):
    """Routed experts plus a gated shared one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top = shape.num_experts_per_tok
        self.gate = Linear(shape.hidden_size, shape.num_experts)
        self.experts = Experts(shape)
        self.shared_expert = SharedExpert(shape.hidden_size, shape.shared_expert_intermediate_size)
        self.shared_expert_gate = Linear(shape.hidden_size, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the balance loss (1 when the experts are used evenly)."""
        probabilities = self.gate(x).float().softmax(-1)
        best, chosen = probabilities.topk(self.top, dim=-1)
        weights = torch.zeros_like(probabilities).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        count = probabilities.shape[-1]
        share = (weights.detach() > 0).float().flatten(0, -2).mean(0) / self.top
        balance = count * (share * probabilities.flatten(0, -2).mean(0)).sum()
        return self.experts(x, weights) + shared, balance


class Layer(nn.Module):
    """One pre-norm layer over a float32 residual."""

    def __init__(self, shape: Shape, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.recurrent = kind == "linear_attention"
        if self.recurrent:
            self.linear_attn = GatedDeltaNet(shape)
        else:
            self.self_attn = GatedAttention(shape)
        self.mlp = MixtureOfExperts(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x: `[rows, tokens, hidden]` float32; returns the new residual and the balance loss."""
        y = self.input_layernorm(x, self.dtype)
        x = x + (self.linear_attn(y) if self.recurrent else self.self_attn(y, cos, sin))
        return self.feed_forward(x)

    def feed_forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, balance = self.mlp(self.post_attention_layernorm(x, self.dtype))
        return x + y, balance


class Backbone(nn.Module):
    """`model.*` of the checkpoint."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(shape, kind, dtype) for kind in shape.layer_types)
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def stack(self) -> list[Layer]:
        """The layers in order."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]


class DraftHead(nn.Module):
    """`mtp.*`: drafts token t + 2 from the hidden vector at t (after the final norm) and the token t + 1."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.pre_fc_norm_hidden = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.fc = Linear(2 * shape.hidden_size, shape.hidden_size)
        self.layers = nn.ModuleList([Layer(shape, "full_attention", dtype)])
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.dtype = dtype

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The layer's input, float32."""
        pair = [self.pre_fc_norm_embedding(embedded, self.dtype), self.pre_fc_norm_hidden(hidden, self.dtype)]
        return self.fc(torch.cat(pair, dim=-1)).float()


class Pocket(nn.Module):
    """The language model with its draft head; `state_dict()` has the checkpoint's names."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.model = Backbone(shape, dtype)
        self.mtp = DraftHead(shape, dtype)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[..., rotary / 2]` of integer positions."""
        size = int(self.shape.head_dim * self.shape.partial_rotary_factor)
        steps = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32)
        angles = positions.unsqueeze(-1).float() * self.shape.rope_theta ** (-steps / size)
        return angles.cos(), angles.sin()

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Final hidden vectors `[rows, tokens, hidden]` of ids `[rows, tokens]`, and the mean balance loss."""
        cos, sin = self.rotary(torch.arange(ids.shape[1], device=ids.device).unsqueeze(0))
        x = self.model.embed_tokens(ids)
        losses = []
        for layer in self.model.stack():
            x, balance = layer(x, cos, sin)
            losses.append(balance)
        return self.model.norm(x, self.dtype), torch.stack(losses).mean()

    def draft(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Draft vectors `[rows, tokens, hidden]`: place t, made of hidden t and token t + 1, is for token t + 2.

        The last place has no next token and means nothing; it keeps the rows' shape, and so one compiled layer.
        """
        x = self.mtp.join(self.model.embed_tokens(F.pad(ids[:, 1:], (0, 1))), hidden)
        cos, sin = self.rotary(torch.arange(x.shape[1], device=ids.device).unsqueeze(0))
        x, _ = self.mtp.layers[0](x, cos, sin)
        return self.mtp.norm(x, self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., vocabulary]` in the type of the hidden vectors."""
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype))


def save(model: Pocket, path: Path) -> None:
    """Write the weights in bfloat16 (the decay's parameters in float32) under the checkpoint's names."""
    state = {}
    for name, value in model.state_dict().items():
        exact = name.endswith(("A_log", "dt_bias"))
        state[name] = value.detach().to("cpu", torch.float32 if exact else torch.bfloat16).contiguous()
    save_file(state, path, metadata={"format": "pt"})


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Pocket:
    """The model of a checkpoint directory (`config.json`, `model.safetensors`), on the CPU."""
    model = Pocket(shape_of(json.loads((directory / "config.json").read_text())), dtype)
    state = {name: value.float() for name, value in load_file(directory / "model.safetensors").items()}
    model.load_state_dict(state)
    return model.eval()
