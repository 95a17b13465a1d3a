"""Updates of a session's defaults: what the next prompt becomes, and what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tokenspeed.client.protocol.commands import Sampling, SessionUpdate, TurnCancel, TurnCreate
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.items import FunctionTool, MessageItem

HI = "\n</think>\n\nHi<|im_end|>"
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
@pytest.mark.parametrize("by", ["update", "turn"])
def test_an_update_changes_the_preamble_and_no_id_behind_it(desk: MakeDesk, rule: str, by: str) -> None:
    async def test() -> None:
        d = desk()
        other = FunctionTool("g", "Another")
        session = await d.open(instructions="Old.", tools=[TOOL], reasoning=rule)
        odd = await d.open(instructions="Old.", tools=[other], reasoning=rule)
        for each in (session, odd):
            await d.take(each, "a", "r" + HI)
            await d.take(each, "b", HI)
        old = await d.record(session)
        ids = d.engine.lineages[old.head][1]
        if by == "update":
            reply = await d.ask(SessionUpdate("u", session, tools=[other]))
            assert (reply.session.tools, reply.session.head) == ([other], old.head)
            ended = await d.take(session, "c", HI)
        else:
            d.script(HI)
            d.read()
            reply = await d.ask(TurnCreate("q", session, "c", tools=[other]))
            ended = await d.end(reply.turn)
            assert (await d.record(session)).tools == [other]
        assert reply.lost_tokens == len(ids) - 1
        assert d.started(ended.turn).miss_reason == "updated"
        prompt = d.engine.prompts[ended.turn]
        assert prompt == d.engine.prompts[(await d.take(odd, "c", HI)).turn]
        if rule == "keep":
            assert (
                prompt[(await d.record(session)).prefix_tokens :][: len(ids) - old.prefix_tokens]
                == (ids[old.prefix_tokens :])
            )
        after = await d.take(session, "d", HI)
        assert d.engine.generated[-1].parent == (ended.turn)
        assert d.started(after.turn).miss_reason == (None if rule == "keep" else "reasoning_dropped")
        # The same again is no update.
        assert (await d.ask(SessionUpdate("u", session, tools=[other], instructions="Old."))).lost_tokens == 0
        # Another answer under changed defaults is rendered under them.
        await d.ask(SessionUpdate("u", session, tools=[TOOL]))
        new = await d.again(session)
        assert d.started(new.turn).miss_reason == "updated"
        assert d.tokenizer.decode(d.engine.prompts[new.turn]).count("Another") == 0

    run(test)


def test_what_an_update_has_lost_already_is_not_counted_again(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open(instructions="Old.")
        await d.take(session, "a", "Thought." + HI)
        cached = len(d.engine.lineages[(await d.record(session)).head][1]) - 1

        async def lost(**fields: Any) -> int:
            return (await d.ask(SessionUpdate("u", session, **fields))).lost_tokens  # type: ignore[no-any-return]

        reasoning = await lost(reasoning="drop")
        assert 0 < reasoning < cached
        assert await lost(instructions="New.") == cached - reasoning, "together they lose all there is"
        assert await lost(instructions="Newer.", tools=[TOOL]) == 0
        assert await lost(instructions="Old.", tools=[]) == 0, "what is taken back loses nothing"
        assert await lost(tools=[TOOL]) == cached - reasoning
        d.script(HI)
        d.read()
        reply = await d.ask(TurnCreate("q", session, "b", instructions="Newest."))
        assert reply.lost_tokens == 0
        assert (await d.end(reply.turn)).usage.reused.total == 0

    run(test)


def test_ids_that_the_tokenizer_would_not_choose_survive_an_update(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open(instructions="Old.")
        letters = [token for letter in "hello" for token in d.tokenizer.encode_plain(letter)]
        end = d.tokenizer.added["<|im_end|>"]
        output = [*d.tokenizer.encode_control("\n</think>\n\n"), *letters, end]
        d.engine.scripts.append(output)
        await d.take(session, "a")
        await d.ask(SessionUpdate("u", session, instructions="New."))
        prompt = d.engine.prompts[(await d.take(session, "b", HI)).turn]
        assert any(prompt[start : start + len(output)] == output for start in range(len(prompt)))

    run(test)


def test_a_conversation_with_system_text_of_its_own(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open(tools=[TOOL])
        await d.take(session, [MessageItem("system", "Own."), MessageItem("user", "a")], HI)

        async def text() -> str:
            return d.tokenizer.decode(d.engine.prompts[(await d.take(session, "b", HI)).turn])  # type: ignore[no-any-return]

        assert (await text()).count("Own.") == 1
        await d.ask(SessionUpdate("u", session, tools=[]))
        assert (await text()).startswith("<|im_start|>system\nOwn.<|im_end|>")
        await d.ask(SessionUpdate("u", session, instructions="Given."))
        assert (await text()).startswith("<|im_start|>system\nGiven.<|im_end|>\n<|im_start|>user\na")
        await d.ask(SessionUpdate("u", session, instructions=""))
        assert (await text()).startswith("<|im_start|>system\nOwn.<|im_end|>")

    run(test)


def test_what_else_an_update_changes(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open(reasoning="keep", sampling=Sampling(seed=1, temperature=0.5), labels={"a": "b"})
        await d.take(session, "a", "r" + HI)
        head = d.engine.lineages[(await d.record(session)).head][1]
        d.script("x", pause=True)
        running = await d.begin(session, "b")
        await d.streamed(running, 2)
        for fields in ({"tools": [TOOL]}, {"instructions": "x"}, {"reasoning": "drop"}):
            assert (await refusal(d.ask(SessionUpdate("u", session, **fields)))).code == "session_busy"
        reply = await d.ask(SessionUpdate("u", session, sampling=Sampling(top_k=3), labels={"c": "d"}))
        assert (reply.session.sampling, reply.session.labels) == (Sampling(top_k=3), {"c": "d"})
        assert reply.lost_tokens == 0
        await d.ask(TurnCancel("x", running, "nothing"))
        # Reasoning that the next user message drops is lost back to the input's end.
        generation = len(d.tokenizer.encode_control(GENERATION))
        reply = await d.ask(SessionUpdate("u", session, reasoning="drop"))
        kept = len(d.engine.prompts[(await d.record(session)).head]) - generation
        assert reply.lost_tokens == len(head) - 1 - kept
        after = await d.take(session, "b", HI)
        assert after.usage.reused.total == kept
        assert d.started(after.turn).miss_reason == "reasoning_dropped"
        before = await d.record(session)
        for fields, message in [
            ({"sampling": Sampling(top_k=-1)}, "top_k is -1"),
            ({"tools": [TOOL, TOOL]}, "more than once"),
            ({"instructions": "x " * 5000}, "maximum context length"),
        ]:
            assert message in (await refusal(d.ask(SessionUpdate("u", session, **fields)))).message
        assert await d.record(session) == before
        d.engine.die()
        assert (await d.ask(SessionUpdate("u", session, instructions="x"))).lost_tokens == 0

    run(test)
