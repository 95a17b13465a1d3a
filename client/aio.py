"""The asyncio client: `AsyncClient`, its sessions and streams. The blocking client's twin; see there for more words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Generator, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import httpx

from tokenspeed.client.address import Address
from tokenspeed.client.aio_link import AsyncLink
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
from tokenspeed.client.protocol.events import Reply, SessionRecord, SessionTotals
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


class AsyncClient:
    """`Client` for one asyncio event loop: the same names, arguments and errors. Tools may be async functions."""

    def __init__(
        self, base_url: str | None = None, api_key: str | None = None, *, encoding: Encoding = "msgpack"
    ) -> None:
        self._address = Address.of(base_url, api_key, encoding)
        self._link = AsyncLink(self._address)

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
    ) -> Opening:
        """Open a session, or return to one: `session = await client.session(…)`, or `async with client.session(…) as
        session:`, which closes it at the end. Arguments as in `Client.session`."""
        chosen = sampling_of(sampling, options)
        if id is not None:
            check_attach(instructions=instructions, model=model, reasoning=reasoning, labels=labels, sampling=chosen)
            return Opening(self._attach(id, list(tools)))
        toolset = Toolset(tools)
        command = session_open(toolset, instructions, model, reasoning, labels, chosen)
        return Opening(self._open(self._link.request(command), toolset))

    async def sessions(self) -> list[SessionRecord]:
        """The sessions of this key's tenant that are not closed."""
        _, reply = await self._link.request(SessionList(""))
        return reply.sessions or []

    async def ready(self) -> bool:
        """Whether the server can answer now (its `/health/ready`); False if it cannot be reached, too."""
        try:
            async with httpx.AsyncClient(trust_env=self._address.proxy is True) as http:
                return (await http.get(f"{self.base_url}/health/ready")).is_success
        except httpx.HTTPError:
            return False

    async def close(self) -> None:
        """Close the connection. Sessions stay in the server; a later call connects again."""
        await self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _attach(self, session: str, tools: list[Tool]) -> AsyncSession:
        record = record_in((await self._link.request(SessionGet("", session)))[1])
        return AsyncSession(self._link, record, attached_tools(record, tools))

    async def _open(self, request: Coroutine[Any, Any, tuple[Any, Reply]], toolset: Toolset) -> AsyncSession:
        return AsyncSession(self._link, record_in((await request)[1]), toolset)


class Opening:
    """A session that is about to open: await it, or enter it with `async with`."""

    def __init__(self, opening: Coroutine[Any, Any, AsyncSession]) -> None:
        self._opening = opening
        self._session: AsyncSession | None = None

    def __await__(self) -> Generator[Any, None, AsyncSession]:
        return self._opening.__await__()

    async def __aenter__(self) -> AsyncSession:
        self._session = await self._opening
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.__aexit__(kind, error, traceback)


class AsyncSession:
    """A conversation in the server. Made by `AsyncClient.session` and `AsyncSession.fork`."""

    def __init__(self, link: AsyncLink, record: SessionRecord, tools: Toolset) -> None:
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
    ) -> Coroutine[Any, Any, Turn]: ...

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
    ) -> AsyncTurnStream: ...

    def turn(
        self,
        input: TurnInput,
        *,
        stream: bool = False,
        max_steps: int = DEFAULT_MAX_STEPS,
        token_ids: bool = False,
        sampling: Sampling | Mapping[str, Any] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Coroutine[Any, Any, Turn] | AsyncTurnStream:
        """Say something and get the answer: `await session.turn("…")`, or iterate with `async for` over
        `session.turn("…", stream=True)`, which begins when it is first awaited, entered or read.

        As `Session.turn`, but the calls of one answer run at the same time: async functions in the event loop, plain
        ones in threads. Cancelling the awaiting task cancels the turn in the server."""
        started = AsyncTurnStream(self, input, sampling_of(sampling, options), max_steps, token_ids)
        return started if stream else _whole(started)

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
        running = self._running
        if running is None:
            running = next((turn.id for turn in await self.turns() if turn.status == "running"), None)
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
        """What the server says of the session now: state, head, defaults, tokens, room left in the context."""
        _, reply = await self._link.request(SessionGet("", self._id))
        record = record_in(reply)
        self._head = record.head
        return record

    async def close(self) -> None:
        """End the session for good and let the server forget it. Forks of it live on."""
        await self._link.request(SessionClose("", self._id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, ConnectionError):
            await self.close()


class AsyncTurnStream:
    """An answer while it is made: `async for delta in stream`; then `await stream.result()` is the `Turn`.

    Use it with `async with`: leaving the block before the end cancels the turn, keeping what was generated. Breaking
    out of a bare `async for` cancels it too, but only when the interpreter finalises the iterator, a little later.
    """

    def __init__(
        self,
        session: AsyncSession,
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
        self._input = value
        self._begun = False
        self._over = False
        self._result: Turn | None = None

    @property
    def id(self) -> str | None:
        """The id of the turn that runs now, None before it began; over a tool loop it changes with every step."""
        return self._turn.id if self._begun else None

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __anext__(self) -> Delta:
        await self._start()
        while not self._over:
            delta = await self._link.next_delta(self._core, self._turn)
            if delta is not None:
                return delta
            await self._advance()
        raise StopAsyncIteration

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while True:
                try:
                    delta = await anext(self)
                except StopAsyncIteration:
                    return
                yield delta
        finally:
            await self.close()

    async def result(self) -> Turn:
        """The final turn, after waiting for it; the deltas not read until then are skipped.

        Raises:
            RuntimeError: the stream ended with an exception, which was raised where it was read.
        """
        while not self._over:
            async for _ in self:
                pass
        if self._result is None:
            raise RuntimeError("the stream ended without a turn")
        return self._result

    async def close(self) -> None:
        """Cancel the turn if it still runs, keeping what was generated; then `result()` is that."""
        if self._over:
            return
        self._over = True
        if not self._begun:
            return
        await self._link.cancel(self._core, self._turn)
        # What the turn failed with, if it failed, matters no more to a caller who leaves.
        with suppress(Exception):
            self._result = self._finish().after(self._loop.steps)

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _start(self) -> None:
        if not self._begun and not self._over:
            await self._begin(self._input)
            self._begun = True

    async def _begin(self, value: TurnInput) -> None:
        session = self._session
        held = session._held
        answers = held[1] if held is not None and held[0] == session._head else ()
        command = turn_create(session._id, value, self._sampling, answers, self._token_ids)
        self._core, self._turn = await self._link.create(command)
        self._turn.assume_parent(session._head)
        session._running, session._held = self._turn.id, None

    def _finish(self) -> Turn:
        """Take leave of the current turn, which is over; returns it, or raises what it failed with."""
        self._session._running = None
        self._core.forget(self._turn.id)
        if self._turn.ended is not None:
            self._session._head = self._turn.ended.head
        return self._turn.result()

    async def _advance(self) -> None:
        self._over = True
        tools = self._session._tools
        turn = self._finish()
        calls = self._loop.after(turn)
        if calls:
            answers = self._loop.answered(list(await asyncio.gather(*(tools.run_async(call) for call in calls))))
            if answers is not None:
                await self._begin(answers)
                self._over = False
                return
            self._session._held = (turn.id, tuple(self._loop.held))
        self._result = self._loop.result()


async def _whole(stream: AsyncTurnStream) -> Turn:
    async with stream:
        return await stream.result()
