"""The SDK: what an agent imports. Needs httpx, websockets and msgspec alone."""

from tokenspeed.client.aio import AsyncClient, AsyncSession, AsyncTurnStream
from tokenspeed.client.blocking import Client, Session, TurnStream
from tokenspeed.client.errors import ConnectionFailed, ProtocolError, StepLimitExceeded
from tokenspeed.client.protocol.commands import Sampling
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import Reused, SessionRecord, SessionTotals, Timings, Usage
from tokenspeed.client.protocol.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionTool,
    MessageItem,
    ReasoningItem,
)
from tokenspeed.client.tools import tool_output
from tokenspeed.client.turns import Delta, Turn

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "AsyncTurnStream",
    "Client",
    "ConnectionFailed",
    "Delta",
    "FunctionCallItem",
    "FunctionCallOutputItem",
    "FunctionTool",
    "MessageItem",
    "ProtocolError",
    "ReasoningItem",
    "Reused",
    "Sampling",
    "Session",
    "SessionError",
    "SessionRecord",
    "SessionTotals",
    "StepLimitExceeded",
    "Timings",
    "Turn",
    "TurnStream",
    "Usage",
    "tool_output",
]
