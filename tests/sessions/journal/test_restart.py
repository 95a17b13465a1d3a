"""Random histories, and after each part of one a new host on the same file: everything is as it was, to the id."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenspeed.client.protocol.commands import (
    Sampling,
    SessionClose,
    SessionList,
    SessionOpen,
    SessionRegenerate,
    SessionTurns,
    SessionUpdate,
    SessionUsage,
    TurnCancel,
    TurnGet,
)
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.items import FunctionCallItem, FunctionCallOutputItem, FunctionTool, MessageItem
from tokenspeed.sessions.host import SessionHost
from tokenspeed.sessions.journal.journal import Journal
from tokenspeed.sessions.journal.records import SessionRow, TurnRow
from tokenspeed.sessions.journal.sqlite import SqliteStore
from tokenspeed.sessions.journal.store import Delete, JournalError, Put
from tokenspeed.sessions.turn import Turn

HI = "\n</think>\n\nHi<|im_end|>"
OUTPUTS = [
    HI,
    "cut while thinking 🙂",
    "r\n</think>\n\nx\n<tool_call>\n<function=f>\n<parameter=s>\n4\n</parameter>\n</function>\n</tool_call><|im_end|>",
    "\n</think>\n\n<tool_call>\ncut in a call",
]
TOOL = FunctionTool("f", "Does it.", {"properties": {"s": {"type": "string", "maximum": 2**70, "é": [None, 1e300]}}})
ACTIONS = ["turn"] * 6 + [
    "open",
    "from",
    "fork",
    "rewind",
    "start",
    "update",
    "warm",
    "again",
    "cancel",
    "close",
    "fail",
]
MakeDesk = Callable[..., Any]


def opened(path: Path) -> Journal:
    return Journal(SqliteStore.open(path, "a"))


@pytest.mark.parametrize("seed", range(4))
def test_a_new_host_goes_on_where_the_old_one_ended(desk: MakeDesk, tmp_path: Path, seed: int) -> None:
    async def walk() -> None:
        dice, path = random.Random(seed), tmp_path / "journal.db"
        journal = opened(path)
        d = desk(max_context=100_000, journal=journal)
        sessions = [await d.open(), await d.open(reasoning="drop", instructions="Be brief.", tools=[TOOL])]
        for _ in range(6):
            d.read()
            for _ in range(dice.randrange(12)):
                await step(d, dice, sessions)
            before = await everything(d, sessions)
            turns, books = reachable(d), totals(d)
            await d.host.close()
            journal.close()
            check_rows(path, d)
            journal = opened(path)
            await d.restart(journal)
            assert await everything(d, sessions) == before
            assert {name: fields(turn) for name, turn in reachable(d).items()} == {
                name: fields(turn) for name, turn in turns.items()
            }
            assert totals(d) == books
        for session in sessions:
            await d.ask(SessionClose("x", session))
        journal.close()
        check_rows(path, d)

    asyncio.run(asyncio.wait_for(walk(), 60))


async def step(d: Any, dice: random.Random, sessions: list[str]) -> None:
    session, action, output = dice.choice(sessions), dice.choice(ACTIONS), dice.choice(OUTPUTS)
    turns = (await d.ask(SessionTurns("t", session))).turns
    limit = Sampling(max_tokens=len(d.tokenizer.encode_control(output)), stop=["never"], logit_bias={"7": 0.5})
    if action == "turn":
        given = following(turns)
        ended = await d.take(session, given, output, sampling=limit, instructions=dice.choice([None, None, "Turn."]))
        assert ended.status in ("completed", "incomplete")
    elif action == "cancel":
        d.script("a b", pause=True)
        await d.ask(TurnCancel("x", await d.begin(session, following(turns)), dice.choice(["partial", "nothing"])))
        d.engine.scripts.clear()
    elif action == "fail":
        d.engine.fail_next = "no"
        assert (await d.take(session, following(turns), HI)).status == "failed"
    elif action == "warm":
        await d.take(session, [MessageItem("developer", "Quiet."), *asked(turns)], generate=False)
    elif action == "again" and turns:
        d.script(output)
        ask = SessionRegenerate("r", session, dice.choice(turns).id, sampling=limit)
        await d.end((await d.ask(ask)).turn)
    elif action == "update":
        changes: dict[str, Any] = dice.choice(
            [
                {"instructions": dice.choice(["", "Be long.", "Ψ" * 500])},
                {"tools": dice.choice([[], [TOOL]])},
                {"labels": {"k": str(dice.randrange(3))}},
                {"sampling": Sampling(seed=2**64 - 1, temperature=0.5)},
                {"reasoning": dice.choice(["keep", "drop"])},
            ]
        )
        await d.ask(SessionUpdate("u", session, **changes))
    elif action == "open":
        sessions.append(await d.open(instructions=dice.choice([None, "Be brief."]), labels={"n": "é"}))
    elif action == "from" and turns:
        sessions.append((await d.ask(SessionOpen("o", from_=dice.choice(turns).id, tools=[TOOL]))).session.id)
    elif action == "fork":
        sessions.append(await d.fork(session, dice.choice(turns).id if turns else None))
    elif action == "rewind" and turns:
        await d.rewind(session, dice.choice(turns).id)
    elif action == "start":
        await d.rewind(session, "start")
    elif action == "close" and len(sessions) > 2:
        await d.ask(SessionClose("x", session))
        sessions.remove(session)


def asked(turns: list[Any]) -> list[Any]:
    if turns and turns[-1].reason == "tool_calls":
        calls = [item for item in turns[-1].output if isinstance(item, FunctionCallItem)]
        return [FunctionCallOutputItem(call.call_id, "ok") for call in calls]
    return [MessageItem("user", "hi")]


def following(turns: list[Any]) -> list[Any]:
    return [*asked(turns), MessageItem("user", "and?")] if len(turns) % 2 else asked(turns)


async def everything(d: Any, sessions: list[str]) -> Any:
    """What clients see of all sessions, the exact ids of all turns included."""
    listed = await d.ask(SessionList("l", limit=1000))
    assert [session.id for session in listed.sessions] == sessions
    seen: list[Any] = [listed]
    for session in sessions:
        seen += [await d.ask(SessionTurns("t", session, token_ids=True)), await d.ask(SessionUsage("u", session))]
    return msgspec.to_builtins(seen)


def reachable(d: Any) -> dict[str, Turn]:
    found: dict[str, Turn] = {}
    for session in d.host._book:
        turn = session.head
        while turn is not None:
            found[turn.id] = turn
            turn = turn.parent
    return found


def fields(turn: Turn) -> tuple[Any, ...]:
    """All that a turn is made of, what clients never see included."""
    prompt, defaults = turn.prompt, turn.defaults
    return (
        (turn.parent and turn.parent.id, prompt.base and prompt.base.id, prompt.keep, prompt.fresh, prompt.input_ids),
        (prompt.preamble, prompt.input_end, prompt.marks, prompt.ids(), turn.ids(), turn.hidden, turn.cut, turn.depth),
        (turn.status, turn.reason, turn.usage, turn.timings, turn.stop_string, turn.input, turn.output),
        (defaults.instructions, defaults.tools, defaults.sampling, defaults.reasoning, defaults.labels),
        (defaults.preamble, [defaults.types.of("f", name) for name in ("s", "t")]),
    )


def totals(d: Any) -> dict[str, Any]:
    return {session.id: (vars(session.totals), session.latest if session.head else None) for session in d.host._book}


def check_rows(path: Path, d: Any) -> None:
    """The file holds what memory holds, and nothing that nobody can reach."""
    store = SqliteStore.open(path, "a")
    rows = list(store.rows())
    store.close()
    kinds = Counter(row.kind for row in rows)
    turns = {row.id: msgspec.msgpack.decode(row.payload, type=TurnRow) for row in rows if row.kind == "turn"}
    sessions = {row.id: msgspec.msgpack.decode(row.payload, type=SessionRow) for row in rows if row.kind == "session"}
    assert set(turns) == set(reachable(d))
    assert set(sessions) == {session.id for session in d.host._book}
    used = {turn.defaults for turn in turns.values()} | {session.defaults for session in sessions.values()}
    assert {row.id for row in rows if row.kind == "defaults"} == used
    assert kinds["preamble"] >= len({turn.prompt.preamble for turn in turns.values()})
    if not sessions:
        assert kinds == {"tokens": 1}
    for name, turn in reachable(d).items():
        ids = array("i")
        ids.frombytes(turns[name].output_ids)
        assert ids == turn.output_ids


def test_the_next_turn_is_sent_whole_from_the_journals_ids(desk: MakeDesk, tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "journal.db"
        journal = opened(path)
        d = desk(journal=journal)
        session = await d.open(instructions="Be brief.")
        first = await d.take(session, "a", "thought\n</think>\n\nHi<|im_end|>", token_ids=True)
        await d.host.close()
        journal.close()
        # A host that rendered anything anew would fail.
        journal = opened(path)
        await d.restart(journal)
        d.host._chat.transcript._preamble_ids = None
        second = await d.take(session, "b", HI, token_ids=True)
        before = first.prompt_token_ids + first.output_token_ids
        assert second.prompt_token_ids[: len(before)] == before
        assert d.engine.generated[-2].parent == first.turn  # which it did not know
        assert d.engine.generated[-1].parent is None
        assert d.engine.prompts[second.turn] == second.prompt_token_ids
        assert d.started(second.turn).miss_reason == "cold"
        assert (await d.ask(TurnGet("g", first.turn))).turns[0].id == first.turn
        with pytest.raises(SessionError, match="turn_not_found"):
            await d.ask(TurnGet("g", first.turn), tenant="another")
        journal.close()

    asyncio.run(asyncio.wait_for(test(), 30))


def test_turns_that_nobody_can_reach_are_cleared_away(desk: MakeDesk, tmp_path: Path) -> None:
    """A host that is killed may leave them: the session is gone, and what held them was in memory alone."""

    async def test() -> None:
        path = tmp_path / "journal.db"
        journal = opened(path)
        d = desk(journal=journal)
        session, other = await d.open(), await d.open()
        for text in ("a", "b"):
            await d.take(session, text, HI)
        kept = await d.take(other, "a", HI)
        journal.append([Delete("session", session)]).result()
        journal.close()
        journal = opened(path)
        d.engine.forget()
        d.host = SessionHost(d.engine, d.directory, journal=journal)
        assert [turn.id for turn in await d.turns(other)] == [kept.turn]
        assert len(d.host._book._turns) == 1
        await d.host.close()
        journal.close()
        check_rows(path, d)

    asyncio.run(asyncio.wait_for(test(), 30))


def test_the_ids_of_another_tokenizer_are_refused(desk: MakeDesk, tmp_path: Path, directory: Path) -> None:
    journal = opened(tmp_path / "journal.db")
    d = desk(journal=journal)
    journal.close()
    journal = opened(tmp_path / "journal.db")
    other = tmp_path / "model"
    other.mkdir()
    for file in directory.iterdir():
        (other / file.name).write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(JournalError, match=r"journal\.db has sessions of scripted, whose tokenizer or chat template"):
        SessionHost(d.engine, other, journal=journal)
    journal.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda turn, session: [Put("more", "x", b"")], "more x cannot be read: there is no such kind of row"),
        (lambda turn, session: [Put("turn", turn, b"\x80")], "turn .* cannot be read: .* missing required field"),
        (lambda turn, session: [Put("turn", turn, b"")], "turn .* cannot be read: "),
        (lambda turn, session: [Delete("turn", turn)], "session .* cannot be read: it refers to resp_.* not there"),
    ],
)
def test_rows_that_make_no_sense_are_refused(
    desk: MakeDesk, tmp_path: Path, change: Callable[..., Any], words: str
) -> None:
    async def test() -> None:
        journal = opened(tmp_path / "journal.db")
        d = desk(journal=journal)
        session = await d.open()
        turn = (await d.take(session, "a", HI)).turn
        journal.append(change(turn, session)).result()
        journal.close()
        journal = opened(tmp_path / "journal.db")
        with pytest.raises(JournalError, match=rf"journal\.db: {words}"):
            await d.restart(journal)
        journal.close()

    asyncio.run(asyncio.wait_for(test(), 30))
