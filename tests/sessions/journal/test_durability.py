"""Commits that are held back: nothing is acknowledged before its own returns, and nothing else waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tokenspeed.client.protocol.commands import (
    Sampling,
    SessionClose,
    SessionFork,
    SessionGet,
    SessionList,
    SessionOpen,
    SessionRegenerate,
    SessionRewind,
    SessionTurns,
    SessionUpdate,
    TurnCancel,
    TurnCreate,
)
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import TurnDelta, TurnEnded, TurnItem
from tokenspeed.sessions.journal.journal import Journal
from tokenspeed.sessions.journal.sqlite import SqliteStore
from tokenspeed.sessions.journal.store import Change, JournalError, Moved, Row

HI = "thought\n</think>\n\nHi<|im_end|>"
MakeDesk = Callable[..., Any]
T = TypeVar("T")


class HoldingStore:
    """A store whose commits wait while it is told to hold them."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._gate = threading.Event()
        self._gate.set()
        self.begun = 0
        self.changes: list[Change] = []
        self.failure: Exception | None = None

    @property
    def place(self) -> str:
        return self._store.place

    def rows(self) -> Iterator[Row]:
        return self._store.rows()

    def commit(self, changes: Sequence[Change]) -> None:
        self.begun += 1
        assert self._gate.wait(10)
        if self.failure is not None:
            raise self.failure
        self._store.commit(changes)
        self.changes += changes

    def close(self) -> None:
        self._store.close()

    def hold(self) -> None:
        self._gate.clear()

    def let_go(self) -> None:
        self._gate.set()


class Bench:
    """A desk over a journal whose commits can be held."""

    def __init__(self, desk: MakeDesk, path: Path, **options: Any) -> None:
        self.store = HoldingStore(SqliteStore.open(path, "a"))
        self.journal = Journal(self.store)
        self.desk = desk(journal=self.journal, **options)

    async def held(self, request: Awaitable[T]) -> T:
        """The answer to a request, which must not come before the commit that it waits for."""
        self.store.hold()
        before, written = self.store.begun, len(self.store.changes)
        task = asyncio.ensure_future(request)
        while self.store.begun == before:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert not task.done()
        assert len(self.store.changes) == written
        self.store.let_go()
        answer = await asyncio.wait_for(task, 10)
        assert len(self.store.changes) > written
        return answer


def run(desk: MakeDesk, tmp_path: Path, scenario: Callable[[Bench], Awaitable[None]]) -> None:
    async def test() -> None:
        bench = Bench(desk, tmp_path / "journal.db")
        try:
            await asyncio.wait_for(scenario(bench), 30)
        finally:
            bench.store.let_go()
            bench.journal.close()

    asyncio.run(test())


def test_commands_are_answered_after_their_commit(desk: MakeDesk, tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        d = b.desk
        session = (await b.held(d.ask(SessionOpen("o", labels={"a": "b"})))).session.id
        first = await d.take(session, "a", HI)
        second = await d.take(session, "b", HI)
        await b.held(d.ask(SessionFork("f", session, n=3)))
        await b.held(d.ask(SessionOpen("o", from_=first.turn)))
        await b.held(d.ask(SessionUpdate("u", session, labels={"c": "d"})))
        await b.held(d.ask(SessionUpdate("u", session, instructions="New.")))
        await b.held(d.ask(SessionRewind("r", session, first.turn)))
        await b.held(d.ask(SessionRewind("r", session, "start")))
        for command in (
            TurnCreate("q", parent=second.turn, input="c"),
            TurnCreate("q", parent=second.turn, input="c", n=2),
            TurnCreate("q", session, "c", instructions="Newer."),
        ):
            for _ in range(command.n):
                d.script(HI)
            reply = await b.held(d.ask(command))
            for turn in reply.turn_ids or [reply.turn]:
                await d.end(turn)
        await b.held(d.ask(SessionClose("x", session)))

    run(desk, tmp_path, scenario)


def test_a_turn_ends_after_its_commit_and_streams_before(desk: MakeDesk, tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        d = b.desk
        session = await d.open()
        b.store.hold()
        d.script(HI)
        turn = await asyncio.wait_for(d.begin(session, "a"), 5)  # a reply that only begins a turn waits for nothing
        while not b.store.begun > 2:
            await asyncio.sleep(0.001)
        events = d.of(turn)
        assert "".join(event.text for event in events if isinstance(event, TurnDelta)) == "thought" + "Hi"
        assert isinstance(events[-1], TurnItem)
        # While its end is on its way, the session takes no turn, but is told of and changed like a running one.
        with pytest.raises(SessionError, match="session_busy"):
            await d.ask(TurnCreate("q", session, "b"))
        reads = [SessionGet("g", session), SessionTurns("t", session), SessionList("l"), TurnCancel("x", turn)]
        changes = [SessionUpdate("u", session, labels={"a": "b"}), SessionFork("f", session)]
        tasks = [asyncio.create_task(d.ask(command)) for command in (*reads, *changes)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in tasks)
        assert not any(isinstance(event, TurnEnded) for event in d.of(turn))
        b.store.let_go()
        ended = await d.end(turn)
        assert (ended.status, ended.head) == ("completed", turn)
        replies = await asyncio.gather(*tasks)
        assert replies[0].session.head == replies[3].head == replies[5].sessions[0].head == turn
        assert (await d.record(session)).state == "idle"

    run(desk, tmp_path, scenario)


def test_other_ends_wait_too(desk: MakeDesk, tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        d = b.desk
        session = await d.open()
        await d.take(session, "a", HI)
        await b.held(d.again(session))
        await b.held(d.take(session, "b", generate=False))
        for keep in ("partial", "nothing"):
            d.script("a b", pause=True)
            turn = await d.begin(session, "c")
            await d.streamed(turn, 3)
            await b.held(d.ask(TurnCancel("x", turn, keep)))
            assert (await d.end(turn)).status == "cancelled"
        d.script("a b", pause=True)
        turn = await d.begin(session, "c")
        await b.held(d.ask(SessionClose("x", session)))

    run(desk, tmp_path, scenario)


def test_a_held_commit_holds_no_other_turn_and_is_shared(desk: MakeDesk, tmp_path: Path) -> None:
    """While the disk is busy turns stream on, and all that end meanwhile share the next commit."""

    async def scenario(b: Bench) -> None:
        d = b.desk
        sessions = [await d.open() for _ in range(9)]
        b.store.hold()
        before = b.store.begun
        turns = []
        for session in sessions:
            d.script(HI)
            turns.append(await d.begin(session, "a"))
        for turn in turns:
            await d.streamed(turn, 5)
        await asyncio.sleep(0.05)
        b.store.let_go()
        for turn in turns:
            await d.end(turn)
        assert b.store.begun - before <= 2

    run(desk, tmp_path, scenario)


def test_events_are_those_of_a_host_without_a_journal(desk: MakeDesk, tmp_path: Path) -> None:
    async def events(d: Any) -> list[tuple[Any, ...]]:
        session = await d.open()
        for text in ("a", "b"):
            await d.take(session, text, HI)
        d.script(HI)
        reply = await d.ask(TurnCreate("q", session, "c", sampling=Sampling(max_tokens=3)))
        await d.end(reply.turn)
        return [(type(event), event.seq, getattr(event, "text", None)) for event in d.events]

    async def scenario(b: Bench) -> None:
        assert await events(b.desk) == await events(desk())

    run(desk, tmp_path, scenario)


@pytest.mark.parametrize(
    ("failure", "code"), [(JournalError("the disk is full"), "journal_failed"), (Moved("taken"), "session_moved")]
)
def test_what_cannot_be_written_is_not_acknowledged(
    desk: MakeDesk, tmp_path: Path, failure: JournalError, code: str
) -> None:
    async def scenario(b: Bench) -> None:
        d = b.desk
        session = await d.open()
        first = await d.take(session, "a", HI)
        b.store.failure = failure
        ended = await d.take(session, "b", HI, token_ids=True)
        assert (ended.status, ended.reason, ended.head) == ("failed", "error", first.turn)
        assert (ended.error.code, ended.error.message) == (code, str(failure))
        assert ended.output_token_ids is None
        # Memory is ahead of the journal by now, so nothing of it is told.
        for command in (SessionGet("g", session), TurnCreate("q", session, "c"), SessionOpen("o"), SessionList("l")):
            with pytest.raises(SessionError, match=str(failure)) as caught:
                await d.ask(command)
            assert caught.value.code == code
        await d.host.close()

    run(desk, tmp_path, scenario)


def test_a_second_server_takes_the_sessions(desk: MakeDesk, tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        session = await b.desk.open()
        first = await b.desk.take(session, "a", HI)
        other = Bench(desk, tmp_path / "journal.db")
        lost = await b.desk.take(session, "b", HI)
        assert (lost.status, lost.error.code) == ("failed", "session_moved")
        with pytest.raises(SessionError, match="session_moved: another server has claimed the sessions of 'a'"):
            await b.desk.record(session)
        assert [turn.id for turn in await other.desk.turns(session)] == [first.turn]
        await other.desk.take(session, "b", HI)
        assert len(await other.desk.turns(session)) == 2
        other.journal.close()

    run(desk, tmp_path, scenario)


def test_a_command_that_is_refused_writes_nothing(desk: MakeDesk, tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        d = b.desk
        session = await d.open()
        b.store.hold()
        for command in (
            SessionOpen("o", model="other"),
            SessionRewind("r", session, "resp_none"),
            SessionFork("f", session, n=0),
            SessionUpdate("u", session, labels={"": "x"}),
            SessionRegenerate("r", session),
        ):
            with pytest.raises(SessionError):
                await asyncio.wait_for(d.ask(command), 5)

    run(desk, tmp_path, scenario)
