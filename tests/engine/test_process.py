"""The engine in its own process."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from tokenspeed import Engine
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.client import EngineGone
from tokenspeed.engine.messages import Cancel, Ended, EngineEvent, Generate, Rejected, Tokens
from tokenspeed.engine.process import EngineStartError, ProcessEngine

PROMPT = list(range(2, 40))


def turn(name: str, tokens: list[int], most: int, parent: str | None = None) -> Generate:
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    return Generate(name, "t", np.asarray(tokens, "<i4").tobytes(), params, parent)


async def collect(events: AsyncIterator[EngineEvent]) -> tuple[list[int], EngineEvent]:
    tokens: list[int] = []
    last: EngineEvent | None = None
    async for event in events:
        if isinstance(event, Tokens):
            tokens += event.tokens
        last = event
    assert last is not None
    return tokens, last


def with_engine(tiny: Path, use: Callable[[ProcessEngine], Awaitable[None]]) -> None:
    async def scenario() -> None:
        engine = await ProcessEngine.start(EngineConfig(model=str(tiny), dtype="float64", threads=1))
        try:
            await asyncio.wait_for(use(engine), 60)
        finally:
            await engine.close()
        assert not Path(f"/proc/{engine.pid}").exists()
        assert not engine.alive

    asyncio.run(scenario())


def test_turns_are_those_of_the_engine_in_process(tiny: Path) -> None:
    expected = Engine(tiny, dtype="float64").generate(
        PROMPT, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    )

    async def use(engine: ProcessEngine) -> None:
        both = await asyncio.gather(
            collect(engine.generate(turn("a", PROMPT, 9))), collect(engine.generate(turn("b", PROMPT[:5], 9)))
        )
        assert both[0][0] == expected.token_ids
        _, last = await collect(engine.generate(turn("c", [5], 1, parent="a")))
        assert isinstance(last, Ended)
        assert last.usage.computed == 2
        stats = await engine.stats()
        assert stats.embedded == stats.computed + stats.decoded > 0
        assert stats.running == stats.queued == 0

    with_engine(tiny, use)


def test_cancel_and_release_reach_it(tiny: Path) -> None:
    async def use(engine: ProcessEngine) -> None:
        seen = 0
        async for event in engine.generate(turn("a", PROMPT, 3000)):
            seen += isinstance(event, Tokens)
            if seen == 3:
                engine.cancel(Cancel("a"))
        assert isinstance(event, Ended)
        assert event.reason == "cancelled"
        engine.release(["a"])
        _, last = await collect(engine.generate(turn("b", [5], 1, parent="a")))
        assert isinstance(last, Rejected)
        assert last.code == "unknown_lineage"

    with_engine(tiny, use)


def test_turns_fail_when_the_process_dies_and_it_comes_back(tiny: Path) -> None:
    async def use(engine: ProcessEngine) -> None:
        first, _ = await collect(engine.generate(turn("a", PROMPT, 5)))
        for life in range(2):
            before = engine.pid
            events = engine.generate(turn(f"b{life}", PROMPT, 3000))
            await anext(events)
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineGone):
                await collect(events)
            with pytest.raises(EngineGone):
                await collect(engine.generate(turn(f"c{life}", PROMPT, 3)))
            with pytest.raises(EngineGone):
                await engine.stats()
            assert engine.alive
            while engine.restarts == life:
                await asyncio.sleep(0.05)
            assert engine.pid != before
            _, last = await collect(engine.generate(turn(f"d{life}", [5], 1, parent="a")))
            assert isinstance(last, Rejected)
            assert last.code == "unknown_lineage"
            again, _ = await collect(engine.generate(turn(f"e{life}", PROMPT, 5)))
            assert again == first

    with_engine(tiny, use)


def test_a_death_while_it_is_started_again_is_one_more_try(tiny: Path) -> None:
    async def use(engine: ProcessEngine) -> None:
        first = engine.pid
        os.kill(first, signal.SIGKILL)
        while engine.pid == first:
            await asyncio.sleep(0.01)
        os.kill(engine.pid, signal.SIGKILL)  # before it has connected
        while engine.restarts == 0:
            assert engine.alive
            await asyncio.sleep(0.05)
        tokens, _ = await collect(engine.generate(turn("a", PROMPT, 3)))
        assert len(tokens) == 3

    with_engine(tiny, use)


def test_an_engine_that_cannot_come_back_stays_down(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model)

    async def use(engine: ProcessEngine) -> None:
        (model / "config.json").unlink()
        os.kill(engine.pid, signal.SIGKILL)
        while engine.alive:
            await asyncio.sleep(0.05)
        with pytest.raises(EngineGone):
            await collect(engine.generate(turn("a", PROMPT, 3)))

    with_engine(model, use)


def test_residency_is_the_length_whose_state_is_kept(tiny: Path) -> None:
    async def use(engine: ProcessEngine) -> None:
        await collect(engine.generate(turn("a", PROMPT, 5)))
        await collect(engine.generate(turn("b", [5, 6], 4, parent="a")))
        assert await engine.residency(["a", "b", "nothing"]) == [len(PROMPT) + 4, len(PROMPT) + 5 + 2 + 3, 0]

    with_engine(tiny, use)


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    async def start(model: str) -> None:
        await ProcessEngine.start(EngineConfig(model=model))

    with pytest.raises(EngineStartError, match=r"config\.json") as bad:
        asyncio.run(start(str(tmp_path)))
    assert bad.value.code == "bad_config"
    with pytest.raises(EngineStartError, match="no such directory") as missing:
        asyncio.run(start(str(tmp_path / "nothing" / "here")))
    assert missing.value.code == "model_not_found"


@pytest.mark.parametrize("ready", [True, False])
def test_the_process_ends_with_its_parent(tiny: Path, ready: bool) -> None:
    """A parent that is killed leaves no engine behind, not even one that is just starting."""
    script = f"""
import asyncio
from tokenspeed.config.engine import EngineConfig
from tokenspeed.engine.process import ProcessEngine, WorkerProcess
async def main():
    if {ready}:
        print((await ProcessEngine.start(EngineConfig(model={str(tiny)!r}))).pid, flush=True)
    else:
        print((await WorkerProcess.launch()).process.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""

    async def scenario() -> None:
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
        assert parent.stdout is not None
        pid = int(await parent.stdout.readline())
        parent.kill()
        await parent.wait()
        for _ in range(100):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return
            await asyncio.sleep(0.1)
        raise AssertionError("the engine outlived its parent")

    asyncio.run(scenario())
