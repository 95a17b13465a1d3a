"""The blocking client: an answer while it is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tokenspeed.client.core import Core
from tokenspeed.client.loop import ToolLoop
from tokenspeed.client.protocol.commands import TurnCreate
from tokenspeed.client.requests import Begin, TurnRequest, next_step, with_held
from tokenspeed.client.turns import Delta, Turn, TurnAssembly

if TYPE_CHECKING:
    from tokenspeed.client.session import Session


class TurnStream:
    """An answer while it is made: iterate over its `Delta`s; then `result()` is the `Turn`.

    Deltas of all steps of the tool loop come through one stream; tools run between them, in the iterating thread.
    Leaving a `for` loop or a `with` block before the end cancels the turn, and what was generated so far is kept.
    """

    def __init__(self, session: Session, request: TurnRequest, begun: tuple[Core, TurnAssembly] | None = None) -> None:
        """
        Args:
            begun: the turn, if the server was told to begin it already.
        """
        self._session = session
        self._link = session._link
        self._request = request
        self._loop = ToolLoop(request.tools if request.tools is not None else session._tools, request.max_steps)
        self._over = False
        self._result: Turn | None = None
        if begun is None:
            self._begin(request.command)
        else:
            self._follow(*begun)
        # Only now: a turn that is refused changes nothing.
        if request.tools is not None:
            session._tools = request.tools

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

    def _begin(self, command: Begin) -> None:
        session = self._session
        held = session._held
        if isinstance(command, TurnCreate) and held is not None and held[0] == session._head:
            command = with_held(command, held[1])
        core, turn = self._link.create(command)
        if isinstance(command, TurnCreate):
            turn.assume_parent(session._head)
        self._follow(core, turn)

    def _follow(self, core: Core, turn: TurnAssembly) -> None:
        self._core, self._turn = core, turn
        self._session._running, self._session._held = turn.id, None

    def _finish(self) -> Turn:
        """Take leave of the current turn, which is over; returns it, or raises what it failed with."""
        self._session._running = None
        self._link.forget(self._core, self._turn)
        if self._turn.ended is not None:
            self._session._head = self._turn.ended.head
        return self._turn.result()

    def _advance(self) -> None:
        self._over = True
        try:
            self._step()
        except BaseException as error:
            if self._loop.broke_off(self._session._head, error):
                self._session._held = self._loop.held
            raise

    def _step(self) -> None:
        loop = self._loop
        calls = loop.after(self._finish())
        for call in calls:
            loop.answers.append(loop.tools.run(call))
        if calls and loop.complete:
            self._begin(next_step(self._request.command, self._session.id, loop.answers))
            self._over = False
            return
        if calls:
            self._session._held = loop.held
        self._result = loop.result()
