"""The blocking client: `Client`, its sessions and streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import httpx

from tokenspeed.client.address import Address
from tokenspeed.client.link import Link
from tokenspeed.client.loop import DEFAULT_MAX_STEPS, ToolLoop
from tokenspeed.client.protocol.codec import Encoding
from tokenspeed.client.protocol.commands import (
    ReasoningRule,
    Sampling,
    SessionClose,
    SessionFork,
    SessionGet,
    SessionList,
    SessionRewind,
    SessionTurns,
    SessionUsage,
    TurnCancel,
)
from tokenspeed.client.protocol.events import SessionRecord, SessionTotals
from tokenspeed.client.protocol.items import FunctionCallOutputItem
from tokenspeed.client.requests import (
    SamplingOptions,
    TurnInput,
    attached_tools,
    check_attach,
    record_in,
    sampling_of,
    session_open,
    turn_create,
    turn_id,
)
from tokenspeed.client.tools import Tool, Toolset
from tokenspeed.client.turns import Delta, Turn


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
        instructions: str | None = None,
        tools: Iterable[Tool] = (),
        model: str | None = None,
        reasoning: ReasoningRule | None = None,
        labels: Mapping[str, str] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Session:
        """Open a session, or return to one.

        Args:
            id: a session that exists. Then nothing else may be given but functions for tools that it already has.
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
            check_attach(instructions=instructions, model=model, reasoning=reasoning, labels=labels, sampling=chosen)
            record = record_in(self._link.request(SessionGet("", id))[1])
            toolset = attached_tools(record, tools)
            toolset.refuse_async()
            return Session(self._link, record, toolset)
        toolset = Toolset(tools)
        toolset.refuse_async()
        command = session_open(toolset, instructions, model, reasoning, labels, chosen)
        return Session(self._link, record_in(self._link.request(command)[1]), toolset)

    def sessions(self) -> list[SessionRecord]:
        """The sessions of this key's tenant that are not closed."""
        _, reply = self._link.request(SessionList(""))
        return reply.sessions or []

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


class Session:
    """A conversation in the server. Made by `Client.session` and `Session.fork`."""

    def __init__(self, link: Link, record: SessionRecord, tools: Toolset) -> None:
        self._link = link
        self._tools = tools
        self._id = record.id
        self._head = record.head
        self._running: str | None = None
        # Answers that the tool loop ran, and the turn whose calls they answer, until the caller adds the rest.
        self._held: tuple[str, tuple[FunctionCallOutputItem, ...]] | None = None

    @property
    def id(self) -> str:
        return self._id

    @property
    def head(self) -> str | None:
        """The turn that the next one follows, as this client last heard; None at the start."""
        return self._head

    @overload
    def turn(
        self,
        input: TurnInput,
        *,
        stream: Literal[False] = False,
        max_steps: int = DEFAULT_MAX_STEPS,
        token_ids: bool = False,
        sampling: Sampling | Mapping[str, Any] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Turn: ...

    @overload
    def turn(
        self,
        input: TurnInput,
        *,
        stream: Literal[True],
        max_steps: int = DEFAULT_MAX_STEPS,
        token_ids: bool = False,
        sampling: Sampling | Mapping[str, Any] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> TurnStream: ...

    def turn(
        self,
        input: TurnInput,
        *,
        stream: bool = False,
        max_steps: int = DEFAULT_MAX_STEPS,
        token_ids: bool = False,
        sampling: Sampling | Mapping[str, Any] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Turn | TurnStream:
        """Say something and get the answer.

        Tools that were given as functions are run, and their results sent, until the model answers without calling
        one; the returned turn is the last (`Turn.steps` has all). The calls of one answer run one after the other, in
        this thread. A function that raises does not end the turn: the model reads `error: ValueError: …`. Calls of
        tools that were given as schemas are the caller's: answer them with `session.turn([tool_output(call, …)])`.

        Args:
            input: the user's text, or items.
            stream: True returns a `TurnStream` at once.
            max_steps: how many turns may be taken for one input.
            token_ids: True asks for the exact ids of prompt and output (`Turn.prompt_token_ids`, `.output_token_ids`).
            sampling: options of this input's turns only, over the session's; also as keywords.

        Raises:
            SessionError: the turn was refused (`session_busy`, `context_length_exceeded`, …) or failed.
            StepLimitExceeded: the model still calls tools after `max_steps` turns.
            ConnectionFailed: the connection was lost. The server finishes the turn and keeps it.
        """
        started = TurnStream(self, input, sampling_of(sampling, options), max_steps, token_ids)
        if stream:
            return started
        with started:
            return started.result()

    def fork(self, at: Turn | str | None = None) -> Session:
        """Another session with the same past, up to a turn of this one (its head if none is named). Costs nothing."""
        _, reply = self._link.request(SessionFork("", self._id, turn_id(at)))
        return Session(self._link, record_in(reply), self._tools)

    def rewind(self, to: Turn | str | None) -> None:
        """Move the head back to a turn of this session's past; `"start"`, or None (the first turn's parent), is before
        the first."""
        _, reply = self._link.request(SessionRewind("", self._id, turn_id(to) or "start"))
        self._head = reply.head

    def cancel(self, keep: Literal["partial", "nothing"] = "partial") -> None:
        """End the running turn now, from another thread; does nothing if none runs.

        Args:
            keep: `partial` keeps what was generated so far as the turn; `nothing` takes the turn back.
        """
        running = self._running or next((turn.id for turn in self.turns() if turn.status == "running"), None)
        if running is not None:
            _, reply = self._link.request(TurnCancel("", running, keep))
            self._head = reply.head

    def turns(self, token_ids: bool = False) -> list[Turn]:
        """The turns up to the head, oldest first; with their exact ids if asked for."""
        _, reply = self._link.request(SessionTurns("", self._id, token_ids))
        return [Turn.of(record, self._id) for record in reply.turns or []]

    def usage(self) -> SessionTotals:
        """Sums over the session's own turns."""
        _, reply = self._link.request(SessionUsage("", self._id))
        assert reply.totals is not None
        return reply.totals

    def get(self) -> SessionRecord:
        """What the server says of the session now: state, head, defaults, tokens, room left in the context."""
        _, reply = self._link.request(SessionGet("", self._id))
        record = record_in(reply)
        self._head = record.head
        return record

    def close(self) -> None:
        """End the session for good and let the server forget it. Forks of it live on."""
        self._link.request(SessionClose("", self._id))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, ConnectionError):
            return
        self.close()


class TurnStream:
    """An answer while it is made: iterate over its `Delta`s; then `result()` is the `Turn`.

    Deltas of all steps of the tool loop come through one stream; tools run between them, in the iterating thread.
    Leaving a `for` loop or a `with` block before the end cancels the turn, and what was generated so far is kept.
    """

    def __init__(
        self,
        session: Session,
        value: TurnInput,
        sampling: Sampling | None,
        max_steps: int,
        token_ids: bool,
    ) -> None:
        self._session = session
        self._link = session._link
        self._sampling = sampling
        self._token_ids = token_ids
        self._loop = ToolLoop(session._tools, max_steps)
        self._over = False
        self._result: Turn | None = None
        self._begin(value)

    @property
    def id(self) -> str:
        """The id of the turn that runs now; over a tool loop it changes with every step."""
        return self._turn.id

    def __next__(self) -> Delta:
        while not self._over:
            delta = self._link.next_delta(self._turn)
            if delta is not None:
                return delta
            self._advance()
        raise StopIteration

    def __iter__(self) -> Iterator[Delta]:
        try:
            while True:
                try:
                    delta = next(self)
                except StopIteration:
                    return
                yield delta
        finally:
            self.close()

    def result(self) -> Turn:
        """The final turn, after waiting for it; the deltas not read until then are skipped.

        Raises:
            RuntimeError: the stream ended with an exception, which was raised where it was read.
        """
        while not self._over:
            for _ in self:
                pass
        if self._result is None:
            raise RuntimeError("the stream ended without a turn")
        return self._result

    def close(self) -> None:
        """Cancel the turn if it still runs, keeping what was generated; then `result()` is that."""
        if self._over:
            return
        self._over = True
        self._link.cancel(self._core, self._turn)
        self._session._running = None
        # What the turn failed with, if it failed, matters no more to a caller who leaves.
        with suppress(Exception):
            self._result = self._finish().after(self._loop.steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, value: TurnInput) -> None:
        session = self._session
        held = session._held
        answers = held[1] if held is not None and held[0] == session._head else ()
        command = turn_create(session._id, value, self._sampling, answers, self._token_ids)
        self._core, self._turn = self._link.create(command)
        self._turn.assume_parent(session._head)
        session._running, session._held = self._turn.id, None

    def _finish(self) -> Turn:
        """Take leave of the current turn, which is over; returns it, or raises what it failed with."""
        self._session._running = None
        self._link.forget(self._core, self._turn)
        if self._turn.ended is not None:
            self._session._head = self._turn.ended.head
        return self._turn.result()

    def _advance(self) -> None:
        self._over = True
        tools = self._session._tools
        turn = self._finish()
        calls = self._loop.after(turn)
        if calls:
            answers = self._loop.answered([tools.run(call) for call in calls])
            if answers is not None:
                self._begin(answers)
                self._over = False
                return
            self._session._held = (turn.id, tuple(self._loop.held))
        self._result = self._loop.result()
