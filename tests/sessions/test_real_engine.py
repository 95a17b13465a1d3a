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

from tokenspeed.client.protocol.commands import Sampling, SessionFork, TurnCancel
from tokenspeed.client.protocol.events import TurnStarted
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
        config = EngineConfig(model=str(checkpoint), dtype="float64", threads=1, max_context=2048)
        engine = await ProcessEngine.start(config)
        try:
            fresh = Engine(str(checkpoint), dtype="float64", threads=1, max_context=2048, prefix_cache=False)
            await turns_cost_only_their_new_tokens(desk(engine=engine), fresh)
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
