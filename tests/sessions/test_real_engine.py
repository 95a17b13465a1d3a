"""The host over the engine in its own process: a random model, whose rubbish ends turns in every way."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.client.protocol.commands import (
    Sampling,
    SessionFork,
    SessionRegenerate,
    SessionUpdate,
    TurnCancel,
    TurnCreate,
)
from tokenspeed.client.protocol.events import TurnDelta, TurnStarted
from tokenspeed.client.protocol.items import FunctionCallItem, FunctionCallOutputItem, FunctionTool, InputItem
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.process import ProcessEngine
from tokenspeed.models.random_weights import tiny_checkpoint

TOOL = FunctionTool("f", parameters={"properties": {"s": {"type": "string"}}})
MakeDesk = Callable[..., Any]


@pytest.fixture(scope="module")
def checkpoint(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), vocab_size=3072, eos_token_id=3065, max_position_embeddings=2048
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(directory / name, home / name)
    return home


def answers(session_turns: list[Any]) -> str | list[InputItem]:
    """What may follow the last turn."""
    last = session_turns[-1] if session_turns else None
    if last is not None and last.reason == "tool_calls":
        calls = [item for item in last.output if isinstance(item, FunctionCallItem)]
        return [FunctionCallOutputItem(call.call_id, "ok") for call in calls]
    return f"question {len(session_turns)}"


def test_sessions_over_a_real_engine(desk: MakeDesk, checkpoint: Path) -> None:
    async def scenario() -> None:
        config = EngineConfig(
            model=str(checkpoint),
            dtype="float64",
            threads=1,
            max_context=2048,
            forced_tokens=True,
            prefill_chunk=64,
        )
        engine = await ProcessEngine.start(config)
        try:
            fresh = Engine(str(checkpoint), dtype="float64", threads=1, max_context=2048, prefix_cache=False)
            await turns_cost_only_their_new_tokens(desk(engine=engine), fresh)
            await branches_cost_what_they_say(desk(engine=engine), fresh)
            await stop_strings_and_logprobs(desk(engine=engine))
            await cancels_in_prefill(desk(engine=engine))
            await forks_cancels_and_a_dead_engine(desk(engine=engine), engine)
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 120))


async def turns_cost_only_their_new_tokens(d: Any, fresh: Engine) -> None:
    """Greedy turns of both rules say what a fresh engine says to the whole prompt, and compute only what is new."""
    before = await d.engine.stats()
    computed = 0
    for rule in ("keep", "drop"):
        session = await d.open(instructions="Be brief.", tools=[TOOL], reasoning=rule)
        for number in range(4):
            parent = d.host._book._sessions[session].head
            given = answers(await d.turns(session))
            ended = await d.take(session, given, sampling=Sampling(temperature=0.0, max_tokens=5 + number))
            assert ended.status in ("completed", "incomplete")
            turn = d.host._book._sessions[session].head
            prompt, output = list(turn.prompt.ids()), list(turn.output_ids)
            assert ended.usage.prompt == len(prompt) == ended.usage.reused.total + ended.usage.computed
            if rule == "keep" and parent is not None:
                assert prompt[: parent.length] == list(parent.ids())
                assert ended.usage.computed <= len(prompt) - parent.length + 1
            started = d.of(ended.turn)[0]
            assert isinstance(started, TurnStarted)
            if rule == "drop" and parent is not None:
                # Back to the input's end of the turn before, whose checkpoint was marked.
                assert turn.prompt.base is parent
                assert ended.usage.reused.total == turn.prompt.keep == parent.prompt.input_end
                assert started.miss_reason == "reasoning_dropped"
            expected = fresh.generate(prompt, SamplingParams(temperature=0.0, max_tokens=5 + number))
            assert output == expected.token_ids
            computed += ended.usage.computed
    after = await d.engine.stats()
    assert after.computed - before.computed == computed


def forced(d: Any, text: str, **options: Any) -> Sampling:
    """The model's output begins with `text`."""
    ids = list(d.tokenizer.encode_control(text))
    return Sampling(temperature=0.0, forced_token_ids=ids, max_tokens=len(ids) + 3, **options)


async def branches_cost_what_they_say(d: Any, fresh: Engine) -> None:
    """Regenerate, warm-ups, n answers, updates: the ids of a fresh engine, and the announced number of tokens."""
    d.read()
    greedy = Sampling(temperature=0.0, max_tokens=6)
    generation = len(d.tokenizer.encode_control("<|im_start|>assistant\n<think>\n"))
    session = await d.open(instructions="Be brief.", sampling=greedy)

    def check(ended: Any) -> None:
        turn = d.host._book._sessions[ended.session].head
        expected = fresh.generate(list(turn.prompt.ids()), SamplingParams(temperature=0.0, max_tokens=6))
        assert list(turn.output_ids) == expected.token_ids

    first = await d.take(session, "one", sampling=forced(d, "r\n</think>\n\nHi<|im_end|>"))
    await d.take(session, "two", sampling=forced(d, "q\n</think>\n\nHo<|im_end|>"))
    again = await d.end((await d.ask(SessionRegenerate("r", session))).turn)
    assert again.usage.computed == generation
    check(again)
    warm = await d.take(session, "three", generate=False)
    assert (warm.reason, warm.usage.output) == ("warmed", 0)
    record = await d.record(session)
    assert record.rewind_points == [first.turn, again.turn, warm.turn]
    assert record.residency.device == record.tokens
    answered = await d.take(session, "")
    assert answered.usage.computed == generation
    check(answered)
    reply = await d.ask(TurnCreate("q", parent=first.turn, input="four", n=3, sampling=greedy))
    for turn in reply.turn_ids:
        ended = await d.end(turn)
        assert ended.usage.computed <= ended.usage.prompt - len(d.host._book.find_turn("t", first.turn).ids()) + 1
        check(ended)
    reply = await d.ask(SessionUpdate("u", session, instructions="Be long."))
    [cached] = await d.engine.residency([answered.turn])
    assert reply.lost_tokens == cached > 0
    updated = await d.take(session, "five")
    started = d.of(updated.turn)[0]
    assert isinstance(started, TurnStarted)
    assert (started.miss_reason, updated.usage.computed) == ("updated", updated.usage.prompt)
    check(updated)


async def stop_strings_and_logprobs(d: Any) -> None:
    for text, stop, shown in [
        ("a\n</think>\n\nLook 😀 here STOP it", "😀 here ST", ["a", "Look "]),
        ("some thought", "tho", ["some "]),
    ]:
        session = await d.open()
        ended = await d.take(session, "go", sampling=forced(d, text, stop=[stop], logprobs=True, top_logprobs=3))
        assert (ended.status, ended.reason, ended.stop_string) == ("completed", "stop", stop)
        turn = d.host._book._sessions[session].head
        assert [item.text for item in turn.output] == shown
        assert stop in d.tokenizer.decode(turn.output_ids)
        assert stop not in d.tokenizer.decode(turn.output_ids[:-1])
        deltas = [event for event in d.of(ended.turn) if isinstance(event, TurnDelta)]
        found = [entry for delta in deltas for entry in delta.logprobs or []] + (ended.logprobs or [])
        assert [entry.id for entry in found] == list(turn.output_ids)
        assert all(len(entry.top) == 3 and entry.logprob <= entry.top[0][1] for entry in found)
        assert (await d.take(session, "on", sampling=forced(d, "\n</think>\n\nHi<|im_end|>"))).reason == "stop"


async def cancels_in_prefill(d: Any) -> None:
    """What was processed of the prompt is counted, and found by the next turn."""
    session = await d.open()
    turn = await d.begin(session, "word " * 700)
    await d.streamed(turn, 1)
    await d.ask(TurnCancel("x", turn))
    cut = (await d.end(turn)).usage
    processed = cut.reused.total + cut.computed
    assert 0 < processed < cut.prompt
    assert cut.output == 0
    usage = (await d.take(session, "on", sampling=Sampling(max_tokens=1))).usage
    assert usage.reused.total == processed
    assert usage.computed == usage.prompt - processed


async def forks_cancels_and_a_dead_engine(d: Any, engine: ProcessEngine) -> None:
    session = await d.open()
    first = await d.take(session, "q", sampling=Sampling(seed=1, max_tokens=20))
    forks = [fork.id for fork in (await d.ask(SessionFork("f", session, n=2))).sessions]
    # The same seed says the same on both, side by side; a random model's control tokens end turns in many ways.
    for seed in range(6):
        options = {"sampling": Sampling(seed=seed, max_tokens=40, temperature=2.0)}
        given = [answers(await d.turns(fork)) for fork in forks]
        ends = await asyncio.gather(*[d.take(fork, text, **options) for fork, text in zip(forks, given, strict=True)])
        assert [end.status in ("completed", "incomplete") for end in ends] == [True, True]
        assert ends[0].reason == ends[1].reason
        texts = [[getattr(item, "text", "") for item in (await d.turns(fork))[-1].output] for fork in forks]
        assert texts[0] == texts[1]
    for keep, phase in (("partial", 0), ("nothing", 3), ("partial", 5)):
        head = (await d.record(session)).head
        turn = await d.begin(session, "more", sampling=Sampling(ignore_eos=True, max_tokens=500, seed=phase))
        await d.streamed(turn, phase)
        reply = await d.ask(TurnCancel("x", turn, keep))
        assert reply.head == (turn if keep == "partial" else head)
        assert (await d.end(turn)).usage.output < 500
    assert (await d.record(session)).turns == 3
    turn = await d.begin(session, "again", sampling=Sampling(ignore_eos=True, max_tokens=1000))
    await d.streamed(turn, 2)
    os.kill(engine.pid, signal.SIGKILL)
    ended = await d.end(turn)
    assert ended.error is not None
    assert (ended.status, ended.error.code) == ("failed", "engine_restarted")
    assert (await d.record(session)).turns == 3
    assert first.turn in [record.id for record in await d.turns(session)]
