"""The events of one channel, from the turns that write to their one reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from tokenspeed.client.protocol.events import TokenLogprob, TurnDelta, TurnEvent, TurnProgress

MERGE_FROM = 256
"""Unread events from which deltas merge. A reader that keeps up sees each delta by itself."""


class Channel:
    """A queue that a slow reader cannot make grow without bound.

    Once `MERGE_FROM` events are unread, a delta joins the unread delta before it if both belong to the same item of
    the same turn and nothing of that turn lies between; a progress event replaces the one before it. A merged event
    bears the last one's `seq` and, as `first`, the first one's. So beyond `MERGE_FROM` a turn holds at most a few
    events per output item, and no text is lost.
    """

    def __init__(self) -> None:
        self._unread: deque[_Entry] = deque()
        self._last: dict[str, _Entry] = {}  # the newest unread entry of each turn
        self._wake = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._unread)

    def put(self, event: TurnEvent) -> None:
        """Queue an event; after `close` it goes nowhere."""
        if self._closed:
            return
        last = self._last.get(event.turn)
        if last is None or len(self._unread) < MERGE_FROM or not last.merge(event):
            entry = self._last[event.turn] = _Entry(event)
            self._unread.append(entry)
        self._wake.set()

    def close(self) -> None:
        """Take no more events; the reader's iteration ends after what is unread."""
        self._closed = True
        self._wake.set()

    async def read(self) -> AsyncIterator[TurnEvent]:
        """The events in order, until the channel closes. One reader at a time."""
        while True:
            while not self._unread and not self._closed:
                self._wake.clear()
                await self._wake.wait()
            if not self._unread:
                return
            entry = self._unread.popleft()
            if self._last.get(entry.event.turn) is entry:
                del self._last[entry.event.turn]
            yield entry.whole()


class _Entry:
    """An unread event; what merged deltas bear is joined only when it is read."""

    def __init__(self, event: TurnEvent) -> None:
        self.event = event
        self._texts: list[str] = [event.text] if isinstance(event, TurnDelta) else []
        self._logprobs: list[TokenLogprob] = list(event.logprobs or []) if isinstance(event, TurnDelta) else []

    def merge(self, event: TurnEvent) -> bool:
        """Take `event` in, if it continues this one."""
        mine = self.event
        if isinstance(mine, TurnDelta) and isinstance(event, TurnDelta) and mine.item == event.item:
            self._texts.append(event.text)
            self._logprobs += event.logprobs or []
            self.event = msgspec.structs.replace(mine, seq=event.seq, first=_first(mine))
            return True
        if isinstance(mine, TurnProgress) and isinstance(event, TurnProgress):
            self.event = msgspec.structs.replace(event, first=_first(mine))
            return True
        return False

    def whole(self) -> TurnEvent:
        if isinstance(self.event, TurnDelta) and len(self._texts) > 1:
            return msgspec.structs.replace(self.event, text="".join(self._texts), logprobs=self._logprobs or None)
        return self.event


def _first(event: TurnDelta | TurnProgress) -> int:
    return event.seq if event.first is None else event.first
