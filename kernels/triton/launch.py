"""How the kernels of a decode step follow each other.

With programmatic dependent launch (Hopper and later) a kernel may start while its predecessor still runs. It calls
`release_next` early, so that the kernel behind it may start too, and reads or writes nothing that another kernel writes
or reads before `wait_for_previous`; weights, which nobody writes, may be fetched before. A kernel launched so must call
`wait_for_previous` on every path: what it leaves unwaited its successors would not wait for either.

A decode step begins with a plain launch (`begin_step`) and another behind it (the embedding), so that all kernels after
them find complete what earlier steps and `begin_step` wrote. That, too, may be fetched before the wait, but past the L1
(`cache_modifier=".cg"`), which may remember an older step.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run under the interpreter, on tensors of the CPU."""
_INTERPRETED = tl.constexpr(INTERPRETED)


compiled = 0
"""Kernels compiled in this process, or fetched from the disk's cache, so far."""


def _count(**_: Any) -> None:
    global compiled
    compiled += 1


triton.knobs.runtime.jit_post_compile_hook = _count


@triton.jit
def dot(a, b, total):
    """total + a · b, float32 operands without tf32. The interpreter takes bfloat16 for integers, so it gets float32."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Until the kernels launched before have ended and their writes can be seen."""
    if PDL:
        gdc_wait()


@triton.jit
def release_next(PDL: tl.constexpr):
    """Let the next kernel start once every program of this one has come here."""
    if PDL:
        gdc_launch_dependents()


def chained(device: torch.device) -> dict[str, Any]:
    """Keyword arguments for the launch of a kernel that takes `PDL: tl.constexpr` and waits as this module says."""
    return {"PDL": True, "launch_pdl": True} if _has_dependent_launch(device) else {"PDL": False}


@cache
def _has_dependent_launch(device: torch.device) -> bool:
    return not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
