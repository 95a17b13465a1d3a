"""One websocket: commands in, replies and events out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from tokenspeed.client.protocol.codec import Codec
from tokenspeed.client.protocol.commands import (
    Command,
    SessionList,
    SessionOpen,
    SessionRegenerate,
    TurnCancel,
    TurnCreate,
    TurnGet,
)
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import ErrorEvent, Reply, ServerMessage, TurnEnded, TurnEvent
from tokenspeed.engine.client import EngineGone
from tokenspeed.server.frames import error_event, read_frame
from tokenspeed.server.metrics import Metrics
from tokenspeed.server.operations import sessions_of, turns_of

log = logging.getLogger(__name__)

_LONG_FRAME = 65_536
"""Bytes, or characters, from which a frame is checked and decoded on a thread: the event loop does not wait for it."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one connection.

    Attributes:
        max_frame_bytes: of a client's message; a longer one is refused.
        max_commands: commands under way; the next is read when one of them is answered.
        max_unsent: messages waiting for a slow reader; from there on events stay with the host, which merges them.
    """

    max_frame_bytes: int = 16 * 2**20
    max_commands: int = 256
    max_unsent: int = 64


class Host(Protocol):
    """What a connection needs of a session host."""

    async def request(self, tenant: str, command: Command, channel: str) -> Reply: ...

    def events(self, channel: str) -> AsyncIterator[TurnEvent]: ...

    async def close_channel(self, channel: str) -> None: ...


class Socket(Protocol):
    """What a connection needs of a websocket that was accepted."""

    async def receive(self) -> str | bytes | None:
        """The next message; None once the other side is gone."""
        ...

    async def send(self, frame: str | bytes) -> None:
        """Raises OSError once the other side is gone."""
        ...

    async def close(self, code: int, reason: str) -> None: ...


class Connection:
    """Serves one client.

    Commands begin in the order in which they came. Those of one session are carried out one after the other; those of
    different sessions do not wait for each other. A turn's events follow the reply that names it. Messages that are
    ready at the same time leave in one frame. While the client reads slower than events come, they stay with the host.

    When the client goes, its turns go on: their events are taken, and counted, until the last has ended.
    """

    def __init__(self, host: Host, metrics: Metrics, limits: Limits, codec: Codec, tenant: str, channel: str) -> None:
        self._host = host
        self._metrics = metrics
        self._limits = limits
        self._codec = codec
        self._tenant = tenant
        self._channel = channel
        self._socket: Socket | None = None
        self._unsent: list[ServerMessage] = []
        self._news = asyncio.Event()
        self._caught_up = asyncio.Event()
        self._caught_up.set()
        self._leaving = asyncio.Event()
        # The last command of each session that is under way, and of each command its task.
        self._lanes: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(limits.max_commands)
        # Events of a turn that no reply has named yet wait here while a reply may still name it.
        self._creating = 0
        self._early: list[TurnEvent] = []
        self._running: dict[str, str] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    async def serve(self, socket: Socket) -> None:
        """Until the client goes, or is closed; and then until its turns have ended, or `leave` is called."""
        self._socket = socket
        self._metrics.connected()
        pump = asyncio.create_task(self._pump())
        ends = [
            pump,
            asyncio.create_task(self._write(socket)),
            asyncio.create_task(self._read(socket)),
        ]
        try:
            try:
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._socket = None
                self._caught_up.set()
                self._metrics.disconnected()
            await _stop(ends[1:])
            await asyncio.wait(
                [pump, finish := asyncio.create_task(self._finish())], return_when=asyncio.FIRST_COMPLETED
            )
            await _stop([finish])
            for task in done:
                task.result()
        finally:
            await _stop(ends)
            await self._host.close_channel(self._channel)

    async def close(self, code: int, reason: str) -> None:
        """End the connection from this side."""
        if self._socket is not None:
            await self._socket.close(code, reason)

    def leave(self) -> None:
        """Do not wait for the turns of a client that has gone: the server is ending."""
        self._leaving.set()

    async def _finish(self) -> None:
        """Until every command was carried out and every turn has ended."""
        leaving = asyncio.create_task(_until(self._leaving))
        idle = asyncio.create_task(self._idle_at_last())
        try:
            await asyncio.wait([leaving, idle], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _stop([leaving, idle])

    async def _idle_at_last(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._idle.wait()

    async def _read(self, socket: Socket) -> None:
        while (frame := await socket.receive()) is not None:
            for command in await self._commands(frame):
                if isinstance(command, ErrorEvent):
                    self._send(command)
                    continue
                # A client that does not read its answers is not read either.
                await self._caught_up.wait()
                await self._places.acquire()
                self._begin(command)

    async def _commands(self, frame: str | bytes) -> list[Command | ErrorEvent]:
        given = (self._codec, frame, self._limits.max_frame_bytes)
        if len(frame) < _LONG_FRAME:
            return read_frame(*given)
        return await asyncio.to_thread(read_frame, *given)

    def _begin(self, command: Command) -> None:
        lane = self._lane(command)
        before = self._lanes.get(lane) if lane is not None else None
        task = asyncio.create_task(self._carry_out(command, before))
        self._tasks.add(task)
        if lane is not None:
            self._lanes[lane] = task

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._places.release()
            if lane is not None and self._lanes.get(lane) is task:
                del self._lanes[lane]

        task.add_done_callback(done)

    def _lane(self, command: Command) -> str | None:
        """The session in whose order the command is carried out."""
        if isinstance(command, SessionOpen | SessionList | TurnGet):
            return None
        return self._running.get(command.turn) if isinstance(command, TurnCancel) else command.session

    async def _carry_out(self, command: Command, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        creates = isinstance(command, TurnCreate | SessionRegenerate)
        self._creating += creates
        try:
            reply = await self._host.request(self._tenant, command, self._channel)
            self._metrics.answered(command, reply)
            self._send(reply)
            if isinstance(command, TurnCreate | SessionRegenerate):
                self._follow(turns_of(reply), [session.id for session in sessions_of(reply)] or [command.session])
        except SessionError as error:
            self._send(error_event(error, command.id))
        except EngineGone:
            self._send(error_event(SessionError("engine_restarted", "the engine ended"), command.id))
        except Exception:
            log.exception("%s failed", type(command).__name__)
            self._send(error_event(SessionError("engine_error", "the server failed; its log says why"), command.id))
        finally:
            self._creating -= creates
            self._release_early()

    def _follow(self, turns: list[str], sessions: Sequence[str | None]) -> None:
        """Events of these turns, one on each of the sessions, are on their way."""
        for turn, session in zip(turns, sessions, strict=True):
            if session is not None:
                self._running[turn] = session
                self._idle.clear()

    def _release_early(self) -> None:
        early, self._early = self._early, []
        for event in early:
            self._event(event)

    async def _pump(self) -> None:
        async for event in self._host.events(self._channel):
            self._event(event)
            await self._caught_up.wait()

    def _event(self, event: TurnEvent) -> None:
        if self._creating and event.turn not in self._running:
            self._early.append(event)
            return
        self._send(event)
        if isinstance(event, TurnEnded):
            self._metrics.ended(event)
            self._running.pop(event.turn, None)
            if not self._running:
                self._idle.set()

    def _send(self, message: ServerMessage) -> None:
        if self._socket is None:
            return
        self._unsent.append(message)
        self._news.set()
        if len(self._unsent) >= self._limits.max_unsent:
            self._caught_up.clear()

    async def _write(self, socket: Socket) -> None:
        while True:
            await self._news.wait()
            # Whatever else becomes ready in this turn of the loop goes into the same frame.
            await asyncio.sleep(0)
            self._news.clear()
            batch, self._unsent = self._unsent, []
            self._caught_up.set()
            try:
                await socket.send(self._codec.encode(batch[0] if len(batch) == 1 else batch))
            except OSError:
                return


async def _until(event: asyncio.Event) -> None:
    await event.wait()


async def _stop(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
