"""The blocking client: its sessions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from tokenspeed.client.link import Link
from tokenspeed.client.protocol.commands import (
    ReasoningRule,
    Sampling,
    SessionClose,
    SessionFork,
    SessionGet,
    SessionRewind,
    SessionTurns,
    SessionUsage,
    TurnCancel,
)
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import SessionRecord, SessionTotals
from tokenspeed.client.protocol.items import FunctionCallOutputItem
from tokenspeed.client.requests import (
    SamplingOptions,
    StepOptions,
    TurnInput,
    TurnOptions,
    record_in,
    regenerate_request,
    sampling_of,
    session_update,
    turn_id,
    turn_request,
)
from tokenspeed.client.stream import TurnStream
from tokenspeed.client.tools import Tool, Toolset
from tokenspeed.client.turns import Turn


class Session:
    """A conversation in the server. Made by `Client.session`, `Client.turn` and `Session.fork`."""

    def __init__(self, link: Link, record: SessionRecord, tools: Toolset) -> None:
        self._link = link
        self._tools = tools
        self._id = record.id
        self._closed = False
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
    def turn(self, input: TurnInput, *, stream: Literal[False] = False, **options: Unpack[TurnOptions]) -> Turn: ...

    @overload
    def turn(self, input: TurnInput, *, stream: Literal[True], **options: Unpack[TurnOptions]) -> TurnStream: ...

    def turn(self, input: TurnInput, *, stream: bool = False, **options: Unpack[TurnOptions]) -> Turn | TurnStream:
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
            tools, instructions: the session's from this turn on; what the turn could not reuse is in its usage.
            generate: False computes the input and answers nothing (`warm`).
            expect_head: the turn, or `start`, that the session must stand on.
            sampling: options of this input's turns only, over the session's; also as keywords: `stop=["###"]`,
                `logprobs=True`, …

        Raises:
            SessionError: the turn was refused (`session_busy`, `head_moved`, `context_length_exceeded`, …) or failed.
            StepLimitExceeded: the model still calls tools after `max_steps` turns.
            ConnectionFailed: the connection was lost. The server finishes the turn and keeps it.
        """
        request = turn_request(self._id, input, options)
        if request.tools is not None:
            request.tools.refuse_async()
        started = TurnStream(self, request)
        return started if stream else _whole(started)

    @overload
    def regenerate(
        self, of: Turn | str | None = None, *, stream: Literal[False] = False, **options: Unpack[StepOptions]
    ) -> Turn: ...

    @overload
    def regenerate(
        self, of: Turn | str | None = None, *, stream: Literal[True], **options: Unpack[StepOptions]
    ) -> TurnStream: ...

    def regenerate(
        self, of: Turn | str | None = None, *, stream: bool = False, **options: Unpack[StepOptions]
    ) -> Turn | TurnStream:
        """Another answer to the input of a turn of this session (its head if none is named), which becomes the head.

        Computes the few tokens of the generation prompt. Greedy and without another `seed` it says the same again.
        Options and errors as in `turn`."""
        started = TurnStream(self, regenerate_request(self._id, of, options))
        return started if stream else _whole(started)

    def warm(self, input: TurnInput, **options: Unpack[TurnOptions]) -> Turn:
        """Compute an input ahead of time and answer nothing: the turn that follows only pays for what is new then.
        An empty input may follow, which asks for the answer."""
        return _whole(TurnStream(self, turn_request(self._id, input, {**options, "generate": False})))

    def update(
        self,
        *,
        instructions: str | None = None,
        tools: Iterable[Tool] | None = None,
        reasoning: ReasoningRule | None = None,
        labels: Mapping[str, str] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> int:
        """Change the session's defaults. What is given replaces what was; empty instructions, tools or labels are none.

        Returns:
            What it costs: how many cached tokens the next turn cannot reuse; 0 if the prompt begins as before.
        """
        toolset = Toolset(tools) if tools is not None else None
        if toolset is not None:
            toolset.refuse_async()
        chosen = sampling_of(sampling, options)
        _, reply = self._link.request(session_update(self._id, instructions, toolset, chosen, reasoning, labels))
        self._tools = toolset if toolset is not None else self._tools
        return reply.lost_tokens or 0

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
        running = self._running or self.get().running
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
        """What the server says of the session now: state, head, defaults, tokens, room left in the context, what of it
        is computed on which tier, and the turns to which rewinding is cheap (`rewind_points`)."""
        _, reply = self._link.request(SessionGet("", self._id))
        record = record_in(reply)
        self._head = record.head
        return record

    def close(self) -> None:
        """End the session for good and let the server forget it. Forks of it live on. Closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._link.request(SessionClose("", self._id))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # What went wrong inside is what the caller is to hear of.
        with suppress(SessionError, ConnectionError):
            self.close()


def _whole(stream: TurnStream) -> Turn:
    with stream:
        return stream.result()
