"""Other answers and other branches: regenerate, parents, `from`, warm-ups, rewind points; lists of sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tokenspeed.client.protocol.commands import (
    Sampling,
    SessionClose,
    SessionGet,
    SessionList,
    SessionOpen,
    SessionRegenerate,
    SessionRewind,
    SessionUpdate,
    TurnCancel,
    TurnCreate,
    TurnGet,
)
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.items import FunctionCallOutputItem, FunctionTool, MessageItem

HI = "\n</think>\n\nHi<|im_end|>"
CALL = "\n</think>\n\n<tool_call>\n<function=f>\n</function>\n</tool_call><|im_end|>"
GENERATION = "<|im_start|>assistant\n<think>\n"
TOOL = FunctionTool("f")
MakeDesk = Callable[..., Any]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))  # type: ignore[arg-type]


async def refusal(asked: Awaitable[Any]) -> SessionError:
    with pytest.raises(SessionError) as caught:
        await asked
    return caught.value


@pytest.mark.parametrize("rule", ["keep", "drop"])
def test_regenerate_starts_from_the_inputs_end(desk: MakeDesk, rule: str) -> None:
    async def test() -> None:
        d = desk()
        generation = len(d.tokenizer.encode_control(GENERATION))
        session = await d.open(instructions="Be brief.", reasoning=rule)
        await d.take(session, "a", "r" + HI)
        old = await d.take(session, "b", HI)
        prompt = d.engine.prompts[old.turn]
        new = await d.again(session, "q\n</think>\n\nHo<|im_end|>")
        assert d.engine.prompts[new.turn] == prompt
        command = d.engine.generated[-1]
        assert (command.parent, command.keep) == (old.turn, len(prompt) - generation)
        assert command.keep in command.marks
        assert (new.usage.computed, new.head) == (generation, new.turn)
        assert d.started(new.turn).miss_reason is None
        first, second = await d.turns(session)
        assert (second.parent, second.input, second.output[-1].text) == (first.id, [MessageItem("user", "b")], "Ho")
        assert d.engine.released == [old.turn]
        # A chain of them leaves nothing behind, and the next turn goes on from the newest.
        newest = await d.again(session)
        assert d.engine.released == [old.turn, new.turn]
        after = await d.take(session, "c", HI)
        assert d.engine.prompts[after.turn][: len(prompt) - generation] == prompt[:-generation]
        assert (await d.turns(session))[-1].parent == newest.turn

    run(test)


def test_regenerate_of_an_earlier_turn_and_of_none(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open()
        assert (await refusal(d.ask(SessionRegenerate("r", session)))).code == "bad_request"
        first = await d.take(session, "a", HI)
        second = await d.take(session, "b", HI)
        new = await d.again(session, of=first.turn, sampling=Sampling(seed=4))
        assert d.engine.generated[-1].sampling.seed == 4
        assert [turn.id for turn in await d.turns(session)] == [new.turn]
        assert sorted(d.engine.released) == sorted([first.turn, second.turn])
        assert (await refusal(d.ask(SessionRegenerate("r", session, of=first.turn)))).code == "turn_not_found"
        # What is cancelled without a trace, or fails, leaves the head.
        d.script("a b", pause=True)
        turn = (await d.ask(SessionRegenerate("r", session))).turn
        assert (await refusal(d.ask(SessionRegenerate("r", session)))).code == "session_busy"
        await d.streamed(turn, 2)
        assert (await d.ask(TurnCancel("x", turn, "nothing"))).head == new.turn
        d.engine.forget()
        assert (await d.again(session)).status == "completed"

    run(test)


def test_a_parent_is_an_implicit_fork(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open(instructions="S", tools=[TOOL], sampling=Sampling(seed=7), labels={"a": "b"})
        first = await d.take(session, "a", HI)
        second = await d.take(session, "b", HI)
        d.script(HI)
        reply = await d.ask(TurnCreate("q", parent=first.turn, input="c"))
        await d.end(reply.turn)
        fork = await d.record(reply.session.id)
        assert (fork.instructions, fork.tools, fork.labels, fork.head) == ("S", [TOOL], {"a": "b"}, reply.turn)
        assert d.engine.generated[-1].sampling.seed == 7
        assert d.engine.generated[-1].parent == first.turn
        assert (reply.lost_tokens, (await d.record(session)).head) == (None, second.turn)
        # The parent's defaults are those under which it was made, whatever its session has now.
        await d.ask(SessionUpdate("u", session, instructions="T"))
        d.script(HI)
        reply = await d.ask(TurnCreate("q", parent=first.turn, input="c"))
        await d.end(reply.turn)
        assert reply.session.instructions == "S"
        for bad in (
            TurnCreate("q", input="c"),
            TurnCreate("q", session, "c", parent=first.turn),
            TurnCreate("q", session, "c", n=2),
            TurnCreate("q", parent=first.turn, input="c", expect_head=first.turn),
        ):
            assert (await refusal(d.ask(bad))).code == "bad_request"
        d.script("x", pause=True)
        running = await d.begin(session, "d")
        assert (await refusal(d.ask(TurnCreate("q", parent=running, input="c")))).code == "session_busy"
        record = (await d.ask(TurnGet("g", running))).turns[0]
        assert (record.id, record.status) == (running, "running")
        await d.ask(TurnCancel("x", running))
        assert (await d.ask(TurnGet("g", running))).turns[0].status == "cancelled"

    run(test)


def test_n_answers_are_submitted_at_once(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        first = await d.take(await d.open(), "a", HI)
        for number in range(3):
            d.script(f"\n</think>\n\nH{number}<|im_end|>")
        reply = await d.ask(TurnCreate("q", parent=first.turn, input="b", n=3, sampling=Sampling(seed=2**64 - 2)))
        commands = d.engine.generated[-3:]
        assert [command.turn for command in commands] == reply.turn_ids
        assert [command.sampling.seed for command in commands] == [2**64 - 2, 2**64 - 1, 0]
        assert {(command.parent, command.tokens) for command in commands} == {(first.turn, commands[0].tokens)}
        ends = [await d.end(turn) for turn in reply.turn_ids]
        assert [end.session for end in ends] == [session.id for session in reply.sessions]
        texts = [(await d.turns(end.session))[-1].output[-1].text for end in ends]
        assert texts == ["H0", "H1", "H2"]
        error = await refusal(d.ask(TurnCreate("q", parent=first.turn, input="b", n=65)))
        assert (error.code, error.detail) == ("bad_request", {"number": 65, "limit": 64})
        assert len((await d.ask(SessionList("l"))).sessions) == 4

    run(test)


def test_a_session_opened_from_a_turn(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open(instructions="S", tools=[TOOL], labels={"a": "b"}, reasoning="drop")
        first = await d.take(session, "a", HI)
        length = len(d.engine.lineages[first.turn][1])
        reply = await d.ask(SessionOpen("o", from_=first.turn))
        assert (reply.session.head, reply.session.instructions, reply.session.reasoning) == (first.turn, "S", "drop")
        assert reply.lost_tokens == 0
        reply = await d.ask(SessionOpen("o", from_=first.turn, instructions="", labels={}))
        assert (reply.session.instructions, reply.session.tools, reply.session.labels) == (None, [TOOL], {})
        assert reply.lost_tokens == length - 1
        await d.ask(SessionClose("x", session))
        assert d.engine.released == []
        assert (await d.take(reply.session.id, "b", HI)).status == "completed"
        assert (await refusal(d.ask(SessionOpen("o", from_="resp_a_0")))).code == "turn_not_found"

    run(test)


def test_a_parent_stays_while_a_long_input_is_tokenised(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk(max_context=100_000)
        session = await d.open()
        first = await d.take(session, "a", HI)
        d.script(HI)
        long = asyncio.create_task(d.ask(TurnCreate("q", parent=first.turn, input="a " * 9_000)))
        await asyncio.sleep(0)
        await d.ask(SessionClose("x", session))
        assert d.engine.released == []
        reply = await long
        assert (await d.end(reply.turn)).status == "completed"
        await d.ask(SessionClose("x", reply.session.id))
        assert sorted(d.engine.released) == sorted([first.turn, reply.turn])

    run(test)


@pytest.mark.parametrize("rule", ["keep", "drop"])
def test_a_warm_up_leaves_the_input_and_the_next_turn_goes_on(desk: MakeDesk, rule: str) -> None:
    """Whether the answer is asked for with nothing or with more input, the text is the template's own."""

    async def test() -> None:
        d = desk()
        session = await d.open(instructions="S", reasoning=rule)
        await d.take(session, "a", "r" + HI)
        warm = await d.take(session, "b", generate=False)
        assert (warm.status, warm.reason, warm.usage.output, warm.head) == ("completed", "warmed", 0, warm.turn)
        record = (await d.turns(session))[-1]
        assert (record.output, record.input) == ([], [MessageItem("user", "b")])
        prompt = d.engine.prompts[warm.turn]
        assert d.tokenizer.decode(prompt).endswith("<|im_start|>user\nb<|im_end|>\n")
        fork = await d.fork(session)
        answered = await d.take(session, "", HI)
        assert d.engine.prompts[answered.turn] == prompt + list(d.tokenizer.encode_control(GENERATION))
        assert answered.usage.computed == len(d.tokenizer.encode_control(GENERATION))
        more = await d.take(fork, [MessageItem("user", "c")], HI)
        text = d.tokenizer.decode(d.engine.prompts[more.turn])
        assert text.endswith(f"<|im_start|>user\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n{GENERATION}")
        # And under either rule the turn after the answer is as if there had been no warm-up.
        plain = await d.open(instructions="S", reasoning=rule)
        await d.take(plain, "a", "r" + HI)
        await d.take(plain, "b", HI)
        expected = d.engine.prompts[(await d.take(plain, "c", HI)).turn]
        assert d.engine.prompts[(await d.take(session, "c", HI)).turn] == expected
        new = await d.again(fork)
        assert d.engine.prompts[new.turn] == d.engine.prompts[more.turn]
        assert (await refusal(d.begin(await d.open(), "", generate=False))).code == "bad_request"

    run(test)


def test_a_warm_up_of_tool_results_and_another_answer_to_it(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open(tools=[TOOL])
        await d.take(session, "a", CALL)
        call = (await d.turns(session))[-1].output[-1].call_id
        warm = await d.take(session, [FunctionCallOutputItem(call, "1")], generate=False)
        prompt = d.engine.prompts[warm.turn]
        new = await d.again(session)
        assert d.engine.prompts[new.turn] == prompt + list(d.tokenizer.encode_control(GENERATION))
        assert [turn.reason for turn in await d.turns(session)] == ["tool_calls", "stop"]

    run(test)


def test_expect_head(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open()
        first = await d.take(session, "a", HI, expect_head="start")
        second = await d.take(session, "b", HI, expect_head=first.turn)
        for expected in (first.turn, "start", "resp_a_0"):
            error = await refusal(d.begin(session, "c", expect_head=expected))
            assert (error.code, error.status) == ("head_moved", 412)
            assert error.detail == {"expected": expected, "head": second.turn}
        assert len(d.engine.generated) == 2
        assert (await refusal(d.begin(await d.open(), "c", expect_head=first.turn))).detail["head"] is None

    run(test)


def test_residency_and_cheap_rewind_points(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open(instructions="S")
        empty = await d.record(session)
        assert (empty.residency.device, empty.rewind_points) == (0, [])
        turns = [(await d.take(session, str(number), HI)).turn for number in range(3)]
        warm = (await d.take(session, "w", generate=False)).turn
        record = await d.record(session)
        assert record.rewind_points == [*turns, warm]
        assert record.residency.device == len(d.engine.lineages[warm][1])
        d.engine.evicted |= {turns[0], warm}
        record = await d.record(session)
        assert record.rewind_points == turns[1:]
        assert record.residency.device == 0
        for point in record.rewind_points:
            fork = await d.fork(session, point)
            parent = len(d.engine.lineages[point][1])
            ended = await d.take(fork, "x", HI)
            assert ended.usage.computed <= ended.usage.prompt - parent + 1
        # From under another preamble none is cheap.
        await d.ask(SessionUpdate("u", session, instructions="T"))
        assert (await d.record(session)).rewind_points == []
        assert (await d.ask(SessionList("l"))).sessions[0].rewind_points is None
        d.engine.die()
        assert (await d.ask(SessionGet("g", session))).session.residency.device == 0

    run(test)


def test_where_sessions_stand_is_told_to_the_engine(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open()
        turns = [(await d.take(session, str(number), HI)).turn for number in range(2)]
        fork = await d.fork(session)
        assert +d.engine.standing == {turns[1]: 2}
        await d.ask(SessionRewind("r", fork, turns[0]))
        assert +d.engine.standing == {turns[0]: 1, turns[1]: 1}
        for each in (session, fork):
            await d.ask(SessionClose("x", each))
        assert not any(d.engine.standing.values())

    run(test)


def test_lists_by_label_and_in_pages(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        ids = [await d.open(labels={"team": "ab"[number % 2], "n": str(number)}) for number in range(7)]
        await d.ask(SessionOpen("o", labels={"team": "a"}), tenant="u")
        assert [session.id for session in (await d.ask(SessionList("l", {"team": "a"}))).sessions] == ids[::2]
        assert (await d.ask(SessionList("l", {"team": "a", "n": "1"}))).sessions == []
        found, after = [], None
        while True:
            reply = await d.ask(SessionList("l", {"team": "a"}, limit=3, after=after))
            found.append([session.id for session in reply.sessions])
            after = reply.after
            if after is None:
                break
        assert found == [ids[0:5:2], ids[6:]]
        assert (await d.ask(SessionList("l", {"team": "a"}, limit=4))).after is None
        for limit in (0, -1, 1001):
            error = await refusal(d.ask(SessionList("l", limit=limit)))
            assert (error.code, error.detail["number"]) == ("bad_request", limit)
        assert (await refusal(d.ask(SessionList("l", after="sess_a_0")))).code == "session_not_found"

    run(test)
