"""How turns end: by the model, by limits, by cancels and by failures; and the turn after."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tokenspeed.client.protocol.commands import Sampling, TurnCancel
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import TurnItem, TurnStarted
from tokenspeed.client.protocol.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionTool,
    InputItem,
)
from tokenspeed.engine.messages import Ended, Tokens

TOOL = FunctionTool("f", parameters={"properties": {"s": {"type": "string"}, "i": {"type": "integer"}}})
PARAMETERS = "<parameter=s>\nKöln 😀\n</parameter>\n<parameter=i>\n12\n</parameter>"
CALL = f"<tool_call>\n<function=f>\n{PARAMETERS}\n</function>\n</tool_call>"
HI = "\n</think>\n\nHi<|im_end|>"
MakeDesk = Callable[..., Any]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))  # type: ignore[arg-type]


ENDINGS = [
    (HI, {}, "completed", "stop"),
    (f"\n</think>\n\n{CALL}<|im_end|>", {}, "completed", "tool_calls"),
    (f"\n</think>\n\n{CALL}<|im_end|>", {"max_tokens": 12}, "incomplete", "length"),
    (f"\n</think>\n\n{CALL}\n{CALL}<|im_end|>", {"max_tokens": 60}, "incomplete", "length"),
    ("so much to think about", {"max_tokens": 3}, "incomplete", "length"),
    ("\n</think>\n\nso much to say", {"max_tokens": 6}, "incomplete", "length"),
    ("\n</think>\n\n<tool_call>\nnonsense\n</tool_call><|im_end|>", {}, "incomplete", "parse_error"),
    (f"\n</think>\n\n{CALL}\n<tool_call>\n<function=f>\n<|im_end|>", {}, "incomplete", "parse_error"),
    (f"\n</think>\n\n<tool_call>\nx</tool_call>\n{CALL}<|im_end|>", {}, "completed", "tool_calls"),
    ("just thinking<|im_end|>", {}, "completed", "stop"),
    ("<|im_end|>", {}, "completed", "stop"),
    ("\n</think>\n\nHi<|endoftext|>", {}, "completed", "stop"),
    ("\n</think>\n\nabc", {"stop_token_ids": "c"}, "completed", "stop"),
    ("\n</think>\n\na<|im_end|>b<|im_end|>", {"ignore_eos": True, "max_tokens": 8}, "incomplete", "length"),
]


@pytest.mark.parametrize(("output", "sampling", "status", "reason"), ENDINGS)
def test_endings_are_honest_and_one_more_turn_follows(
    desk: MakeDesk, output: str, sampling: dict[str, Any], status: str, reason: str
) -> None:
    async def test() -> None:
        d = desk()
        if "stop_token_ids" in sampling:
            output_ids = list(d.tokenizer.encode_control(output))
            sampling["stop_token_ids"] = [output_ids[-1]]
        session = await d.open(tools=[TOOL])
        ended = await d.take(session, "go", output, sampling=Sampling(**sampling))
        assert (ended.status, ended.reason, ended.head) == (status, reason, ended.turn)
        [record] = await d.turns(session)
        calls = [item for item in record.output if isinstance(item, FunctionCallItem)]
        if reason == "length" and record.output:
            assert record.output[-1].status == "incomplete"
        for call in calls:
            assert (call.status == "incomplete") == (call.parse_error is not None) == (call.raw is not None)
        given: str | list[InputItem] = "next"
        if reason == "tool_calls":
            given = [FunctionCallOutputItem(call.call_id, "ok") for call in calls]
        sampled = d.engine.lineages[ended.turn][1]
        after = await d.take(session, given, HI)
        assert (after.status, after.reason) == ("completed", "stop")
        prompt = d.engine.prompts[after.turn]
        assert prompt[: len(sampled)] == sampled
        # Every message before the generation prompt is closed, and none is closed twice.
        messages = d.tokenizer.decode(prompt).split("<|im_start|>")[1:-1]
        if not sampling.get("ignore_eos"):
            assert all(message.endswith("<|im_end|>\n") and message.count("<|im_end|>") == 1 for message in messages)
        if "</think>" in output or not output.endswith("<|im_end|>"):
            assert all(message.count("<think>") == message.count("</think>") for message in messages)

    run(test)


def test_a_full_context_ends_the_turn_and_then_refuses_the_next(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk(max_context=60)
        session = await d.open()
        first = await d.take(session, "a", HI)
        ended = await d.take(session, "b", "\n</think>\n\n" + "x " * 100)
        assert (ended.status, ended.reason, ended.usage.remaining) == ("incomplete", "context_length", 0)
        assert (await d.record(session)).remaining == 0
        with pytest.raises(SessionError, match="maximum context length is 60 tokens") as caught:
            await d.begin(session, "c")
        assert caught.value.code == "context_length_exceeded"
        assert str(caught.value.detail["prompt"]) in caught.value.message
        assert caught.value.detail["prompt"] > 60
        assert (await d.record(session)).head == ended.turn
        fork = await d.fork(session, first.turn)
        assert (await d.take(fork, "d", HI)).status == "completed"

    run(test)


def test_the_longest_prompt_that_fits(desk: MakeDesk) -> None:
    """With room for one token it gets one; without any it is refused."""

    async def test() -> None:
        d = desk()
        length = (await d.take(await d.open(), "a", HI)).usage.prompt
        d = desk(max_context=length + 1)
        ended = await d.take(await d.open(), "a", "x y z")
        assert (ended.usage.output, ended.reason, ended.usage.remaining) == (1, "context_length", 0)
        d = desk(max_context=length)
        session = await d.open()
        with pytest.raises(SessionError, match=f"maximum context length is {length} tokens; the prompt has {length}"):
            await d.begin(session, "a")

    run(test)


@pytest.mark.parametrize("keep", ["partial", "nothing"])
@pytest.mark.parametrize("seen", [0, 1, 4])
def test_cancel_in_any_phase(desk: MakeDesk, keep: str, seen: int) -> None:
    """Before the turn was admitted (0), before its first token (1), and while it decodes."""

    async def test() -> None:
        d = desk()
        session = await d.open()
        first = await d.take(session, "a", HI)
        d.script("" if seen == 1 else "one two three four five", pause=True)
        turn = await d.begin(session, "b")
        await d.streamed(turn, seen)
        reply = await d.ask(TurnCancel("x", turn, keep))
        ended = await d.end(turn)
        assert (ended.status, ended.reason) == ("cancelled", "cancelled")
        assert reply.head == ended.head == (turn if keep == "partial" else first.turn)
        assert (await d.record(session)).head == ended.head
        assert (await d.ask(TurnCancel("y", turn))).head == ended.head
        after = await d.take(session, "c", HI)
        assert after.status == "completed"
        base = d.engine.lineages[ended.head][1]
        assert d.engine.prompts[after.turn][: len(base)] == base
        text = d.tokenizer.decode(d.engine.prompts[after.turn])
        assert text.count("<|im_start|>user\nb<|im_end|>") == (keep == "partial")
        assert text.count("\n</think>\n\n") == (2 if keep == "partial" else 1)

    run(test)


def test_the_first_of_two_cancels_counts(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open()
        d.script("a b c", pause=True)
        turn = await d.begin(session, "b")
        await d.streamed(turn, 2)
        replies = await asyncio.gather(d.ask(TurnCancel("x", turn, "partial")), d.ask(TurnCancel("x", turn, "nothing")))
        assert [reply.head for reply in replies] == [turn, turn]

    run(test)


def test_calls_of_a_cancelled_turn_may_be_answered_but_need_not_be(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open(tools=[TOOL])
        d.script(f"\n</think>\n\n{CALL}", pause=True)
        turn = await d.begin(session, "go")
        while not any(isinstance(event, TurnItem) for event in d.of(turn)):
            await asyncio.sleep(0)
        await d.ask(TurnCancel("x", turn))
        [fork] = [await d.fork(session, turn)]
        assert (await d.take(session, "never mind", HI)).status == "completed"
        [record] = await d.turns(fork)
        call = record.output[-1]
        assert isinstance(call, FunctionCallItem)
        assert (await d.take(fork, [FunctionCallOutputItem(call.call_id, "ok")], HI)).status == "completed"

    run(test)


def test_an_engine_that_forgot_gets_the_whole_prompt(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open()
        first = await d.take(session, "a", HI)
        ids = d.engine.lineages[first.turn][1]
        d.engine.forget()
        second = await d.take(session, "b", HI)
        assert second.status == "completed"
        assert d.engine.prompts[second.turn][: len(ids)] == ids
        commands = d.engine.generated[-2:]
        assert [command.parent for command in commands] == [first.turn, None]
        assert commands[0].marks == commands[1].marks
        started = d.of(second.turn)[0]
        assert isinstance(started, TurnStarted)
        assert (started.seq, started.miss_reason, started.reused.total) == (0, "cold", 0)
        third = await d.take(session, "c", HI)
        assert d.engine.generated[-1].parent == second.turn
        assert third.usage.reused.total == len(d.engine.lineages[second.turn][1]) - 1
        d.engine.forget()
        d.engine.scripts.clear()
        turn = await d.begin(session, "d")
        assert (await d.ask(TurnCancel("x", turn))).head == turn
        assert (await d.end(turn)).status == "cancelled"
        assert (await d.take(session, "e", HI)).status == "completed"

    run(test)


def test_a_dead_engine_fails_the_turn_and_loses_nothing(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open()
        first = await d.take(session, "a", HI)
        d.script("a b c", pause=True)
        turn = await d.begin(session, "b")
        await d.streamed(turn, 3)
        d.engine.die()
        ended = await d.end(turn)
        assert (ended.status, ended.reason, ended.head) == ("failed", "error", first.turn)
        assert ended.error is not None
        assert (ended.error.code, ended.error.retry) == ("engine_restarted", "replay")
        d.engine.dead = False
        d.engine.forget()
        after = await d.take(session, "b", HI)
        assert (after.status, after.head) == ("completed", after.turn)
        assert [turn.id for turn in await d.turns(session)] == [first.turn, after.turn]

    run(test)


@pytest.mark.parametrize("kind", ["error", "queue_full", "lying", "silent"])
def test_a_failing_engine_fails_the_turn_with_its_reason(
    desk: MakeDesk, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open()
        if kind == "error":
            d.engine.fail_next = "a NaN in layer 3"
        elif kind == "queue_full":
            monkeypatch.setattr(d.engine, "generate", lambda command: d.engine._reject(command, "queue_full"))
        else:
            lost = Ended if kind == "silent" else Tokens
            monkeypatch.setattr(d.engine, "generate", losing(d.engine.generate, lost))
        ended = await d.take(session, "a", HI)
        assert (ended.status, ended.head) == ("failed", None)
        codes = {"queue_full": "queue_full"}
        assert ended.error.code == codes.get(kind, "engine_error")
        assert {"error": "NaN", "lying": "kept", "silent": "stopped answering"}.get(
            kind, "queue_full"
        ) in ended.error.message
        monkeypatch.undo()
        assert (await d.take(session, "a", HI)).status == "completed"

    def losing(generate: Any, lost: type) -> Any:
        async def filtered(command: Any) -> Any:
            async for event in generate(command):
                if not isinstance(event, lost):
                    yield event

        return filtered

    run(test)
