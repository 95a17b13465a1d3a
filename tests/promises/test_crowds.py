"""Many sessions at once, long ones, and an engine that dies: each still gets its own, exact answers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

import tokenspeed.pocket
from tokenspeed import AsyncClient, Client, SessionError
from tokenspeed.cli.running import BackgroundServer
from tokenspeed.client import Session, Turn
from tokenspeed.config.engine import EngineConfig

Open = Callable[..., Session]

CODEWORDS = [f"{number:04d}" for number in random.Random(5).sample(range(1000, 10000), 16)]


def conversation(codeword: str) -> list[str]:
    return [f"My door code is {codeword}.", "Hello!", "What is my door code?"]


async def interleaved(url: str, count: int) -> list[list[str]]:
    """`count` sessions with a codeword each, their turns side by side, a fork in every one."""
    async with AsyncClient(url) as client:

        async def one(number: int) -> list[str]:
            async with client.session(temperature=0.0, max_tokens=30) as session:
                answers = []
                first, *others = conversation(CODEWORDS[number])
                answers.append((await session.turn(first)).text)
                branch = await session.fork()
                for text in others:
                    answers.append((await session.turn(text)).text)
                answers.append((await branch.turn(others[-1])).text)
                await branch.close()
                return answers

        return list(await asyncio.gather(*(one(number) for number in range(count))))


def test_no_session_sees_another_at_any_number() -> None:
    """With a cache so small that sessions evict each other, answers are the same for 1 and for 16 at once."""
    config = EngineConfig(
        model=str(tokenspeed.pocket.DIRECTORY), dtype="float64", threads=1, pages=80, rows=24, max_context=1024
    )
    with BackgroundServer(config) as server:
        alone: list[list[str]] = []
        for count in (1, 2, 3, 4, 8, 16):
            answers = asyncio.run(interleaved(server.started.url, count))
            alone += answers[len(alone) :] if count == 1 else []
            for number, said in enumerate(answers):
                foreign = set(CODEWORDS) - {CODEWORDS[number]}
                assert not any(word in text for word in foreign for text in said)
            assert answers[: len(alone)] == alone
            alone = answers


def test_a_session_grows_to_the_models_limit(world: Any) -> None:
    """computed ≤ new + 1 on every turn; then one too many is a clear error, and the session goes on after a rewind."""
    rng = random.Random(3)
    config = EngineConfig(
        model=str(tokenspeed.pocket.DIRECTORY), threads=1, max_context=2048, forced_tokens=True, cache_bytes=64 << 20
    )
    with (
        BackgroundServer(config) as server,
        Client(server.started.url) as client,
        client.session(temperature=0.0) as session,
    ):
        turns: list[Turn] = []
        known = 0
        while True:
            room = 2048 - known
            words = rng.randrange(1, 300)
            if words + 40 > room:
                break
            turn = session.turn("a " * (words // 2), max_tokens=rng.randrange(1, 9))
            assert turn.usage.computed <= turn.usage.prompt - known + bool(turns)
            known = turn.usage.prompt + turn.usage.output
            assert turn.usage.remaining == 2048 - known
            turns.append(turn)
        # A digit is a token; how many a message adds around its digits is learned on a fork. Then the edge is met.
        with session.fork() as probe:
            room = 2048 - (probe.turn("7", max_tokens=1).usage.prompt - 1)
        with session.fork() as branch:
            last = branch.turn("7" * (room - 1), ignore_eos=True)
            assert (last.usage.prompt, last.usage.output, last.reason) == (2047, 1, "context_length")
        for over in (0, 1):
            with (
                session.fork() as branch,
                pytest.raises(SessionError, match="maximum context length is 2048") as full,
            ):
                branch.turn("7" * (room + over))
            assert full.value.detail == {"limit": 2048, "prompt": 2048 + over}
        session.rewind(turns[-2])
        assert session.turn("Hello!", max_tokens=4).usage.computed < 60


def test_sessions_outlive_the_engines_process() -> None:
    config = EngineConfig(model=str(tokenspeed.pocket.DIRECTORY), dtype="float64", threads=1, cache_bytes=64 << 20)
    with BackgroundServer(config) as server, Client(server.started.url) as client:
        kept = [client.session(temperature=0.0, max_tokens=30) for _ in range(3)]
        for session, codeword in zip(kept, CODEWORDS, strict=False):
            session.turn(f"My door code is {codeword}.")
        forks = [session.fork() for session in kept]
        expected = [fork.turn("What is my door code?").text for fork in forks]
        for life in range(2):
            stream = kept[0].turn("Count to a hundred.", stream=True, ignore_eos=True, max_tokens=2000)
            next(stream)
            os.kill(engine_pid(), signal.SIGKILL)
            with pytest.raises(SessionError) as died:
                stream.result()
            assert died.value.code == "engine_restarted", life
            assert died.value.retry == "replay"
            answers = []
            for session in kept:
                fork = session.fork()
                answers.append(retried(fork, "What is my door code?"))
            assert answers == expected


def retried(session: Session, text: str) -> str:
    """A turn, again while the engine comes back."""
    for _ in range(100):
        try:
            return session.turn(text).text
        except SessionError as error:
            if error.code != "engine_restarted":
                raise
            time.sleep(0.2)
    raise AssertionError("the engine did not come back")


def engine_pid() -> int:
    """The engine started last by this process."""
    own = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat, open(f"/proc/{entry}/cmdline") as command:
                    parent = int(stat.read().rsplit(")", 1)[1].split()[1])
                    if parent == os.getpid() and "tokenspeed.engine.worker" in command.read():
                        own.append(int(entry))
            except OSError:
                continue
    return max(own)
