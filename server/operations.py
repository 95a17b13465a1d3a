"""The HTTP mirror as a table: which request is which command, and what its answer is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import NODEFAULT, Struct

from tokenspeed.client.protocol.commands import (
    Command,
    SessionClose,
    SessionFork,
    SessionGet,
    SessionList,
    SessionOpen,
    SessionRegenerate,
    SessionRewind,
    SessionTurns,
    SessionUpdate,
    SessionUsage,
    TurnCancel,
    TurnGet,
)
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import Reply, SessionRecord, SessionTotals, TokenLogprob, TurnRecord
from tokenspeed.client.protocol.given import GivenTurn


class SessionsAnswer(Struct, omit_defaults=True):
    """Sessions in the order of their opening. `after` asks for the next page of a list; it is absent on the last."""

    sessions: list[SessionRecord]
    after: str | None = None


class UpdateAnswer(Struct, omit_defaults=True):
    """`lost_tokens`: cached tokens that the next turn cannot reuse; set if what its prompt begins with has changed."""

    session: SessionRecord
    lost_tokens: int | None = None


class TurnsAnswer(Struct):
    """The turns of a session up to its head, oldest first."""

    turns: list[TurnRecord]


class TurnAnswer(TurnRecord, omit_defaults=True):
    """A turn that has just been taken.

    `logprobs`: of each output token, if asked for. `lost_tokens`: as of an update, if the turn brought one.
    """

    logprobs: list[TokenLogprob] | None = None
    lost_tokens: int | None = None


class BranchesAnswer(Struct):
    """Turns that were taken after another one and, side by side, the session that each of them opened."""

    turns: list[TurnAnswer]
    sessions: list[SessionRecord]


class CancelAnswer(Struct):
    """`head`: where the session stands after the turn's end."""

    turn: str
    head: str | None


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    Attributes:
        path: with the names of the command's fields in braces.
        query: fields of the command that are given in the query.
        body: whether the remaining fields are given as a JSON object.
        without: fields that are not offered here.
        status: of a success.
        answer: its type; None answers nothing.
        take: the answer in the host's reply.
        takes_turns: the answer is that of the turns that the command begins, whole or as events.
    """

    method: Literal["GET", "POST", "PATCH", "DELETE"]
    path: str
    command: type[Command]
    summary: str
    answer: type[Struct] | None
    take: Callable[[Reply], Struct | None] = lambda reply: None
    query: tuple[str, ...] = ()
    body: bool = False
    without: tuple[str, ...] = ()
    status: int = 200
    takes_turns: bool = False

    @property
    def name(self) -> str:
        """An identifier of its own."""
        words = [word.strip("{}") for word in self.path.split("/")[2:]]
        return "_".join([self.method.lower(), *words])

    @property
    def in_path(self) -> tuple[str, ...]:
        return tuple(word[1:-1] for word in self.path.split("/") if word.startswith("{"))


def _session(reply: Reply) -> Struct | None:
    return reply.session


def _sessions(reply: Reply) -> Struct:
    return SessionsAnswer(sessions_of(reply), reply.after)


def sessions_of(reply: Reply) -> list[SessionRecord]:
    """The sessions that a reply describes."""
    return reply.sessions if reply.sessions is not None else [reply.session] if reply.session is not None else []


def _updated(reply: Reply) -> Struct | None:
    return UpdateAnswer(reply.session, reply.lost_tokens) if reply.session is not None else None


def turns_of(reply: Reply) -> list[str]:
    """The turns that a command began."""
    return reply.turn_ids or ([reply.turn] if reply.turn is not None else [])


def _one_turn(reply: Reply) -> Struct | None:
    return reply.turns[0] if reply.turns else None


_SESSION = "/v1/sessions/{session}"

OPERATIONS = (
    Operation("POST", "/v1/sessions", SessionOpen, "Open a session", SessionRecord, _session, body=True, status=201),
    Operation(
        "GET", "/v1/sessions", SessionList, "List sessions", SessionsAnswer, _sessions, ("labels", "limit", "after")
    ),
    Operation("GET", _SESSION, SessionGet, "Describe a session", SessionRecord, _session),
    Operation("PATCH", _SESSION, SessionUpdate, "Change a session's defaults", UpdateAnswer, _updated, body=True),
    Operation("DELETE", _SESSION, SessionClose, "Close a session", None, status=204),
    Operation(
        "POST",
        f"{_SESSION}/turns",
        GivenTurn,
        "Take a turn",
        TurnAnswer,
        body=True,
        without=("parent", "n"),
        takes_turns=True,
    ),
    Operation(
        "GET",
        f"{_SESSION}/turns",
        SessionTurns,
        "List the turns up to the head",
        TurnsAnswer,
        lambda reply: TurnsAnswer(reply.turns or []),
        ("token_ids",),
    ),
    Operation("GET", f"{_SESSION}/usage", SessionUsage, "Sum up a session", SessionTotals, lambda reply: reply.totals),
    Operation(
        "POST",
        f"{_SESSION}/fork",
        SessionFork,
        "Open sessions with the same past",
        SessionsAnswer,
        _sessions,
        body=True,
        status=201,
    ),
    Operation("POST", f"{_SESSION}/rewind", SessionRewind, "Move the head back", SessionRecord, _session, body=True),
    Operation(
        "POST",
        f"{_SESSION}/regenerate",
        SessionRegenerate,
        "Take another answer to a turn's input",
        TurnAnswer,
        body=True,
        takes_turns=True,
    ),
    Operation(
        "POST",
        "/v1/turns",
        GivenTurn,
        "Take turns after another one, each in a new session",
        BranchesAnswer,
        body=True,
        without=("session", "expect_head"),
        takes_turns=True,
    ),
    Operation("GET", "/v1/turns/{turn}", TurnGet, "Describe a turn", TurnRecord, _one_turn, ("token_ids",)),
    Operation(
        "POST",
        "/v1/turns/{turn}/cancel",
        TurnCancel,
        "End a running turn",
        CancelAnswer,
        lambda reply: CancelAnswer(reply.turn or "", reply.head),
        body=True,
    ),
)


def body_type(operation: Operation) -> type[Struct] | None:
    """The command without its id and what is given elsewhere; None where there is no body."""
    if not operation.body:
        return None
    elsewhere = {"id", *operation.in_path, *operation.query, *operation.without}
    return _part(operation, "Body", [name for name in operation.command.__struct_fields__ if name not in elsewhere])


def query_type(operation: Operation) -> type[Struct] | None:
    return _part(operation, "Query", list(operation.query)) if operation.query else None


class Reader:
    """Makes the commands of one operation."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        body, self._query = body_type(operation), query_type(operation)
        self._body = msgspec.json.Decoder(body) if body is not None else None

    def read(self, path: Mapping[str, str], query: list[tuple[str, str]], body: bytes) -> Command:
        """`body` has been checked for size and depth; an empty one is an empty object.

        Raises:
            SessionError: `bad_request`.
        """
        fields: dict[str, Any] = {name: path[name] for name in self._operation.in_path}
        try:
            if self._query is not None:
                fields |= msgspec.structs.asdict(msgspec.convert(_values(query), self._query, strict=False))
            if self._body is not None:
                fields |= msgspec.structs.asdict(self._body.decode(body or b"{}"))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SessionError("bad_request", f"the request cannot be read: {error}") from None
        return self._operation.command(id="http", **fields)


def _values(query: list[tuple[str, str]]) -> dict[str, Any]:
    """A label is given as `label=name=value`, and may be given several times."""
    values: dict[str, Any] = {name: value for name, value in query if name not in ("label", "labels")}
    labels = [value.partition("=") for name, value in query if name == "label"]
    for name, equals, _ in labels:
        if not equals:
            raise SessionError("bad_request", f"the label {name!r} has no value; give label=NAME=VALUE")
    if labels:
        values["labels"] = {name: value for name, _, value in labels}
    return values


def _part(operation: Operation, kind: str, names: list[str]) -> type[Struct]:
    """A struct of some of a command's fields."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(operation.command):
        if field.name not in names:
            continue
        if field.required:
            fields.append((field.name, field.type, msgspec.field(name=field.encode_name)))
        elif field.default_factory is not NODEFAULT:
            default = msgspec.field(default_factory=field.default_factory, name=field.encode_name)
            fields.append((field.name, field.type, default))
        else:
            fields.append((field.name, field.type, msgspec.field(default=field.default, name=field.encode_name)))
    title = "".join(word.capitalize() for word in operation.name.split("_"))
    return msgspec.defstruct(f"{title}{kind}", fields, kw_only=True, omit_defaults=True)
