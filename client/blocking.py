"""The blocking client: `Client`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self, Unpack, overload

import httpx

from tokenspeed.client.address import Address
from tokenspeed.client.link import Link
from tokenspeed.client.protocol.codec import Encoding
from tokenspeed.client.protocol.commands import ReasoningRule, Sampling, SessionGet, SessionList
from tokenspeed.client.protocol.events import SessionRecord
from tokenspeed.client.requests import (
    SamplingOptions,
    TurnInput,
    TurnOptions,
    attached_tools,
    branch_records,
    check_attach,
    opened_tools,
    record_in,
    sampling_of,
    session_open,
    turn_request,
)
from tokenspeed.client.session import Session
from tokenspeed.client.stream import TurnStream
from tokenspeed.client.tools import Tool, Toolset
from tokenspeed.client.turns import Turn


class Branch(NamedTuple):
    """A turn after another one, and the session that it opened."""

    session: Session
    turn: Turn


class Client:
    """A connection to a server, for any number of sessions and threads. It connects at the first call.

    Args:
        base_url: the server's URL; else TOKENSPEED_BASE_URL, else http://localhost:8000.
        api_key: the key to it; else TOKENSPEED_API_KEY, else none.
        encoding: the form of the websocket's frames: `msgpack`, or `json`, which people can read.

    Every method that talks to the server raises `SessionError` if the server refuses and `ConnectionFailed` (a
    `ConnectionError`) if it cannot be reached.
    """

    def __init__(
        self, base_url: str | None = None, api_key: str | None = None, *, encoding: Encoding = "msgpack"
    ) -> None:
        self._address = Address.of(base_url, api_key, encoding)
        self._link = Link(self._address)

    @property
    def base_url(self) -> str:
        return self._address.base_url

    def session(
        self,
        *,
        id: str | None = None,
        from_: Turn | str | None = None,
        instructions: str | None = None,
        tools: Iterable[Tool] | None = None,
        model: str | None = None,
        reasoning: ReasoningRule | None = None,
        labels: Mapping[str, str] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Session:
        """Open a session, or return to one.

        Args:
            id: a session that exists. Then nothing else may be given but functions for tools that it already has.
            from_: a turn to begin after, of any session. What is not given is as in the session that took it.
            instructions: the system text.
            tools: Python functions (`Session.turn` runs them) and schemas (their calls are the caller's).
            model: only checked against what the server serves.
            reasoning: `keep` (the default), or `drop` the reasoning of earlier answers when a new question comes.
            labels: texts of the caller's own.
            sampling: defaults of all turns; single ones also as keywords: `temperature=0`, `max_tokens=200`, …

        Returns:
            The session. As a context manager it is closed, for good, at the end of the block.
        """
        chosen = sampling_of(sampling, options)
        if id is not None:
            check_attach(
                from_=from_,
                instructions=instructions,
                model=model,
                reasoning=reasoning,
                labels=labels,
                sampling=chosen,
            )
            record = record_in(self._link.request(SessionGet("", id))[1])
            attached = attached_tools(record, tools or ())
            attached.refuse_async()
            return Session(self._link, record, attached)
        toolset = Toolset(tools) if tools is not None else None
        if toolset is not None:
            toolset.refuse_async()
        command = session_open(toolset, instructions, model, reasoning, labels, chosen, from_)
        record = record_in(self._link.request(command)[1])
        return Session(self._link, record, opened_tools(record, toolset))

    @overload
    def turn(
        self, parent: Turn | str, input: TurnInput, *, n: None = None, **options: Unpack[TurnOptions]
    ) -> Branch: ...

    @overload
    def turn(self, parent: Turn | str, input: TurnInput, *, n: int, **options: Unpack[TurnOptions]) -> list[Branch]: ...

    def turn(
        self, parent: Turn | str, input: TurnInput, *, n: int | None = None, **options: Unpack[TurnOptions]
    ) -> Branch | list[Branch]:
        """Take a turn after any turn, in a new session with the same past and the same defaults (an implicit fork).

        Args:
            parent: the turn that it follows.
            n: take so many turns, each in a session of its own; they run side by side. A seed counts up over them.
            options: as in `Session.turn`.

        Returns:
            The session and the turn; with `n` a list of them. The sessions are the caller's to close.
        """
        request = turn_request(None, input, options, parent, n if n is not None else 1)
        if request.tools is not None:
            request.tools.refuse_async()
        core, reply = self._link.request(request.command)
        begun = self._link.turns(core, reply)
        streams = []
        for record, turn in zip(branch_records(reply), begun, strict=True):
            session = Session(self._link, record, opened_tools(record, request.tools))
            streams.append((session, TurnStream(session, request, (core, turn))))
        branches = []
        for session, stream in streams:
            with stream:
                branches.append(Branch(session, stream.result()))
        return branches if n is not None else branches[0]

    def sessions(self, labels: Mapping[str, str] | None = None) -> list[SessionRecord]:
        """The sessions of this key's tenant that are not closed and bear all of `labels`, in the order of opening."""
        records: list[SessionRecord] = []
        command = SessionList("", dict(labels or {}))
        while True:
            _, reply = self._link.request(command)
            records += reply.sessions or []
            if reply.after is None:
                return records
            command = SessionList("", command.labels, after=reply.after)

    def ready(self) -> bool:
        """Whether the server can answer now (its `/health/ready`); False if it cannot be reached, too."""
        try:
            return httpx.get(f"{self.base_url}/health/ready", trust_env=self._address.proxy is True).is_success
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        """Close the connection. Sessions stay in the server; a later call connects again."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
