"""Commands of the native protocol. Each carries the client's `id`; the reply echoes it."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenspeed.client.protocol.items import FunctionTool, InputItem

ReasoningRule = Literal["keep", "drop"]


class Sampling(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=False):
    """Sampling defaults of a session or options of a turn; a field left out falls back to the session's, then to the
    checkpoint's `generation_config.json`.

    `max_tokens` bounds a turn's output; `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off.
    `forced_token_ids`, where the server allows it, are what the output begins with.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    forced_token_ids: list[int] | None = None


class SessionOpen(msgspec.Struct, tag_field="type", tag="session.open", omit_defaults=True):
    id: str
    model: str | None = None
    instructions: str | None = None
    tools: list[FunctionTool] = []
    sampling: Sampling | None = None
    reasoning: ReasoningRule = "keep"
    labels: dict[str, str] = {}


class TurnCreate(msgspec.Struct, tag_field="type", tag="turn.create", omit_defaults=True):
    """`token_ids` asks for the turn's exact ids in `turn.ended`."""

    id: str
    session: str
    input: str | list[InputItem]
    sampling: Sampling | None = None
    token_ids: bool = False


class TurnCancel(msgspec.Struct, tag_field="type", tag="turn.cancel", omit_defaults=True):
    id: str
    turn: str
    keep: Literal["partial", "nothing"] = "partial"


class SessionFork(msgspec.Struct, tag_field="type", tag="session.fork", omit_defaults=True):
    id: str
    session: str
    at: str | None = None
    n: int = 1


class SessionRewind(msgspec.Struct, tag_field="type", tag="session.rewind", omit_defaults=True):
    """`to`: a turn of the session's lineage, or `start`."""

    id: str
    session: str
    to: str


class SessionGet(msgspec.Struct, tag_field="type", tag="session.get", omit_defaults=True):
    id: str
    session: str


class SessionList(msgspec.Struct, tag_field="type", tag="session.list", omit_defaults=True):
    id: str


class SessionTurns(msgspec.Struct, tag_field="type", tag="session.turns", omit_defaults=True):
    """`token_ids` asks for the exact ids of each turn."""

    id: str
    session: str
    token_ids: bool = False


class SessionUsage(msgspec.Struct, tag_field="type", tag="session.usage", omit_defaults=True):
    id: str
    session: str


class SessionClose(msgspec.Struct, tag_field="type", tag="session.close", omit_defaults=True):
    id: str
    session: str


Command = (
    SessionOpen
    | TurnCreate
    | TurnCancel
    | SessionFork
    | SessionRewind
    | SessionGet
    | SessionList
    | SessionTurns
    | SessionUsage
    | SessionClose
)
