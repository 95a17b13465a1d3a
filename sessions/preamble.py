"""What stands before every conversation: system text and tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenspeed.sessions.tokenizer import Ids


@dataclass(frozen=True)
class Preamble:
    """System text and tools, rendered.

    Attributes:
        tools: as the chat template reads them.
        brought: the system text that a conversation opened with itself; it is `system` as long as its session has no
            instructions of its own.
    """

    system: str | None
    tools: list[Any]
    ids: Ids
    brought: str | None = None
