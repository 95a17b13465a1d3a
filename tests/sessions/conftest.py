"""A test-only engine that emits given token ids and keeps the border's contract, and a small model directory."""

from __future__ import annotations

import asyncio
import shutil
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import tokenspeed.pocket
from tokenspeed.client.protocol.commands import (
    Command,
    SessionFork,
    SessionGet,
    SessionOpen,
    SessionRegenerate,
    SessionRewind,
    SessionTurns,
    TurnCreate,
)
from tokenspeed.client.protocol.events import Reply, SessionRecord, TurnEnded, TurnEvent, TurnRecord, TurnStarted
from tokenspeed.client.protocol.items import InputItem
from tokenspeed.engine.client import EngineGone
from tokenspeed.engine.messages import (
    Cancel,
    Ended,
    EngineEvent,
    EngineInfo,
    EngineStats,
    Generate,
    Rejected,
    Started,
    Tokens,
    TurnTimings,
    TurnUsage,
)
from tokenspeed.engine.vocabulary import token_bytes
from tokenspeed.scheduler.stopping import StopStrings
from tokenspeed.sessions.formats.qwen import QwenFormat
from tokenspeed.sessions.formats.template import ChatTemplate
from tokenspeed.sessions.host import SessionHost
from tokenspeed.sessions.journal.journal import Journal
from tokenspeed.sessions.tokenizer import ChatTokenizer

POCKET = Path(tokenspeed.pocket.__file__).parent
bytes_of_tokens = cache(token_bytes)
PAUSE = -1  # in a script: wait here until the turn is cancelled


class ScriptedEngine:
    """An `EngineClient` whose sampler reads from `scripts`: one list of ids per turn, in order of submission."""

    def __init__(self, max_context: int = 4096, chunk: int = 1) -> None:
        self.max_context = max_context
        self.chunk = chunk
        self.scripts: list[list[int]] = []
        self.lineages: dict[str, tuple[str, list[int]]] = {}
        self.generated: list[Generate] = []
        self.prompts: dict[str, list[int]] = {}
        self.released: list[str] = []
        self.evicted: set[str] = set()
        self.standing: Counter[str] = Counter()
        self.cancelled: dict[str, Cancel] = {}
        self.fail_next = ""
        self.recomputed = 0
        self.dead = False
        self._wakes: dict[str, asyncio.Event] = {}

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            model="scripted",
            vocab_size=3072,
            max_context=self.max_context,
            eos_token_ids=[3065, 3063],
            device="cpu",
            dtype="float32",
            operators={},
        )

    def generate(self, command: Generate) -> AsyncIterator[EngineEvent]:
        self.generated.append(command)
        wake = self._wakes[command.turn] = asyncio.Event()
        fresh = array("i")
        fresh.frombytes(command.tokens)
        if command.parent is not None and command.parent not in self.lineages:
            return self._reject(command, "unknown_lineage")
        tenant, before = self.lineages[command.parent] if command.parent else (command.tenant, [])
        assert tenant == command.tenant
        keep = len(before) if command.keep is None else command.keep
        assert keep <= len(before)
        prompt = before[:keep] + list(fresh)
        assert list(command.marks) == sorted(set(command.marks))
        assert all(0 < mark <= len(prompt) for mark in command.marks)
        self.prompts[command.turn] = prompt
        if len(prompt) >= self.max_context:
            return self._reject(command, "context_length_exceeded")
        reused = min(keep, self._kept(command.parent))
        if not command.sample:
            return self._warm(command, prompt, reused)
        return self._run(command, prompt, reused, wake, self.scripts.pop(0))

    def _kept(self, turn: str | None) -> int:
        """The last sampled token has not been through the model."""
        if turn not in self.lineages or turn in self.evicted:
            return 0
        ids = self.lineages[turn][1]
        return len(ids) - (len(ids) > len(self.prompts[turn]))

    async def _warm(self, command: Generate, prompt: list[int], reused: int) -> AsyncIterator[EngineEvent]:
        await asyncio.sleep(0)
        yield Started(command.turn, len(prompt), reused, len(prompt) - reused)
        self.lineages[command.turn] = (command.tenant, prompt)
        room = self.max_context - len(prompt)
        usage = TurnUsage(len(prompt), reused, len(prompt) - reused, 0, 0, room)
        yield Ended(command.turn, "warmed", usage, TurnTimings())

    async def _reject(self, command: Generate, code: str) -> AsyncIterator[EngineEvent]:
        await asyncio.sleep(0)
        yield Rejected(command.turn, code, f"{code} of {command.parent}")  # type: ignore[arg-type]

    async def _run(
        self, command: Generate, prompt: list[int], reused: int, wake: asyncio.Event, script: list[int]
    ) -> AsyncIterator[EngineEvent]:
        turn, sampling = command.turn, command.sampling
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self.info.eos_token_ids))
        await asyncio.sleep(0)
        if self.dead:
            raise EngineGone("the engine is gone")
        yield Started(turn, len(prompt), reused, len(prompt) - reused)
        output: list[int] = []
        unsent: list[int] = []
        reason = "context_length"
        stopping, found = StopStrings(sampling.stop, bytes_of_tokens(POCKET)), None
        for token in [*script, PAUSE]:
            if token == PAUSE:
                if unsent:
                    yield self._tokens(command, unsent)
                    unsent = []
                await wake.wait()
            await asyncio.sleep(0)
            if self.dead:
                raise EngineGone("the engine is gone")
            if turn in self.cancelled:
                reason = "cancelled"
                break
            output.append(token)
            unsent.append(token)
            if len(unsent) == self.chunk:
                yield self._tokens(command, unsent)
                unsent = []
            found = stopping.after(token)
            if token in stops or found is not None:
                reason = "stop"
            elif len(output) == sampling.max_tokens:
                reason = "length"
            elif len(prompt) + len(output) < self.max_context:
                continue
            break
        if unsent:
            yield self._tokens(command, unsent)
        usage = TurnUsage(
            len(prompt),
            reused,
            len(prompt) - reused,
            len(output),
            self.recomputed,
            self.max_context - len(prompt) - len(output),
        )
        if self.fail_next:
            message, self.fail_next = self.fail_next, ""
            yield Ended(turn, "error", usage, TurnTimings(), message)
            return
        if reason != "cancelled" or self.cancelled[turn].keep == "partial":
            self.lineages[turn] = (command.tenant, prompt + output)
        yield Ended(turn, reason, usage, TurnTimings(), stop_string=found)  # type: ignore[arg-type]

    def _tokens(self, command: Generate, tokens: list[int]) -> Tokens:
        if not command.sampling.logprobs:
            return Tokens(command.turn, tokens)
        tops = [[(token, -0.25 * token), (0, -9.0)][: command.sampling.top_logprobs] for token in tokens]
        return Tokens(command.turn, tokens, [-0.25 * token for token in tokens], tops)

    def cancel(self, command: Cancel) -> None:
        self.cancelled[command.turn] = command
        self._wakes[command.turn].set()

    async def residency(self, turns: list[str]) -> list[int]:
        if self.dead:
            raise EngineGone("the engine is gone")
        return [self._kept(turn) for turn in turns]

    def stand(self, on: str | None, off: str | None) -> None:
        self.standing.update([on] if on else [])
        self.standing.subtract([off] if off else [])

    def release(self, turns: list[str]) -> None:
        for turn in turns:
            self.released.append(turn)
            self.lineages.pop(turn, None)

    def forget(self) -> None:
        """As after a restart: no lineage is known."""
        self.lineages.clear()

    def die(self) -> None:
        self.dead = True
        for wake in self._wakes.values():
            wake.set()

    async def stats(self) -> EngineStats:
        raise NotImplementedError

    async def close(self) -> None:
        pass


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model's tokenizer and template, without weights."""
    directory = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(POCKET / name, directory / name)
    return directory


@pytest.fixture(scope="session")
def tokenizer(directory: Path) -> ChatTokenizer:
    return ChatTokenizer(directory)


@pytest.fixture(scope="session")
def template(directory: Path) -> ChatTemplate:
    return ChatTemplate.load(directory)


@pytest.fixture(scope="session")
def chat_format(template: ChatTemplate, tokenizer: ChatTokenizer) -> QwenFormat:
    return QwenFormat(template, tokenizer)


class Desk:
    """A host over a scripted engine, and what a test does with it."""

    def __init__(
        self, directory: Path, tokenizer: ChatTokenizer, engine: ScriptedEngine, journal: Journal | None = None
    ) -> None:
        self.engine = engine
        self.directory = directory
        self.host = SessionHost(engine, directory, journal=journal)
        self.tokenizer = tokenizer
        self.tenant = "t"
        self.events: list[TurnEvent] = []
        self._reader: asyncio.Task[None] | None = None
        self._ended: dict[str, asyncio.Event] = {}

    async def restart(self, journal: Journal | None) -> None:
        """As if host and engine had ended and begun anew, on what `journal` holds."""
        await self.host.close()
        self.engine.forget()
        self._reader = None
        self.host = SessionHost(self.engine, self.directory, journal=journal)

    async def ask(self, command: Command, tenant: str | None = None, channel: str = "c") -> Reply:
        return await self.host.request(tenant or self.tenant, command, channel)

    async def open(self, **fields: Any) -> str:
        reply = await self.ask(SessionOpen("o", **fields))
        assert reply.session is not None
        return reply.session.id

    def script(self, text: str, *, pause: bool = False) -> None:
        """The next turn's output; control tokens in `text` are such. `pause`: then wait for a cancel."""
        self.engine.scripts.append([*self.tokenizer.encode_control(text), *([PAUSE] if pause else [])])

    async def begin(self, session: str, given: str | list[InputItem], **fields: Any) -> str:
        """Create a turn. Its events are read from now on."""
        self.read()
        reply = await self.ask(TurnCreate("q", session, given, **fields))
        assert reply.turn is not None
        return reply.turn

    def read(self) -> None:
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())

    async def take(
        self, session: str, given: str | list[InputItem], output: str | None = None, **fields: Any
    ) -> TurnEnded:
        """A turn from its creation to its end; `output` is scripted for it."""
        if output is not None:
            self.script(output)
        return await self.end(await self.begin(session, given, **fields))

    async def again(self, session: str, output: str = "\n</think>\n\nHi<|im_end|>", **fields: Any) -> TurnEnded:
        """Another answer to a turn's input, from its request to its end."""
        self.script(output)
        self.read()
        turn = (await self.ask(SessionRegenerate("r", session, **fields))).turn
        assert turn is not None
        return await self.end(turn)

    def started(self, turn: str) -> TurnStarted:
        first = self.of(turn)[0]
        assert isinstance(first, TurnStarted)
        return first

    async def end(self, turn: str) -> TurnEnded:
        await asyncio.wait_for(self._ended.setdefault(turn, asyncio.Event()).wait(), 10)
        event = self.of(turn)[-1]
        assert isinstance(event, TurnEnded)
        return event

    async def fork(self, session: str, at: str | None = None) -> str:
        reply = await self.ask(SessionFork("f", session, at))
        assert reply.sessions is not None
        return reply.sessions[0].id

    async def rewind(self, session: str, to: str) -> Reply:
        return await self.ask(SessionRewind("r", session, to))

    async def streamed(self, turn: str, count: int) -> None:
        """Until `count` events of a turn have come."""
        while len(self.of(turn)) < count:
            await asyncio.sleep(0)

    def of(self, turn: str) -> list[TurnEvent]:
        return [event for event in self.events if event.turn == turn]

    async def record(self, session: str) -> SessionRecord:
        reply = await self.ask(SessionGet("g", session))
        assert reply.session is not None
        return reply.session

    async def turns(self, session: str) -> list[TurnRecord]:
        reply = await self.ask(SessionTurns("t", session))
        assert reply.turns is not None
        return reply.turns

    async def _read(self) -> None:
        async for event in self.host.events("c"):
            self.events.append(event)
            if isinstance(event, TurnEnded):
                self._ended.setdefault(event.turn, asyncio.Event()).set()


@pytest.fixture
def desk(directory: Path, tokenizer: ChatTokenizer) -> Callable[..., Desk]:
    """Makes a desk over a scripted engine, `desk(max_context=…, chunk=…)`, or over another, `desk(engine=…)`."""

    def make(engine: Any = None, directory: Path = directory, journal: Journal | None = None, **options: Any) -> Desk:
        return Desk(directory, tokenizer, engine or ScriptedEngine(**options), journal)

    return make
