"""The turns that one HTTP request begins: their events, or what they come to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from tokenspeed.client.protocol.codec import JSON
from tokenspeed.client.protocol.commands import Command, SessionRegenerate, SessionTurns, TurnCreate
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import (
    ErrorEvent,
    Reply,
    ServerMessage,
    Timings,
    TurnDelta,
    TurnEnded,
    TurnEvent,
    TurnItem,
    TurnStarted,
    Usage,
)
from tokenspeed.client.protocol.items import InputItem, MessageItem
from tokenspeed.server.connection import Host
from tokenspeed.server.metrics import Metrics
from tokenspeed.server.operations import TurnAnswer, turns_of

PING_INTERVAL_S = 15.0
"""A stream that is silent for so long says a word, so that proxies do not take it for dead."""


class Exchanges:
    """The exchanges of a server: they go on when their clients leave, and end with the server."""

    def __init__(self, host: Host, metrics: Metrics) -> None:
        self.host = host
        self.metrics = metrics
        self.leaving = asyncio.Event()
        self._drains: set[asyncio.Task[None]] = set()

    def let_go(self, exchange: Exchange, *reads: asyncio.Future[Any]) -> None:
        """Nobody reads an exchange any more. Turns of it that still run are followed to their ends, and counted.

        Not a coroutine: a response that is cancelled cannot wait for anything.
        """
        task = asyncio.create_task(exchange.drain(reads))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    async def leave(self) -> None:
        """Let go of everything: the server is ending."""
        self.leaving.set()
        for task in list(self._drains):
            task.cancel()
        await asyncio.gather(*self._drains, return_exceptions=True)


class Exchange:
    """One request.

    Args:
        channel: a name of its own.
    """

    def __init__(self, exchanges: Exchanges, tenant: str, channel: str) -> None:
        self._exchanges = exchanges
        self._host = exchanges.host
        self._tenant = tenant
        self._channel = channel
        self._running: set[str] = set()

    async def begin(self, command: Command) -> Reply:
        """Carry out a command that begins turns. Raises SessionError if it is refused."""
        try:
            reply = await self._host.request(self._tenant, command, self._channel)
        except BaseException:
            await self._host.close_channel(self._channel)
            raise
        self._exchanges.metrics.answered(command, reply)
        self._running = set(turns_of(reply))
        return reply

    async def drain(self, reads: Sequence[asyncio.Future[Any]]) -> None:
        """Until every turn has ended, after `reads` were cancelled."""
        try:
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
            if not self._exchanges.leaving.is_set():
                async for _ in self._events():
                    pass
        finally:
            await self._host.close_channel(self._channel)

    async def stream(self, reply: Reply) -> AsyncIterator[bytes]:
        """The reply and every event, as server-sent events; a comment when nothing else is said for a while."""
        yield _said(reply)
        events = self._events()
        following = asyncio.ensure_future(anext(events, None))
        leaving = asyncio.ensure_future(self._exchanges.leaving.wait())
        try:
            while True:
                done, _ = await asyncio.wait(
                    [following, leaving], timeout=PING_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
                )
                if following in done:
                    event = following.result()
                    if event is None:
                        return
                    yield _said(event)
                    following = asyncio.ensure_future(anext(events, None))
                elif leaving in done:
                    yield _said(_ending())
                    return
                else:
                    yield b": ping\n\n"
        finally:
            self._exchanges.let_go(self, following, leaving)

    async def whole(self, command: Command, reply: Reply) -> list[TurnAnswer]:
        """The turns once all of them have ended, in the reply's order.

        Raises:
            SessionError: what one of them failed with, or `engine_restarted` if the server ends first.
        """
        given = _input_of(command)
        records = {
            turn: TurnAnswer(turn, None, "running", None, given, [], Usage(), Timings(), lost_tokens=reply.lost_tokens)
            for turn in turns_of(reply)
        }
        following = asyncio.create_task(self._collect(records))
        leaving = asyncio.create_task(self._exchanges.leaving.wait())
        try:
            done, _ = await asyncio.wait([following, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._exchanges.let_go(self, following, leaving)
        if following not in done:
            ending = _ending()
            raise SessionError(ending.code, ending.message, retry_after_ms=ending.retry_after_ms)
        following.result()
        if isinstance(command, SessionRegenerate):
            await self._look_up_input(command.session, records)
        return list(records.values())

    async def _collect(self, records: dict[str, TurnAnswer]) -> None:
        failure: SessionError | None = None
        async for event in self._events():
            record = records[event.turn]
            if isinstance(event, TurnStarted):
                record.parent = event.parent
            elif isinstance(event, TurnItem):
                record.output.append(event.item)
            elif isinstance(event, TurnDelta) and event.logprobs is not None:
                record.logprobs = record.logprobs or []
                record.logprobs += event.logprobs
            elif isinstance(event, TurnEnded):
                failure = failure or _end(record, event)
        if failure is not None:
            raise failure

    async def _look_up_input(self, session: str, records: dict[str, TurnAnswer]) -> None:
        """Of turns whose input is that of another turn."""
        with suppress(SessionError):  # the session may be closed by now
            reply = await self._host.request(self._tenant, SessionTurns("http", session), self._channel)
            for turn in reply.turns or []:
                if turn.id in records:
                    records[turn.id].input = turn.input

    async def _events(self) -> AsyncIterator[TurnEvent]:
        """To the end of the last turn. An end is counted before it is handed out, so that it is counted once."""
        if not self._running:
            return
        async for event in self._host.events(self._channel):
            if isinstance(event, TurnEnded):
                self._running.discard(event.turn)
                self._exchanges.metrics.ended(event)
            yield event
            if not self._running:
                return


def _said(message: ServerMessage) -> bytes:
    data = JSON.encode(message)
    assert isinstance(data, str)
    return f"event: {message.__struct_config__.tag}\ndata: {data}\n\n".encode()


def _ending() -> ErrorEvent:
    return ErrorEvent("engine_restarted", "the server is ending", "replay", retry_after_ms=1000)


def _input_of(command: Command) -> list[InputItem]:
    if not isinstance(command, TurnCreate):
        return []
    given = command.input
    return [MessageItem("user", given)] if isinstance(given, str) else list(given)


def _end(record: TurnAnswer, ended: TurnEnded) -> SessionError | None:
    """Complete a record; returns what the turn failed with."""
    record.status, record.reason = ended.status, ended.reason
    record.usage, record.timings = ended.usage, ended.timings
    record.stop_string = ended.stop_string
    if ended.logprobs is not None:
        record.logprobs = record.logprobs or []
        record.logprobs += ended.logprobs
    record.prompt_token_ids, record.output_token_ids = ended.prompt_token_ids, ended.output_token_ids
    if ended.status != "failed":
        return None
    error = ended.error or ErrorEvent("engine_error", f"turn {ended.turn} failed", "never")
    return SessionError(
        error.code, error.message, detail={"turn": ended.turn, **error.detail}, retry_after_ms=error.retry_after_ms
    )
