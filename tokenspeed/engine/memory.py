"""How much of what an engine can hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed.cache.pools import CacheGeometry
from tokenspeed.config.engine import Dtype, EngineConfig
from tokenspeed.scheduler.limits import MAX_MARKS

CPU_CACHE_BYTES = 1 << 30
STEP_BYTES = 6 << 30
"""Left free on a GPU for what a step computes: a chunk's activations, the graphs' own memory, the allocator's waste."""
ROW_SHARE = 0.25
"""Part of the cache's bytes for state rows: a turn of about a thousand tokens needs as much for its state as for KV."""


@dataclass(frozen=True)
class Sizes:
    """Pages and rows, sinks included, and the longest context that they allow."""

    pages: int
    rows: int
    max_context: int


def cache_bytes(config: EngineConfig, device: torch.device) -> int:
    """Bytes for pages and rows, once the weights are on the device."""
    if config.cache_bytes is not None:
        return config.cache_bytes
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return max(0, free_bytes - STEP_BYTES)


def divide(config: EngineConfig, total: int, geometry: CacheGeometry, max_positions: int, depth: int) -> Sizes:
    """Divide the cache's `total` bytes into pages and rows.

    Raises:
        ValueError: where not even a short turn fits, or `max_context` exceeds the model's own.
    """
    wanted = config.max_context or max_positions
    if wanted > max_positions:
        raise ValueError(f"max_context is {wanted}; the model's own is {max_positions}")
    least_rows = depth + 1 + MAX_MARKS + 1
    rows = config.rows or max(least_rows, int(total * ROW_SHARE) // geometry.row_bytes)
    pages = config.pages or (total - rows * geometry.row_bytes) // geometry.page_bytes
    # One page is the sink, one may be needed beside its copy.
    fits = max(0, pages - 2) * geometry.page_size
    if rows < least_rows or fits < geometry.page_size:
        raise ValueError(
            f"the cache is too small: {rows} state rows of {geometry.row_bytes} bytes ({least_rows} are needed) and "
            f"{pages} pages of {geometry.page_bytes} bytes (3 are needed); raise cache_bytes from {total}"
        )
    return Sizes(pages, rows, min(wanted, fits))


def usable_device(name: str) -> torch.device:
    """torch's device of that name; `auto` is a GPU where there is one, else the CPU. Raises ValueError where this
    machine, or this build of torch, has none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the device {name!r} cannot be used: {reason}") from None
    return device


def torch_dtype(name: Dtype, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU, where bfloat16 is slow, and bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    return {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}[name]
