"""The asyncio client: its sessions. `Session`'s twin; see there for more words."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from tokenspeed.client.aio_link import AsyncLink
from tokenspeed.client.aio_stream import AsyncTurnStream
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
from tokenspeed.client.tools import Tool, Toolset
from tokenspeed.client.turns import Turn


class AsyncSession:
    """A conversation in the server. Made by `AsyncClient.session`, `AsyncClient.turn` and `AsyncSession.fork`."""

    def __init__(self, link: AsyncLink, record: SessionRecord, tools: Toolset) -> None:
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
    def turn(
        self, input: TurnInput, *, stream: Literal[False] = False, **options: Unpack[TurnOptions]
    ) -> Coroutine[Any, Any, Turn]: ...

    @overload
    def turn(self, input: TurnInput, *, stream: Literal[True], **options: Unpack[TurnOptions]) -> AsyncTurnStream: ...

    def turn(
        self, input: TurnInput, *, stream: bool = False, **options: Unpack[TurnOptions]
    ) -> Coroutine[Any, Any, Turn] | AsyncTurnStream:
        """Say something and get the answer: `await session.turn("…")`, or iterate with `async for` over
        `session.turn("…", stream=True)`, which begins when it is first awaited, entered or read.

        As `Session.turn`, but the calls of one answer run at the same time: async functions in the event loop, plain
        ones in threads. Cancelling the awaiting task cancels the turn in the server."""
        started = AsyncTurnStream(self, turn_request(self._id, input, options))
        return started if stream else _whole(started)

    @overload
    def regenerate(
        self, of: Turn | str | None = None, *, stream: Literal[False] = False, **options: Unpack[StepOptions]
    ) -> Coroutine[Any, Any, Turn]: ...

    @overload
    def regenerate(
        self, of: Turn | str | None = None, *, stream: Literal[True], **options: Unpack[StepOptions]
    ) -> AsyncTurnStream: ...

    def regenerate(
        self, of: Turn | str | None = None, *, stream: bool = False, **options: Unpack[StepOptions]
    ) -> Coroutine[Any, Any, Turn] | AsyncTurnStream:
        """Another answer to the input of a turn of this session (its head if none is named), which becomes the head;
        awaited or streamed as in `turn`."""
        started = AsyncTurnStream(self, regenerate_request(self._id, of, options))
        return started if stream else _whole(started)

    async def warm(self, input: TurnInput, **options: Unpack[TurnOptions]) -> Turn:
        """Compute an input ahead of time and answer nothing; an empty input may follow, which asks for the answer."""
        return await _whole(AsyncTurnStream(self, turn_request(self._id, input, {**options, "generate": False})))

    async def update(
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
        Returns how many cached tokens the next turn cannot reuse."""
        toolset = Toolset(tools) if tools is not None else None
        chosen = sampling_of(sampling, options)
        command = session_update(self._id, instructions, toolset, chosen, reasoning, labels)
        _, reply = await self._link.request(command)
        self._tools = toolset if toolset is not None else self._tools
        return reply.lost_tokens or 0

    async def fork(self, at: Turn | str | None = None) -> AsyncSession:
        """Another session with the same past, up to a turn of this one (its head if none is named). Costs nothing."""
        _, reply = await self._link.request(SessionFork("", self._id, turn_id(at)))
        return AsyncSession(self._link, record_in(reply), self._tools)

    async def rewind(self, to: Turn | str | None) -> None:
        """Move the head back to a turn of this session's past; `"start"`, or None (the first turn's parent), is before
        the first."""
        _, reply = await self._link.request(SessionRewind("", self._id, turn_id(to) or "start"))
        self._head = reply.head

    async def cancel(self, keep: Literal["partial", "nothing"] = "partial") -> None:
        """End the running turn now; does nothing if none runs. `keep` as in `Session.cancel`."""
        running = self._running or (await self.get()).running
        if running is not None:
            _, reply = await self._link.request(TurnCancel("", running, keep))
            self._head = reply.head

    async def turns(self, token_ids: bool = False) -> list[Turn]:
        """The turns up to the head, oldest first; with their exact ids if asked for."""
        _, reply = await self._link.request(SessionTurns("", self._id, token_ids))
        return [Turn.of(record, self._id) for record in reply.turns or []]

    async def usage(self) -> SessionTotals:
        """Sums over the session's own turns."""
        _, reply = await self._link.request(SessionUsage("", self._id))
        assert reply.totals is not None
        return reply.totals

    async def get(self) -> SessionRecord:
        """What the server says of the session now; see `Session.get`."""
        _, reply = await self._link.request(SessionGet("", self._id))
        record = record_in(reply)
        self._head = record.head
        return record

    async def close(self) -> None:
        """End the session for good and let the server forget it. Forks of it live on. Closing again does nothing."""
        if not self._closed:
            self._closed = True
            await self._link.request(SessionClose("", self._id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
            return
        # What went wrong inside is what the caller is to hear of.
        with suppress(SessionError, ConnectionError):
            await self.close()


async def _whole(stream: AsyncTurnStream) -> Turn:
    async with stream:
        return await stream.result()
