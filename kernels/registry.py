"""Which implementation serves each operator, decided once at start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from tokenspeed.kernels import attention, convolution, delta_net, delta_rule, linear, moe, norms, rotary, sampling, step


class Operators:
    """The operators a model calls. A class attribute is the operator's documented function, which is also its reference
    implementation; `select` binds the chosen implementations to an instance."""

    add_norm_linear = staticmethod(linear.add_norm_linear)
    vocabulary_logits = staticmethod(linear.vocabulary_logits)
    linear = staticmethod(linear.linear)
    gemma_rms_norm = staticmethod(norms.gemma_rms_norm)
    add_rms_norm = staticmethod(norms.add_rms_norm)
    gated_rms_norm = staticmethod(norms.gated_rms_norm)
    rotary_table = staticmethod(rotary.rotary_table)
    qk_norm_rope_write = staticmethod(rotary.qk_norm_rope_write)
    attention_prefill = staticmethod(attention.attention_prefill)
    attention_decode = staticmethod(attention.attention_decode)
    causal_conv_prefill = staticmethod(convolution.causal_conv_prefill)
    gated_delta_prefill = staticmethod(delta_rule.gated_delta_prefill)
    delta_net_step = staticmethod(delta_net.delta_net_step)
    route = staticmethod(moe.route)
    swiglu = staticmethod(moe.swiglu)
    mixture = staticmethod(moe.mixture)
    choose = staticmethod(sampling.choose)
    begin_step = staticmethod(step.begin_step)
    end_step = staticmethod(step.end_step)

    def __init__(self, chosen: dict[str, Implementation]) -> None:
        self.chosen = {name: implementation.name for name, implementation in chosen.items()}
        for name, implementation in chosen.items():
            setattr(self, name, implementation.function)


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator. `serves` tells whether it can, for a device and the model's element type."""

    name: str
    function: Callable[..., Any]
    serves: Callable[[torch.device, torch.dtype], bool]


def implementations() -> dict[str, list[Implementation]]:
    """Every operator's implementations, the preferred one first; the reference serves everything and comes last."""
    names = [name for name, value in vars(Operators).items() if isinstance(value, staticmethod)]
    listed = {name: [Implementation("reference", getattr(Operators, name), _always)] for name in names}
    if torch.cuda.is_available() and find_spec("triton") is not None:
        # Imported only here: Triton belongs to torch's CUDA build.
        from tokenspeed.kernels.triton.table import TABLE

        for name, function in TABLE.items():
            listed[name].insert(0, Implementation("triton", function, _on_a_gpu))
    return listed


def compilations() -> int:
    """Kernels compiled in this process so far."""
    launch = sys.modules.get("tokenspeed.kernels.triton.launch")
    return launch.compiled if launch is not None else 0


def select(device: torch.device, dtype: torch.dtype) -> Operators:
    """The preferred implementation of every operator that serves `device` and `dtype`. `Operators.chosen` is
    {operator: implementation}, for people."""
    return Operators(
        {
            name: next(candidate for candidate in candidates if candidate.serves(device, dtype))
            for name, candidates in implementations().items()
        }
    )


def _on_a_gpu(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float32)


def _always(device: torch.device, dtype: torch.dtype) -> bool:
    return True
