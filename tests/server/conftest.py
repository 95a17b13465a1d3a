"""A real server on a free loopback port, with a session host whose answers the test scripts."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import pytest

from tokenspeed.client.protocol.commands import (
    Command,
    Sampling,
    SessionClose,
    SessionFork,
    SessionGet,
    SessionList,
    SessionOpen,
    SessionRegenerate,
    SessionRewind,
    SessionTurns,
    SessionUpdate,
    SessionUsage,
    TurnCancel,
    TurnCreate,
    TurnGet,
)
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import (
    ErrorEvent,
    Reply,
    Reused,
    SessionRecord,
    SessionTotals,
    Timings,
    TurnDelta,
    TurnEnded,
    TurnEvent,
    TurnItem,
    TurnRecord,
    TurnStarted,
    Usage,
)
from tokenspeed.client.protocol.items import FunctionCallItem, Item, MessageItem, OutputTextPart, ReasoningItem
from tokenspeed.engine.messages import EngineInfo, EngineStats
from tokenspeed.server.access import ApiKeys
from tokenspeed.server.connection import Limits
from tokenspeed.server.serving import Listener, Server

Script = Callable[[TurnCreate, list[TurnRecord]], list[Item]]


def message(text: str) -> MessageItem:
    return MessageItem("assistant", [OutputTextPart(text)])


def text_of(command: TurnCreate) -> str:
    if isinstance(command.input, str):
        return command.input
    return "; ".join(item.text for item in command.input)


def echo(command: TurnCreate, history: list[TurnRecord]) -> list[Item]:
    return [message(f"You said: {text_of(command)}")]


@dataclass
class Conversation:
    record: SessionRecord
    tenant: str
    turns: list[TurnRecord] = field(default_factory=list)
    running: str | None = None
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedHost:
    """Keeps sessions as a host does; `script` decides what the model says, `pause_s` how slowly it says it."""

    def __init__(self) -> None:
        self.script: Script = echo
        self.pause_s = 0.0
        self.piece_size = 4
        self.reply_delay_s = 0.0
        self.commands: list[Command] = []
        self.delays: dict[type, float] = {}
        self.failures: dict[type, Exception] = {}
        self.conversations: dict[str, Conversation] = {}
        self.closed_channels: list[str] = []
        self._queues: dict[str, asyncio.Queue[TurnEvent]] = {}
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def request(self, tenant: str, command: Command, channel: str) -> Reply:
        self.commands.append(command)
        kind = TurnCreate if isinstance(command, TurnCreate) else type(command)  # what is given is a strict kind of it
        if kind in self.delays:
            await asyncio.sleep(self.delays[kind])
        if kind in self.failures:
            raise self.failures[kind]
        if isinstance(command, SessionOpen):
            return Reply(command.id, session=self._open(tenant, command).record)
        if isinstance(command, SessionList):
            own = [c.record for c in self.conversations.values() if c.tenant == tenant]
            kept = [record for record in own if command.labels.items() <= record.labels.items()]
            if command.after is not None:
                kept = kept[[record.id for record in kept].index(command.after) + 1 :]
            page = kept[: command.limit]
            return Reply(command.id, sessions=page, after=page[-1].id if len(page) < len(kept) else None)
        if isinstance(command, TurnCancel):
            return await self._cancel(command)
        if isinstance(command, TurnGet):
            return Reply(command.id, turns=[self._lineage(tenant, command.turn)[1][-1]])
        if isinstance(command, TurnCreate) and command.session is None:
            return self._branch(tenant, command, channel)
        conversation = self.conversations.get(command.session)
        if conversation is None or conversation.tenant != tenant:
            raise SessionError("session_not_found", f"there is no session {command.session}")
        match command:
            case TurnCreate():
                turn = self._create(conversation, command, channel)
                await asyncio.sleep(self.reply_delay_s)
                return Reply(command.id, turn=turn)
            case SessionRegenerate():
                of = conversation.turns[-1]
                self._rewind(conversation, of.parent or "start")
                again = TurnCreate("", command.session, of.input, command.sampling)
                return Reply(command.id, turn=self._create(conversation, again, channel))
            case SessionUpdate():
                record = conversation.record
                for name in ("instructions", "tools", "sampling", "labels"):
                    if getattr(command, name) is not None:
                        setattr(record, name, getattr(command, name))
                return Reply(command.id, session=record, lost_tokens=None if command.instructions is None else 7)
            case SessionFork():
                fork = self._open(tenant, conversation.record)
                fork.turns = list(conversation.turns)
                fork.record.head = conversation.record.head
                return Reply(command.id, sessions=[fork.record])
            case SessionRewind():
                head = self._rewind(conversation, command.to)
                return Reply(command.id, session=conversation.record, head=head)
            case SessionGet():
                return Reply(command.id, session=conversation.record)
            case SessionTurns():
                return Reply(command.id, turns=conversation.turns)
            case SessionUsage():
                total = sum(turn.usage.prompt for turn in conversation.turns)
                totals = SessionTotals(len(conversation.turns), total, Reused(), total, 0, 0, 0.0)
                return Reply(command.id, totals=totals)
            case SessionClose():
                del self.conversations[command.session]
                return Reply(command.id)

    def _lineage(self, tenant: str, turn: str) -> tuple[Conversation, list[TurnRecord]]:
        for conversation in self.conversations.values():
            ids = [record.id for record in conversation.turns]
            if conversation.tenant == tenant and turn in ids:
                return conversation, conversation.turns[: ids.index(turn) + 1]
        raise SessionError("turn_not_found", f"there is no turn {turn}")

    def _branch(self, tenant: str, command: TurnCreate, channel: str) -> Reply:
        if command.parent is None:
            raise SessionError("bad_request", "a turn needs a session or a parent")
        of, turns = self._lineage(tenant, command.parent)
        branches = [self._open(tenant, of.record) for _ in range(command.n)]
        begun = []
        for branch in branches:
            branch.turns, branch.record.head = list(turns), command.parent
            begun.append(self._create(branch, msgspec.structs.replace(command, session=branch.record.id), channel))
        records = [branch.record for branch in branches]
        if command.n == 1:
            return Reply(command.id, session=records[0], turn=begun[0])
        return Reply(command.id, sessions=records, turn_ids=begun)

    async def events(self, channel: str) -> AsyncIterator[TurnEvent]:
        queue = self._queues.setdefault(channel, asyncio.Queue())
        while True:
            yield await queue.get()

    def waiting(self, channel: str) -> int:
        """Events that the server has not taken."""
        return self._queues[channel].qsize()

    async def close_channel(self, channel: str) -> None:
        self.closed_channels.append(channel)

    def _open(self, tenant: str, of: SessionOpen | SessionRecord) -> Conversation:
        record = SessionRecord(
            id=f"sess_t_{next(self._ids)}",
            model="scripted",
            state="idle",
            head=None,
            instructions=of.instructions,
            tools=of.tools or [],
            sampling=of.sampling or Sampling(),
            reasoning=of.reasoning or "keep",
            labels=of.labels or {},
            turns=0,
            tokens=0,
            prefix_tokens=0,
            remaining=1000,
        )
        conversation = self.conversations[record.id] = Conversation(record, tenant)
        if isinstance(of, SessionOpen) and of.from_ is not None:
            conversation.turns = self._lineage(tenant, of.from_)[1]
            record.head = of.from_
        return conversation

    def _rewind(self, conversation: Conversation, to: str) -> str | None:
        ids = [turn.id for turn in conversation.turns]
        if to != "start" and to not in ids:
            raise SessionError("turn_not_found", f"there is no turn {to}")
        conversation.turns = [] if to == "start" else conversation.turns[: ids.index(to) + 1]
        conversation.record.head = None if to == "start" else to
        return conversation.record.head

    async def _cancel(self, command: TurnCancel) -> Reply:
        for conversation in self.conversations.values():
            if conversation.running == command.turn:
                conversation.cancelled.set()
                while conversation.running is not None:
                    await asyncio.sleep(0.001)
                return Reply(command.id, head=conversation.record.head)
        raise SessionError("turn_not_found", f"there is no running turn {command.turn}")

    def _create(self, conversation: Conversation, command: TurnCreate, channel: str) -> str:
        if conversation.running is not None:
            raise SessionError("session_busy", f"turn {conversation.running} is running")
        turn = f"resp_t_{next(self._ids)}"
        conversation.running = conversation.record.running = turn
        conversation.cancelled.clear()
        task = asyncio.create_task(self._run(conversation, command, channel, turn))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return turn

    async def _run(self, conversation: Conversation, command: TurnCreate, channel: str, turn: str) -> None:
        queue = self._queues.setdefault(channel, asyncio.Queue())
        session, parent = command.session, conversation.record.head
        seq = itertools.count()
        queue.put_nowait(TurnStarted(session, turn, next(seq), parent, 10, Reused(device=4), 6))
        output: list[Item] = []
        error = None
        try:
            items = self.script(command, conversation.turns)
        except SessionError as raised:
            items, error = [], ErrorEvent(raised.code, raised.message, raised.retry)
        for index, item in enumerate(items):
            for piece, name, call in _pieces(item, self.piece_size):
                if self.pause_s:
                    await asyncio.sleep(self.pause_s)
                if conversation.cancelled.is_set():
                    break
                channel_name = _CHANNELS[type(item)]
                queue.put_nowait(TurnDelta(session, turn, next(seq), index, channel_name, piece, name, call))
            if conversation.cancelled.is_set():
                break
            output.append(item)
            queue.put_nowait(TurnItem(session, turn, next(seq), index, item))
        cut = conversation.cancelled.is_set()
        calls = any(isinstance(item, FunctionCallItem) for item in output)
        reason = "error" if error else "cancelled" if cut else "tool_calls" if calls else "stop"
        status = "failed" if error else "cancelled" if cut else "completed"
        usage = Usage(10, Reused(device=4), 6, 5, 0, 985)
        timings = Timings(0.0, 0.1, 0.2, 0.01, 100.0)
        if error is None:
            conversation.record.turns += 1
            given = [MessageItem("user", command.input)] if isinstance(command.input, str) else command.input
            conversation.turns = [
                *conversation.turns,
                TurnRecord(turn, parent, status, reason, given, output, usage, timings),
            ]
            conversation.record.head = turn
        conversation.running = conversation.record.running = None
        head = conversation.record.head
        queue.put_nowait(TurnEnded(session, turn, next(seq), status, reason, usage, timings, head, error))


_CHANNELS = {MessageItem: "text", ReasoningItem: "reasoning", FunctionCallItem: "arguments"}


def _pieces(item: Item, size: int) -> Iterator[tuple[str, str | None, str | None]]:
    call = isinstance(item, FunctionCallItem)
    text = item.arguments if call else item.text
    for at in range(0, len(text), size):
        first = call and at == 0
        yield text[at : at + size], item.name if first else None, item.call_id if first else None


class StubEngine:
    """Answers health and metrics; `stats_delay_s` makes it slow."""

    def __init__(self) -> None:
        self.stats_delay_s = 0.0

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("scripted", 100, 1000, [0], "cpu", "float32", {})

    async def stats(self) -> EngineStats:
        await asyncio.sleep(self.stats_delay_s)
        return EngineStats(1, 2, 0, 0, 0, 0, pages_total=64, pages_free=60, rows_total=8, rows_free=7)


class RunningServer:
    """A server on a thread of its own."""

    def __init__(self, keys: tuple[str, ...] = (), limits: Limits | None = None, origins: tuple[str, ...] = ()) -> None:
        self.host = ScriptedHost()
        self.engine = StubEngine()
        self._keys = ApiKeys.parse(keys)
        self._limits = limits
        self._origins = origins
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def websocket_url(self) -> str:
        return "ws" + self.url.removeprefix("http") + "/v1/sessions/ws"

    def start(self) -> RunningServer:
        self._thread.start()
        assert self._ready.wait(10), "the server did not start"
        return self

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._server.stop)
            self._thread.join(10)
        assert not self._thread.is_alive(), "the server did not end"

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        listener = Listener("127.0.0.1", 0, self._keys)
        self._server = Server(listener, self.host, self.engine, self._keys, limits=self._limits, origins=self._origins)
        serving = asyncio.create_task(self._server.serve())
        await self._server.started()
        self._ready.set()
        await serving


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    servers: list[RunningServer] = []

    def start(**options: object) -> RunningServer:
        servers.append(RunningServer(**options).start())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server()
