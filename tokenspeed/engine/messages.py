"""The engine's border: commands in, events out, and what the engine says of itself."""

from __future__ import annotations

import msgspec

from tokenspeed.scheduler.messages import (
    Allow,
    Cancel,
    Ended,
    EndReason,
    EngineCommand,
    EngineEvent,
    Generate,
    MissReason,
    Progress,
    Rejected,
    Release,
    Stand,
    Started,
    Tokens,
    TurnTimings,
    TurnUsage,
)

__all__ = [
    "Allow",
    "Cancel",
    "EndReason",
    "Ended",
    "EngineCommand",
    "EngineEvent",
    "EngineInfo",
    "EngineStats",
    "Generate",
    "MissReason",
    "Progress",
    "Rejected",
    "Release",
    "Stand",
    "Started",
    "Tokens",
    "TurnTimings",
    "TurnUsage",
]


class EngineStats(msgspec.Struct, tag="stats"):
    """Totals since start and the memory's state, for metrics and tests. `embedded`: token rows that the model
    embedded; it equals `computed + decoded`. `late_compilations`: kernels compiled after the engine was ready; not 0
    means that a turn has waited for one."""

    running: int
    queued: int
    embedded: int
    computed: int
    reused: int
    decoded: int
    pages_total: int
    pages_free: int
    rows_total: int
    rows_free: int
    late_compilations: int = 0


class EngineInfo(msgspec.Struct, tag="info"):
    """What the engine serves. `operators`: the implementation chosen for each. `dtype`, `device`: torch's names."""

    model: str
    vocab_size: int
    max_context: int
    eos_token_ids: list[int]
    device: str
    dtype: str
    operators: dict[str, str]
    startup_s: dict[str, float] = {}
