from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.client.protocol.events import TurnDelta, TurnEvent, TurnItem, TurnProgress
from tokenspeed.client.protocol.items import MessageItem
from tokenspeed.sessions.channel import MERGE_FROM, Channel


@dataclass
class Writer:
    """A turn's events with running numbers."""

    turn: str
    seq: int = 0
    sent: list[TurnEvent] = field(default_factory=list)

    def delta(self, item: int, text: str) -> TurnDelta:
        return self._sent(TurnDelta("s", self.turn, self._next(), item, "text", text))

    def finished(self, item: int) -> TurnItem:
        return self._sent(TurnItem("s", self.turn, self._next(), item, MessageItem("assistant", "")))

    def progress(self, done: int) -> TurnProgress:
        return self._sent(TurnProgress("s", self.turn, self._next(), "prefill", done, 100))

    def _next(self) -> int:
        self.seq += 1
        return self.seq - 1

    def _sent(self, event):  # type: ignore[no-untyped-def]
        self.sent.append(event)
        return event


async def drain(channel: Channel) -> list[TurnEvent]:
    channel.close()
    return [event async for event in channel.read()]


def test_a_reader_that_keeps_up_sees_every_event() -> None:
    async def run() -> None:
        channel, writer = Channel(), Writer("t")
        reader = channel.read()
        for number in range(3 * MERGE_FROM):
            event = writer.delta(0, str(number))
            channel.put(event)
            assert await anext(reader) is event

    asyncio.run(run())


def test_a_slow_readers_queue_stays_short_and_loses_nothing() -> None:
    async def run() -> None:
        channel, writers = Channel(), [Writer("a"), Writer("b")]
        for writer in writers:
            channel.put(writer.progress(0))
            channel.put(writer.progress(1))
        for item in range(3):
            for number in range(5_000):
                for writer in writers:
                    channel.put(writer.delta(item, f"{number},"))
            for writer in writers:
                channel.put(writer.finished(item))
        assert len(channel) < MERGE_FROM + 2 * 3 * 2
        events = await drain(channel)
        for writer in writers:
            mine = [event for event in events if event.turn == writer.turn]
            for item in range(3):
                texts = [e.text for e in mine if isinstance(e, TurnDelta) and e.item == item]
                assert "".join(texts) == "".join(f"{number}," for number in range(5_000))
            check_numbers(mine)

    asyncio.run(run())


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["0", "1", "item", "progress", "read"])), max_size=60))
def test_merging_is_lossless_in_any_order(script: list[tuple[str, str]]) -> None:
    async def run() -> None:
        channel = Channel()
        writers = {name: Writer(name) for name in "ab"}
        reader, got = channel.read(), []
        for name, action in script:
            writer = writers[name]
            if action == "read":
                if len(channel):
                    got.append(await anext(reader))
            elif action == "item":
                channel.put(writer.finished(0))
            elif action == "progress":
                channel.put(writer.progress(writer.seq))
            else:
                channel.put(writer.delta(int(action), f"<{writer.seq}>"))
        got += await drain(channel)
        for name, writer in writers.items():
            mine = [event for event in got if event.turn == name]
            check_numbers(mine)
            sent = "".join(e.text for e in writer.sent if isinstance(e, TurnDelta))
            assert "".join(e.text for e in mine if isinstance(e, TurnDelta)) == sent
            items = [e for e in writer.sent if isinstance(e, TurnItem)]
            assert [e for e in mine if isinstance(e, TurnItem)] == items

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenspeed.sessions.channel.MERGE_FROM", 2)
        asyncio.run(run())


def check_numbers(events: list[TurnEvent]) -> None:
    """Every `seq` is covered once: by an event of its own, or between a merged event's `first` and `seq`."""
    expected = 0
    for event in events:
        first = getattr(event, "first", None)
        assert (event.seq if first is None else first) == expected
        assert event.seq >= expected
        expected = event.seq + 1


def test_a_closed_channel_ends_after_what_it_holds_and_takes_no_more() -> None:
    async def run() -> None:
        channel, writer = Channel(), Writer("t")
        waiting = asyncio.create_task(anext(channel.read(), None))
        await asyncio.sleep(0)
        channel.close()
        assert await waiting is None
        channel.put(writer.delta(0, "x"))
        assert await drain(channel) == []

    asyncio.run(run())
