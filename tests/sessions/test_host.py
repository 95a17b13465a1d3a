"""Sessions through the host: open, fork, rewind, list, close; tenants, channels, and what is released."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenspeed.client.protocol.commands import (
    Command,
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
    SessionUsage,
    TurnCancel,
    TurnCreate,
    TurnGet,
)
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import TurnEnded
from tokenspeed.client.protocol.items import FunctionTool
from tokenspeed.sessions.host import SessionHost

HI = "\n</think>\n\nHi<|im_end|>"
MakeDesk = Callable[..., Any]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))  # type: ignore[arg-type]


async def refusal(asked: Awaitable[Any]) -> SessionError:
    with pytest.raises(SessionError) as caught:
        await asked
    return caught.value


def test_an_opened_session(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        tool = FunctionTool("f", "Does <f>", {"type": "object"})
        reply = await d.ask(
            SessionOpen("o", instructions="Be brief.", tools=[tool], sampling=Sampling(seed=1), labels={"a": "b"})
        )
        session = reply.session
        assert reply.id == "o"
        assert re.fullmatch("sess_a_[0-9a-f]{24}", session.id)
        assert (session.model, session.state, session.head, session.turns) == ("scripted", "idle", None, 0)
        assert (session.instructions, session.tools, session.reasoning) == ("Be brief.", [tool], "keep")
        assert (session.sampling, session.labels) == (Sampling(seed=1), {"a": "b"})
        assert session.tokens == session.prefix_tokens == 4096 - session.remaining > 20
        ended = await d.take(session.id, "a", HI)
        assert re.fullmatch("resp_a_[0-9a-f]{24}", ended.turn)
        assert d.engine.generated[0].marks[0] == session.prefix_tokens
        later = await d.record(session.id)
        assert (later.head, later.turns) == (ended.turn, 1)
        assert later.tokens == len(d.engine.lineages[ended.turn][1])
        assert ended.usage.remaining == later.remaining == 4096 - later.tokens
        bare = await d.record(await d.open())
        assert (bare.prefix_tokens, bare.tokens, bare.instructions) == (0, 0, None)

    run(test)


def test_what_cannot_be_opened(desk: MakeDesk, directory: Path, tmp_path: Path) -> None:
    async def test() -> None:
        d = desk(max_context=100)
        for fields, code, message in [
            ({"model": "other"}, "bad_request", "'other' is not served here; 'scripted' is"),
            ({"tools": [FunctionTool("f"), FunctionTool("f")]}, "bad_request", "'f' is given more than once"),
            ({"tools": [FunctionTool("")]}, "bad_request", "name is 0; it must be between 1 and 128"),
            ({"instructions": "x " * 100}, "context_length_exceeded", "maximum context length is 100 tokens"),
            ({"instructions": "\ud800"}, "bad_request", "lone surrogate"),
            ({"sampling": Sampling(max_tokens=0)}, "bad_request", "max_tokens is 0"),
        ]:
            error = await refusal(d.open(**fields))
            assert (error.code, message in error.message) == (code, True), error
        assert (await d.ask(SessionList("l"))).sessions == []
        assert (await d.record(await d.open(model="scripted"))).model == "scripted"
        source = (directory / "chat_template.jinja").read_text()
        home = shutil.copytree(directory, tmp_path / "keeps_all")
        (home / "chat_template.jinja").write_text(
            source.replace("preserve_thinking or loop.index0 > ns.last_query", "1")
        )
        keeps = SessionHost(d.engine, home)
        error = await refusal(keeps.request("t", SessionOpen("o", reasoning="drop"), "c"))
        assert (error.code, "keeps all reasoning" in error.message) == ("bad_request", True)

    run(test)


def test_a_model_directory_that_cannot_be_served(desk: MakeDesk, directory: Path, tmp_path: Path) -> None:
    home = shutil.copytree(directory, tmp_path / "model")
    engine = desk().engine
    (home / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ValueError, match="top_p is 7"):
        SessionHost(engine, home)
    (home / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    host = SessionHost(engine, home)
    assert host.model == "scripted"
    (home / "chat_template.jinja").write_text("{{ raise_exception('no chats') }}")
    with pytest.raises(ValueError, match="no chats"):
        SessionHost(engine, home)
    small = engine.info
    small.vocab_size = 3000
    with pytest.raises(ValueError, match="ids up to 3071, the model only up to 2999"):
        SessionHost(SimpleNamespace(info=small), home)  # type: ignore[arg-type]


def test_forks_share_and_part(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open(instructions="S", sampling=Sampling(seed=9), labels={"k": "v"})
        first, second = await d.take(session, "a", HI), await d.take(session, "b", HI)
        reply = await d.ask(SessionFork("f", session, n=3))
        assert [fork.head for fork in reply.sessions] == [second.turn] * 3
        assert len({fork.id for fork in reply.sessions} | {session}) == 4
        assert {(fork.instructions, fork.sampling.seed, fork.labels["k"]) for fork in reply.sessions} == {("S", 9, "v")}
        third = await d.take(reply.sessions[0].id, "c", HI)
        assert d.engine.generated[-1].parent == second.turn
        assert (await d.record(session)).head == second.turn
        early = await d.fork(session, first.turn)
        assert [turn.id for turn in await d.turns(early)] == [first.turn]
        assert [turn.id for turn in await d.turns(reply.sessions[0].id)] == [first.turn, second.turn, third.turn]
        assert (await d.ask(SessionUsage("u", reply.sessions[0].id))).totals.turns == 1
        assert (await d.ask(SessionUsage("u", early))).totals.hit_rate == 0.0
        for n in (0, -1, 65):
            assert (await refusal(d.ask(SessionFork("f", session, n=n)))).code == "bad_request"
        assert (await refusal(d.fork(early, second.turn))).code == "turn_not_found"
        fresh = await d.fork(await d.open())
        assert (await d.record(fresh)).head is None

    run(test)


def test_rewind_moves_the_head_and_releases_what_nobody_can_reach(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open()
        turns = [(await d.take(session, str(number), HI)).turn for number in range(4)]
        fork = await d.fork(session, turns[1])
        assert (await d.rewind(session, turns[2])).head == turns[2]
        assert d.engine.released == [turns[3]]
        assert (await refusal(d.rewind(session, turns[3]))).code == "turn_not_found"
        assert (await refusal(d.rewind(session, "resp_a_0"))).code == "turn_not_found"
        reply = await d.rewind(session, "start")
        assert (reply.head, reply.session.head, reply.session.turns) == (None, None, 0)
        assert d.engine.released == [turns[3], turns[2]]
        again = await d.take(session, "0", HI)
        assert (d.engine.generated[-1].parent, again.head) == (None, again.turn)
        await d.ask(SessionClose("x", fork))
        assert d.engine.released == [turns[3], turns[2], turns[1], turns[0]]
        await d.ask(SessionClose("x", session))
        assert d.engine.released[4:] == [again.turn]
        assert (await refusal(d.record(session))).code == "session_not_found"
        assert len(d.host._book._turns) == 0
        assert not d.host._book._latest

    run(test)


def test_a_running_session_is_not_rewound_but_forked_and_closed(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open()
        first = await d.take(session, "a", HI)
        d.script("a b c", pause=True)
        turn = await d.begin(session, "b")
        await d.streamed(turn, 2)
        assert (await refusal(d.rewind(session, "start"))).code == "session_busy"
        assert (await d.record(await d.fork(session))).head == first.turn
        await d.ask(SessionClose("x", session))
        ended = await d.end(turn)
        assert (ended.status, ended.head) == ("cancelled", first.turn)
        assert turn not in d.engine.lineages
        assert d.engine.released == []

    run(test)


def test_tenants_do_not_see_each_other(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open()
        d.script(HI)
        turn = (await d.take(session, "a")).turn
        d.script("a", pause=True)
        running = await d.begin(session, "b")

        def commands(session: str, turn: str, running: str) -> list[Command]:
            return [
                SessionGet("x", session),
                SessionTurns("x", session),
                SessionUsage("x", session),
                SessionFork("x", session),
                SessionFork("x", session, turn),
                SessionRewind("x", session, "start"),
                SessionClose("x", session),
                SessionUpdate("x", session, labels={}),
                SessionRegenerate("x", session),
                SessionList("x", after=session),
                SessionOpen("x", from_=turn),
                SessionOpen("x", from_=running),
                TurnCreate("x", session, "hello"),
                TurnCreate("x", parent=turn, input="hello"),
                TurnCreate("x", parent=running, input="hello", n=3),
                TurnGet("x", turn),
                TurnGet("x", running),
                TurnCancel("x", turn),
                TurnCancel("x", running),
            ]

        missing = ("sess_a_" + "0" * 24, "resp_a_" + "0" * 24, "resp_a_" + "1" * 24)
        for foreign, absent in zip(commands(session, turn, running), commands(*missing), strict=True):
            told, expected = await refusal(d.ask(foreign, tenant="u")), await refusal(d.ask(absent, tenant="u"))
            assert told.code == expected.code
            assert told.code in ("session_not_found", "turn_not_found")
            hidden = str(expected.message)
            for mine, theirs in zip((session, turn, running), missing, strict=True):
                hidden = hidden.replace(theirs, mine)
            assert told.message == hidden
        assert (await d.ask(SessionList("l"), tenant="u")).sessions == []
        assert [found.id for found in (await d.ask(SessionList("l"))).sessions] == [session]
        assert (await d.record(session)).state == "running"
        await d.ask(TurnCancel("x", running))

    run(test)


def test_events_go_to_the_channel_that_began_the_turn(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open()
        fork = await d.fork(session)
        d.script(HI)
        d.script(HI)
        mine = (await d.ask(TurnCreate("q", session, "a"), channel="one")).turn
        theirs = (await d.ask(TurnCreate("q", fork, "a"), channel="two")).turn
        for channel, turn in (("one", mine), ("two", theirs)):
            async for event in d.host.events(channel):
                assert event.turn == turn
                if isinstance(event, TurnEnded):
                    break

    run(test)


def test_a_closed_channel_leaves_its_turns_running(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open()
        d.script("one two", pause=True)
        turn = (await d.ask(TurnCreate("q", session, "a"), channel="gone")).turn
        reader = asyncio.create_task(anext(d.host.events("gone")))
        await reader
        await d.host.close_channel("gone")
        await d.host.close_channel("gone")
        assert (await d.record(session)).state == "running"
        assert (await d.ask(TurnCancel("x", turn))).head == turn
        assert (await d.take(session, "b", HI)).status == "completed"

    run(test)


def test_closing_the_host_ends_turns_and_channels(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        sessions = [await d.open(), await d.open()]
        for session in sessions:
            d.script("one two", pause=True)
            await d.begin(session, "a")
        await d.host.close()
        await asyncio.wait_for(d._reader, 5)
        ends = [event for event in d.events if isinstance(event, TurnEnded)]
        assert [end.status for end in ends] == ["cancelled", "cancelled"]
        assert {end.session for end in ends} == set(sessions)

    run(test)


def test_turn_not_found(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        assert (await refusal(d.ask(TurnCancel("x", "resp_a_0")))).code == "turn_not_found"
        session = await d.open()
        first = await d.take(session, "a", HI)
        second = await d.take(session, "b", HI)
        assert (await d.ask(TurnCancel("x", first.turn, "nothing"))).head == first.turn
        assert (await d.ask(TurnCancel("x", second.turn, "nothing"))).head == second.turn
        assert (await d.record(session)).head == second.turn

    run(test)
