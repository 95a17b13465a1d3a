"""Turns through the host: their events, their input, and what reaches the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tokenspeed.client.protocol.commands import Sampling, SessionClose, SessionUsage, TurnCancel
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import TurnDelta, TurnItem, TurnStarted
from tokenspeed.client.protocol.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionTool,
    InputItem,
    MessageItem,
    ReasoningItem,
    TextPart,
)

TOOL = FunctionTool("f", parameters={"properties": {"s": {"type": "string"}, "i": {"type": "integer"}}})
PARAMETERS = "<parameter=s>\nKöln 😀\n</parameter>\n<parameter=i>\n12\n</parameter>"
CALL = f"<tool_call>\n<function=f>\n{PARAMETERS}\n</function>\n</tool_call>"
HI = "\n</think>\n\nHi<|im_end|>"
MakeDesk = Callable[..., Any]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))  # type: ignore[arg-type]


def test_a_turns_events(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk(chunk=2)
        session = await d.open(tools=[TOOL])
        ended = await d.take(session, "go", f"Thinking.\n</think>\n\nLooking.\n{CALL}<|im_end|>")
        events = d.of(ended.turn)
        assert [event.seq for event in events] == list(range(len(events)))
        assert {event.session for event in events} == {session}
        started = events[0]
        assert isinstance(started, TurnStarted)
        assert (started.parent, started.prompt_tokens, started.to_compute) == (
            None,
            ended.usage.prompt,
            ended.usage.prompt,
        )
        items = [event for event in events if isinstance(event, TurnItem)]
        assert [event.index for event in items] == [0, 1, 2]
        reasoning, message, call = [event.item for event in items]
        assert isinstance(reasoning, ReasoningItem)
        assert isinstance(message, MessageItem)
        assert isinstance(call, FunctionCallItem)
        assert (reasoning.text, message.text) == ("Thinking.", "Looking.")
        assert json.loads(call.arguments) == {"s": "Köln 😀", "i": 12}
        expected = [("reasoning", reasoning.text), ("text", message.text), ("arguments", call.arguments)]
        for index, (channel, text) in enumerate(expected):
            deltas = [event for event in events if isinstance(event, TurnDelta) and event.item == index]
            assert {delta.channel for delta in deltas} == {channel}
            assert "".join(delta.text for delta in deltas) == text
            assert all(delta.text for delta in deltas)
            assert deltas[0].name == ("f" if channel == "arguments" else None)
        assert (ended.status, ended.reason, ended.head) == ("completed", "tool_calls", ended.turn)
        [record] = await d.turns(session)
        assert record.output == [reasoning, message, call]
        assert record.input == [MessageItem("user", "go")]
        assert ended.usage.output == len(
            d.tokenizer.encode_control(f"Thinking.\n</think>\n\nLooking.\n{CALL}<|im_end|>")
        )
        assert ended.usage.reasoning == len(d.tokenizer.encode_control("Thinking.\n</think>"))

    run(test)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_one_delta_per_engine_event_and_channel(desk: MakeDesk, chunk: int) -> None:
    async def test() -> None:
        d = desk(chunk=chunk)
        text = "one two three four five six"
        ended = await d.take(await d.open(), "go", f"\n</think>\n\n{text}<|im_end|>")
        deltas = [event for event in d.of(ended.turn) if isinstance(event, TurnDelta)]
        tokens = len(d.tokenizer.encode_control(f"\n</think>\n\n{text}<|im_end|>"))
        assert 1 <= len(deltas) <= -(-tokens // chunk)
        assert len(deltas) >= (len(text.split()) if chunk == 1 else 1)

    run(test)


def test_prompts_are_append_only_and_only_new_ids_are_sent(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open(instructions="Be brief.", tools=[TOOL])
        before: list[int] = []
        given: str | list[InputItem] = "go"
        for number in range(6):
            output = HI if number % 2 else f"r{number}\n</think>\n\n{CALL}<|im_end|>"
            ended = await d.take(session, given, output)
            prompt = d.engine.prompts[ended.turn]
            assert prompt[: len(before)] == before
            command = d.engine.generated[-1]
            assert len(command.tokens) == 4 * (len(prompt) - len(before))
            assert (command.parent, command.keep) == ((await d.turns(session))[-1].parent, None)
            assert ended.usage.computed <= len(prompt) - len(before) + 1
            before = d.engine.lineages[ended.turn][1]
            calls = [item for item in (await d.turns(session))[-1].output if isinstance(item, FunctionCallItem)]
            given = [FunctionCallOutputItem(call.call_id, "ok") for call in calls] or "more"
        totals = (await d.ask(SessionUsage("u", session))).totals
        assert totals.turns == 6
        assert totals.prompt == sum(len(d.engine.prompts[turn.id]) for turn in await d.turns(session))
        assert totals.prompt == totals.reused.total + totals.computed
        assert totals.hit_rate == totals.reused.total / totals.prompt

    run(test)


def test_inputs_that_cannot_follow_are_refused(desk: MakeDesk) -> None:
    async def refused(d: Any, session: str, given: Any) -> str:
        with pytest.raises(SessionError) as caught:
            await d.begin(session, given)
        return caught.value.code

    async def test() -> None:
        d = desk()
        session = await d.open(tools=[TOOL])
        for empty in ("", [], [MessageItem("user", "")], [MessageItem("user", [TextPart("")])]):
            assert await refused(d, session, empty) == "bad_request"
        assert await refused(d, session, [FunctionCallOutputItem("call_x", "1")]) == "unknown_call_id"
        assert await refused(d, session, "\ud800") == "bad_request"
        ended = await d.take(session, "go", f"\n</think>\n\n{CALL}\n{CALL}<|im_end|>")
        calls = [item.call_id for item in (await d.turns(session))[0].output if isinstance(item, FunctionCallItem)]
        first, second = [FunctionCallOutputItem(call, "") for call in calls]
        assert await refused(d, session, "and?") == "missing_tool_result"
        with pytest.raises(SessionError, match=f"wait for results: {', '.join(calls)}; give .* or rewind to start"):
            await d.begin(session, "and?")
        assert await refused(d, session, [first]) == "missing_tool_result"
        assert await refused(d, session, [first, MessageItem("user", "x")]) == "missing_tool_result"
        assert await refused(d, session, [first, first, second]) == "unknown_call_id"
        assert await refused(d, session, [first, second, FunctionCallOutputItem("call_x", "1")]) == "unknown_call_id"
        assert (await d.record(session)).state == "idle"
        assert (await d.record(session)).head == ended.turn
        assert len(d.engine.generated) == 1
        assert (await d.take(session, [second, first, MessageItem("user", "x")], HI)).status == "completed"
        assert await refused(d, session, [first]) == "unknown_call_id"

    run(test)


def test_what_was_computed_again_is_counted_by_itself(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        d.engine.recomputed = 7
        usage = (await d.take(await d.open(), "go", HI)).usage
        assert (usage.recomputed, usage.prompt) == (7, usage.reused.total + usage.computed)

    run(test)


def test_one_turn_at_a_time(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open()
        d.script("a", pause=True)
        turn = await d.begin(session, "b")
        with pytest.raises(SessionError, match="takes one at a time") as caught:
            await d.begin(session, "c")
        assert caught.value.code == "session_busy"
        [record] = await d.turns(session)
        assert (record.id, record.status, record.reason) == (turn, "running", None)
        record = await d.record(session)
        assert (record.state, record.running) == ("running", turn)
        await d.ask(TurnCancel("x", turn))
        assert (await d.record(session)).running is None
        # A long input is tokenised off the loop, and meanwhile the session is as busy.
        d.script(HI)
        long = asyncio.create_task(d.begin(session, "a " * 9_000))
        await asyncio.sleep(0)
        with pytest.raises(SessionError, match="takes one at a time"):
            await d.begin(session, "c")
        with pytest.raises(SessionError, match="maximum context length is 4096"):
            await long
        long = asyncio.create_task(d.begin(session, "a " * 9_000))
        await asyncio.sleep(0)
        other = await d.fork(session)
        await d.ask(SessionClose("x", session))
        with pytest.raises(SessionError, match="there is no session"):
            await long
        assert (await d.take(other, "c")).status == "completed"

    run(test)


def test_drop_goes_back_to_the_first_answer_since_the_last_user_message(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open(tools=[TOOL], reasoning="drop")
        first = await d.take(session, "a", f"r\n</think>\n\n{CALL}<|im_end|>")
        [record] = await d.turns(session)
        call = record.output[-1]
        assert isinstance(call, FunctionCallItem)
        second = await d.take(session, [FunctionCallOutputItem(call.call_id, "ok")], "q\n</think>\n\nHi<|im_end|>")
        assert (d.engine.generated[-1].parent, d.engine.generated[-1].keep) == (first.turn, None)
        third = await d.take(session, "b", HI)
        command = d.engine.generated[-1]
        assert command.parent == first.turn
        generation = len(d.tokenizer.encode_control("<|im_start|>assistant\n<think>\n"))
        assert command.keep == len(d.engine.prompts[first.turn]) - generation
        assert command.keep in d.engine.generated[0].marks
        started = d.of(third.turn)[0]
        assert isinstance(started, TurnStarted)
        assert (started.parent, started.miss_reason) == (second.turn, "reasoning_dropped")
        text = d.tokenizer.decode(d.engine.prompts[third.turn])
        assert text.count("<think>") == 1
        assert CALL in text
        fourth = await d.take(session, "c", HI)
        assert d.engine.generated[-1].parent == third.turn
        assert fourth.status == "completed"

    run(test)


def test_sampling_reaches_the_engine(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open(sampling=Sampling(temperature=0.3, seed=5))
        await d.take(session, "a", HI, sampling=Sampling(temperature=0.0, max_tokens=50))
        params = d.engine.generated[-1].sampling
        assert (params.temperature, params.seed, params.max_tokens, params.ignore_eos) == (0.0, 5, 50, False)
        assert params.stop_token_ids == ()
        with pytest.raises(SessionError, match="top_p is 2"):
            await d.begin(session, "b", sampling=Sampling(top_p=2.0))
        with pytest.raises(SessionError, match="top_k is -1"):
            await d.open(sampling=Sampling(top_k=-1))

    run(test)


def test_the_formats_end_of_turn_ends_turns_whatever_the_checkpoint_lists(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        d = desk()
        info = d.engine.info
        info.eos_token_ids = [3063]
        monkeypatch.setattr(type(d.engine), "info", info)
        d = desk()
        session = await d.open()
        ended = await d.take(session, "a", "\n</think>\n\nHi<|im_end|>more")
        assert ended.reason == "stop"
        assert (await d.turns(session))[0].output[-1].text == "Hi"  # type: ignore[union-attr]
        d.script(HI)
        await d.begin(session, "b", sampling=Sampling(ignore_eos=True))
        assert d.engine.generated[-1].sampling.stop_token_ids == ()

    run(test)
