"""The asyncio client: an answer while it is made. `TurnStream`'s twin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tokenspeed.client.core import Core
from tokenspeed.client.loop import ToolLoop
from tokenspeed.client.protocol.commands import TurnCreate
from tokenspeed.client.protocol.items import FunctionCallItem
from tokenspeed.client.requests import Begin, TurnRequest, next_step, with_held
from tokenspeed.client.turns import Delta, Turn, TurnAssembly

if TYPE_CHECKING:
    from tokenspeed.client.aio_session import AsyncSession


class AsyncTurnStream:
    """An answer while it is made: `async for delta in stream`; then `await stream.result()` is the `Turn`.

    Use it with `async with`: leaving the block before the end cancels the turn, keeping what was generated. Breaking
    out of a bare `async for` cancels it too, but only when the interpreter finalises the iterator, a little later.
    """

    def __init__(
        self, session: AsyncSession, request: TurnRequest, begun: tuple[Core, TurnAssembly] | None = None
    ) -> None:
        """
        Args:
            begun: the turn, if the server was told to begin it already.
        """
        self._session = session
        self._link = session._link
        self._request = request
        self._loop = ToolLoop(request.tools if request.tools is not None else session._tools, request.max_steps)
        self._begun = False
        self._over = False
        self._result: Turn | None = None
        if begun is not None:
            self._follow(*begun)

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
            await self._begin(self._request.command)

    async def _begin(self, command: Begin) -> None:
        session = self._session
        held = session._held
        if isinstance(command, TurnCreate) and held is not None and held[0] == session._head:
            command = with_held(command, held[1])
        core, turn = await self._link.create(command)
        if isinstance(command, TurnCreate):
            turn.assume_parent(session._head)
        self._follow(core, turn)

    def _follow(self, core: Core, turn: TurnAssembly) -> None:
        self._core, self._turn = core, turn
        self._session._running, self._session._held = turn.id, None
        if not self._begun and self._request.tools is not None:
            self._session._tools = self._request.tools
        self._begun = True

    def _finish(self) -> Turn:
        """Take leave of the current turn, which is over; returns it, or raises what it failed with."""
        self._session._running = None
        self._core.forget(self._turn.id)
        if self._turn.ended is not None:
            self._session._head = self._turn.ended.head
        return self._turn.result()

    async def _advance(self) -> None:
        self._over = True
        try:
            await self._step()
        except BaseException as error:
            if self._loop.broke_off(self._session._head, error):
                self._session._held = self._loop.held
            raise

    async def _step(self) -> None:
        loop = self._loop
        calls = loop.after(self._finish())
        if calls:
            await self._run(calls)
        if calls and loop.complete:
            await self._begin(next_step(self._request.command, self._session.id, loop.answers))
            self._over = False
            return
        if calls:
            self._session._held = loop.held
        self._result = loop.result()

    async def _run(self, calls: list[FunctionCallItem]) -> None:
        """Run calls side by side. What has ended is kept, whatever becomes of the others."""
        running = [asyncio.ensure_future(self._loop.tools.run_async(call)) for call in calls]
        try:
            await asyncio.gather(*running)
        finally:
            ended = [run for run in running if run.done() and not run.cancelled() and run.exception() is None]
            self._loop.answers += [run.result() for run in ended]
