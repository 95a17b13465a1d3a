"""Which operators there are in Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenspeed.kernels.triton import (
    attention,
    convolution,
    delta_net,
    delta_rule,
    linear,
    moe,
    norms,
    rotary,
    sampling,
)
from tokenspeed.kernels.triton import step as steps

TABLE: dict[str, Callable[..., Any]] = {
    "linear": linear.linear,
    "add_norm_linear": linear.add_norm_linear,
    "vocabulary_logits": linear.vocabulary_logits,
    "gemma_rms_norm": norms.gemma_rms_norm,
    "add_rms_norm": norms.add_rms_norm,
    "rotary_table": rotary.rotary_table,
    "qk_norm_rope_write": rotary.qk_norm_rope_write,
    "attention_decode": attention.attention_decode,
    "attention_prefill": attention.attention_prefill,
    "causal_conv_prefill": convolution.causal_conv_prefill,
    "gated_delta_prefill": delta_rule.gated_delta_prefill,
    "gated_rms_norm": delta_net.gated_rms_norm,
    "delta_net_step": delta_net.delta_net_step,
    "route": moe.route,
    "swiglu": moe.swiglu,
    "mixture": moe.mixture,
    "choose": sampling.choose,
    "begin_step": steps.begin_step,
    "end_step": steps.end_step,
}
