"""The SDK: what an agent imports. Needs httpx, websockets and msgspec alone."""

from tokenspeed.client.aio import AsyncBranch, AsyncClient
from tokenspeed.client.aio_session import AsyncSession
from tokenspeed.client.aio_stream import AsyncTurnStream
from tokenspeed.client.blocking import Branch, Client
from tokenspeed.client.errors import ConnectionFailed, ProtocolError, StepLimitExceeded
from tokenspeed.client.protocol.commands import Sampling
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import (
    Residency,
    Reused,
    SessionRecord,
    SessionTotals,
    Timings,
    TokenLogprob,
    Usage,
)
from tokenspeed.client.protocol.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionTool,
    MessageItem,
    ReasoningItem,
)
from tokenspeed.client.session import Session
from tokenspeed.client.stream import TurnStream
from tokenspeed.client.tools import tool_output
from tokenspeed.client.turns import Delta, Turn

__all__ = [
    "AsyncBranch",
    "AsyncClient",
    "AsyncSession",
    "AsyncTurnStream",
    "Branch",
    "Client",
    "ConnectionFailed",
    "Delta",
    "FunctionCallItem",
    "FunctionCallOutputItem",
    "FunctionTool",
    "MessageItem",
    "ProtocolError",
    "ReasoningItem",
    "Residency",
    "Reused",
    "Sampling",
    "Session",
    "SessionError",
    "SessionRecord",
    "SessionTotals",
    "StepLimitExceeded",
    "Timings",
    "TokenLogprob",
    "Turn",
    "TurnStream",
    "Usage",
    "tool_output",
]
