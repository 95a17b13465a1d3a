"""From Python arguments to commands: what both fronts share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from tokenspeed.client.errors import ProtocolError
from tokenspeed.client.protocol.commands import ReasoningRule, Sampling, SessionOpen, TurnCreate
from tokenspeed.client.protocol.events import Reply, SessionRecord
from tokenspeed.client.protocol.items import FunctionCallOutputItem, InputItem, MessageItem
from tokenspeed.client.tools import Tool, Toolset
from tokenspeed.client.turns import Turn

TurnInput = str | MessageItem | FunctionCallOutputItem | Mapping[str, Any] | Sequence[Any]
"""Text of the user, or one item, or several: structs of `tokenspeed.client` or dicts of the Responses API's form."""


class SamplingOptions(TypedDict, total=False):
    """Options of `Sampling`, as keywords."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    stop_token_ids: list[int] | None
    ignore_eos: bool | None
    forced_token_ids: list[int] | None


def sampling_of(sampling: Sampling | Mapping[str, Any] | None, options: SamplingOptions) -> Sampling | None:
    """`sampling` with `options` over it; None if nothing is set. Raises TypeError on an unknown name or type."""
    if sampling is None and not options:
        return None
    base: dict[str, Any] = msgspec.to_builtins(sampling) if isinstance(sampling, Sampling) else dict(sampling or {})
    values = {**base, **options}
    unknown = sorted(values.keys() - set(Sampling.__struct_fields__))
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; there are: {', '.join(Sampling.__struct_fields__)}")
    try:
        return msgspec.convert(values, Sampling)
    except msgspec.ValidationError as error:
        raise TypeError(f"sampling: {error}") from None


def input_of(value: TurnInput) -> str | list[InputItem]:
    """A turn's input in the wire's form. Raises TypeError on anything that is no text and no item."""
    if isinstance(value, str):
        return value
    if isinstance(value, MessageItem | FunctionCallOutputItem | Mapping):
        return [_item(value)]
    return [_item(item) for item in value]


def _item(value: object) -> InputItem:
    if isinstance(value, MessageItem | FunctionCallOutputItem):
        return value
    if isinstance(value, str):
        return MessageItem("user", value)
    if not isinstance(value, Mapping):
        raise TypeError(f"an input item is a dict or an item, not {type(value).__name__}")
    # A message may be given as Chat Completions has it, without its type.
    typed = value if "type" in value or "role" not in value else {"type": "message", **value}
    try:
        return msgspec.convert(typed, InputItem)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise TypeError(f"an input item: {error}") from None


def session_open(
    tools: Toolset,
    instructions: str | None,
    model: str | None,
    reasoning: ReasoningRule | None,
    labels: Mapping[str, str] | None,
    sampling: Sampling | None,
) -> SessionOpen:
    return SessionOpen("", model, instructions, tools.offered, sampling, reasoning or "keep", dict(labels or {}))


def check_attach(**defaults: object) -> None:
    """Raise TypeError if any default was given although the session exists already."""
    given = [name for name, value in defaults.items() if value is not None]
    if given:
        raise TypeError(f"{given[0]} cannot be given with id: the session has its own")


def attached_tools(record: SessionRecord, tools: Iterable[Tool]) -> Toolset:
    """The tools of a session that exists, with functions for those of the same name.

    Raises:
        ValueError: a tool that the session does not have.
    """
    attached = Toolset(record.tools)
    functions = Toolset(tools)
    names = [tool.name for tool in attached.offered]
    for tool in functions.offered:
        if tool.name not in names:
            raise ValueError(f"the session has no tool {tool.name!r}; it has: {', '.join(names) or 'none'}")
    attached.functions = functions.functions
    return attached


def record_in(reply: Reply) -> SessionRecord:
    """The session that a reply describes."""
    if reply.session is not None:
        return reply.session
    if not reply.sessions:
        raise ProtocolError(f"the reply {reply.id} names no session")
    return reply.sessions[0]


def turn_create(
    session: str,
    value: TurnInput,
    sampling: Sampling | None,
    held: tuple[FunctionCallOutputItem, ...] = (),
    token_ids: bool = False,
) -> TurnCreate:
    """The command of a turn. `held`: answers to calls of the turn before that belong into the same input; those that
    the caller gives too are the caller's."""
    items = input_of(value)
    if held and not isinstance(items, str):
        given = {item.call_id for item in items if isinstance(item, FunctionCallOutputItem)}
        if given:
            items = [*(output for output in held if output.call_id not in given), *items]
    return TurnCreate("", session, items, sampling, token_ids)


def turn_id(turn: Turn | str | None) -> str | None:
    """The id of a turn that was given as such or by id."""
    return turn.id if isinstance(turn, Turn) else turn
