"""What the turns of a session share."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.client.protocol.commands import ReasoningRule, Sampling
from tokenspeed.client.protocol.items import FunctionTool
from tokenspeed.sessions.formats.arguments import ParameterTypes
from tokenspeed.sessions.preamble import Preamble


@dataclass(frozen=True)
class Defaults:
    """A session's defaults, which its forks share; each turn remembers those that it was made under."""

    instructions: str | None
    tools: list[FunctionTool]
    sampling: Sampling
    reasoning: ReasoningRule
    labels: dict[str, str]
    preamble: Preamble
    types: ParameterTypes
