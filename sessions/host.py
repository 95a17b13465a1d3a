"""The session host: a command struct in, a reply out, and the events of turns on the channel that started them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

from tokenspeed.client.protocol.commands import (
    Command,
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
from tokenspeed.client.protocol.events import Reply, Residency, SessionRecord, TurnEvent, TurnRecord
from tokenspeed.engine.client import EngineClient, EngineGone
from tokenspeed.engine.messages import EngineInfo
from tokenspeed.sessions.book import SessionBook
from tokenspeed.sessions.bounds import MAX_ANSWERS, MAX_FORKS, MAX_PAGE, check_number
from tokenspeed.sessions.channel import Channel
from tokenspeed.sessions.chat import ChatModel
from tokenspeed.sessions.defaults import Defaults
from tokenspeed.sessions.ending import ended, unwritten
from tokenspeed.sessions.formats.output import OutputParser
from tokenspeed.sessions.journal.directory import tokens_fingerprint
from tokenspeed.sessions.journal.journal import Journal
from tokenspeed.sessions.journal.ledger import Ledger
from tokenspeed.sessions.journal.records import TokensRecord
from tokenspeed.sessions.order import TurnOrder, another_answer, next_turn
from tokenspeed.sessions.reporter import TurnReporter
from tokenspeed.sessions.running import RunningTurn
from tokenspeed.sessions.session import Session, checked_input
from tokenspeed.sessions.turn import Turn, path


class SessionHost:
    """Serves the sessions of one engine. All methods are called on one event loop.

    A tenant sees only its own: what belongs to another is answered like what does not exist.

    With a journal, sessions outlive the host: `turn.ended` is sent, and what opens, forks, moves, changes or closes a
    session is answered, once the journal has it on disk; and no reply tells of what is not yet there.
    """

    def __init__(
        self,
        engine: EngineClient,
        model_directory: Path,
        owner: str = "a",
        model_name: str | None = None,
        journal: Journal | None = None,
    ) -> None:
        """
        Args:
            model_directory: holds `tokenizer.json`, the chat template and perhaps `generation_config.json`.
            owner: the host's name in the ids that it gives.
            model_name: what clients call the model; the engine's name for it by default.
            journal: whose sessions go on here; it stays open. Without one, sessions end with the host.

        Raises:
            ValueError: the tokenizer, the template or the sampling defaults cannot be used; the message says why.
            JournalError: the journal is damaged, or of a model with another tokenizer or template.
        """
        self._engine = engine
        self._owner = owner
        self._chat = ChatModel(engine.info, model_directory, model_name)
        self._ledger = Ledger(journal)
        self._book = SessionBook(engine, self._ledger, self._new_id)
        if journal is not None:
            self._book.take_over(self._ledger.take_over(TokensRecord(tokens_fingerprint(model_directory), self.model)))
        self._channels: dict[str, Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def model(self) -> str:
        """The name that clients use for the model."""
        return self._chat.name

    @property
    def sessions(self) -> int:
        """How many there are."""
        return len(self._book)

    async def request(self, tenant: str, command: Command, channel: str) -> Reply:
        """Carry out a command. A turn's id is in the reply that begins it, its events follow on `channel`.

        `turn.cancel` and `session.close` reply once the turn has ended.

        Raises:
            SessionError: the command is refused, and nothing has changed; or, with `session_moved` or `journal_failed`,
                nothing can be written any more.
        """
        self._ledger.check()
        reply = await self._carry_out(tenant, command, channel)
        if not _only_begins(command, reply):
            await self._ledger.durable()
        return reply

    async def _carry_out(self, tenant: str, command: Command, channel: str) -> Reply:
        match command:
            case SessionOpen():
                return await self._open(tenant, command)
            case TurnCreate():
                return await self._create(tenant, command, channel)
            case TurnGet():
                return Reply(command.id, turns=[self._turn(tenant, command)])
            case TurnCancel():
                return Reply(command.id, turn=command.turn, head=await self._cancel(tenant, command))
            case SessionRegenerate():
                return Reply(command.id, turn=self._regenerate(tenant, command, channel))
            case SessionUpdate():
                return await self._update(tenant, command)
            case SessionFork():
                return Reply(command.id, sessions=[self._record(fork) for fork in self._fork(tenant, command)])
            case SessionRewind():
                session = self._rewind(tenant, command)
                return Reply(command.id, session=self._record(session), head=_id_of(session.head))
            case SessionGet():
                return Reply(command.id, session=await self._described(self._book.find(tenant, command.session)))
            case SessionList():
                check_number("limit", command.limit, MAX_PAGE, 1)
                found, more = self._book.page(tenant, command.labels, command.limit, command.after)
                records = [self._record(session) for session in found]
                return Reply(command.id, sessions=records, after=found[-1].id if more else None)
            case SessionTurns():
                session = self._book.find(tenant, command.session)
                running = [session.running.record()] if session.running else []
                turns = [turn.record(command.token_ids) for turn in path(session.head)]
                return Reply(command.id, turns=turns + running)
            case SessionUsage():
                return Reply(command.id, totals=self._book.find(tenant, command.session).totals.report())
            case SessionClose():
                await self._close(tenant, command)
                return Reply(command.id)

    def events(self, channel: str) -> AsyncIterator[TurnEvent]:
        """The events of all turns that `channel` started, until it is closed. One reader a channel."""
        return self._channel(channel).read()

    async def close_channel(self, channel: str) -> None:
        """Forget a channel. Its turns run on; what becomes of them is for the caller to say, with `turn.cancel`."""
        gone = self._channels.pop(channel, None)
        if gone is not None:
            gone.close()

    async def close(self) -> None:
        """End all turns, keeping their partial output, and all channels. Engine and journal stay as they are."""
        for session in self._book:
            if session.running is not None:
                session.running.cancel("partial")
        await asyncio.gather(*self._tasks)
        with contextlib.suppress(SessionError):  # whoever waited for what cannot be written has been told
            await self._ledger.durable()
        for channel in list(self._channels):
            await self.close_channel(channel)

    # ------------------------------------------------------------------ sessions

    async def _open(self, tenant: str, command: SessionOpen) -> Reply:
        if command.model is not None and command.model != self.model:
            raise SessionError("bad_request", f"the model {command.model!r} is not served here; {self.model!r} is")
        head = self._book.find_turn(tenant, command.from_) if command.from_ is not None else None
        before = head.defaults if head else self._chat.bare
        with self._book.holding(head):
            defaults = await self._chat.changed(
                before,
                instructions=command.instructions,
                tools=command.tools,
                sampling=command.sampling,
                reasoning=command.reasoning,
                labels=command.labels,
            )
            lost = await self._lost(head, before, defaults)
            session = self._book.add(tenant, defaults, head)
        return Reply(command.id, session=self._record(session), lost_tokens=lost if head else None)

    async def _update(self, tenant: str, command: SessionUpdate) -> Reply:
        session = self._book.find(tenant, command.session)
        prompting = (command.instructions, command.tools, command.reasoning) != (None, None, None)
        with _preparing(session) if prompting or session.preparing else contextlib.nullcontext():
            before = session.defaults
            defaults = await self._chat.changed(
                before,
                instructions=command.instructions,
                tools=command.tools,
                sampling=command.sampling,
                reasoning=command.reasoning,
                labels=command.labels,
            )
            lost = await self._lost(session.head, before, defaults)
        session = self._book.find(tenant, command.session)  # it may have been closed meanwhile
        self._book.change(session, defaults)
        return Reply(command.id, session=self._record(session), lost_tokens=lost)

    async def _lost(self, head: Turn | None, before: Defaults, after: Defaults) -> int:
        """Cached ids of `head` that the next turn cannot reuse under the defaults `after`, and could under `before`:
        what an earlier update has lost already is not counted again."""
        if head is None or after is before:
            return 0
        usable, kept = self._kept(before, head), self._kept(after, head)
        if kept >= usable:
            return 0
        [cached] = await self._resident([head])
        return max(0, min(cached, usable) - kept)

    def _kept(self, defaults: Defaults, head: Turn) -> int:
        """How many ids of `head` the next prompt begins with under these defaults."""
        drops = defaults.reasoning == "drop" and head.defaults.reasoning == "keep"
        return self._chat.transcript.kept(defaults.preamble, head, drops)

    async def _resident(self, turns: list[Turn]) -> list[int]:
        try:
            return await self._engine.residency([turn.id for turn in turns])
        except EngineGone:  # and its cache with it
            return [0] * len(turns)

    async def _described(self, session: Session) -> SessionRecord:
        record, preamble = self._record(session), session.defaults.preamble
        turns = path(session.head)
        lengths = await self._resident(turns) if turns else []
        record.residency = Residency(device=lengths[-1] if turns else 0)
        record.rewind_points = [
            turn.id
            for turn, length in zip(turns, lengths, strict=True)
            if length >= turn.length - 1 and self._chat.transcript.kept(preamble, turn, drops=False)
        ]
        return record

    def _fork(self, tenant: str, command: SessionFork) -> list[Session]:
        session = self._book.find(tenant, command.session)
        check_number("n", command.n, MAX_FORKS, 1)
        head = session.head if command.at is None else session.turn_in_lineage(command.at)
        return [self._book.add(tenant, session.defaults, head) for _ in range(command.n)]

    def _rewind(self, tenant: str, command: SessionRewind) -> Session:
        session = self._book.find(tenant, command.session)
        session.check_idle()
        self._book.move(session, None if command.to == "start" else session.turn_in_lineage(command.to))
        return session

    async def _close(self, tenant: str, command: SessionClose) -> None:
        session = self._book.find(tenant, command.session)
        running = session.running
        if running is not None:
            running.cancel("nothing")
            await running.done.wait()
        self._book.remove(session)

    # ------------------------------------------------------------------ turns

    async def _create(self, tenant: str, command: TurnCreate, channel: str) -> Reply:
        if (command.session is None) == (command.parent is None):
            raise SessionError("bad_request", "turn.create takes a session or a parent, and one of them")
        check_number("n", command.n, MAX_ANSWERS, 1)
        # Taken before any wait: should the channel close meanwhile, its successor is not written to.
        events = self._channel(channel)
        if command.session is not None:
            return await self._create_in(self._book.find(tenant, command.session), command, events)
        if command.expect_head is not None:
            raise SessionError("bad_request", "expect_head wants a session; a parent says itself where it stands")
        parent = self._book.find_turn(tenant, command.parent or "")
        with self._book.holding(parent):
            order, lost = await self._order(command, parent.defaults, parent)
            self._chat.check_length(order.prompt.length)
            sessions = [self._book.add(tenant, order.defaults, parent) for _ in range(command.n)]
        turns = [
            self._start(session, _with_seed(order, number), events, command.token_ids)
            for number, session in enumerate(sessions)
        ]
        records = [self._record(session) for session in sessions]
        if command.n == 1:
            return Reply(command.id, session=records[0], turn=turns[0], lost_tokens=lost)
        return Reply(command.id, sessions=records, turn_ids=turns, lost_tokens=lost)

    async def _create_in(self, session: Session, command: TurnCreate, events: Channel) -> Reply:
        if command.n != 1:
            raise SessionError("bad_request", f"n is {command.n}; in a session it must be 1")
        with _preparing(session):
            session.check_head(command.expect_head)
            order, lost = await self._order(command, session.defaults, session.head)
        self._book.find(session.tenant, session.id)  # it may have been closed meanwhile
        self._chat.check_length(order.prompt.length)
        self._book.change(session, order.defaults)
        return Reply(command.id, turn=self._start(session, order, events, command.token_ids), lost_tokens=lost)

    async def _order(self, command: TurnCreate, before: Defaults, head: Turn | None) -> tuple[TurnOrder, int | None]:
        """The turn that is asked for, and what it loses if it changes the defaults."""
        sampling = self._chat.sampling(command.sampling, before.sampling)
        items = checked_input(command.input, head, command.generate)
        defaults = await self._chat.changed(before, instructions=command.instructions, tools=command.tools)
        lost = await self._lost(head, before, defaults) if defaults is not before else None
        prompt = await self._chat.prompt(defaults, head, items, command.generate)
        return next_turn(head, items, prompt, defaults, sampling, command.generate), lost

    def _regenerate(self, tenant: str, command: SessionRegenerate, channel: str) -> str:
        session = self._book.find(tenant, command.session)
        session.check_idle()
        turn = session.head if command.of is None else session.turn_in_lineage(command.of)
        if turn is None:
            raise SessionError("bad_request", f"session {session.id} has no turn yet to answer anew")
        defaults = session.defaults
        sampling = self._chat.sampling(command.sampling, defaults.sampling)
        prompt = self._chat.transcript.again(defaults.preamble, turn)
        self._chat.check_length(prompt.length)
        order = another_answer(turn, prompt, defaults, sampling)
        return self._start(session, order, self._channel(channel), command.token_ids)

    def _start(self, session: Session, order: TurnOrder, channel: Channel, token_ids: bool) -> str:
        turn_id = self._new_id("resp")
        running = RunningTurn(
            turn_id=turn_id,
            tenant=session.tenant,
            order=order,
            parser=OutputParser(
                self._chat.format,
                self._chat.tokenizer,
                order.defaults.types,
                self._chat.stop_ids(order.sampling),
                self._new_id,
                order.sampling.stop,
            ),
            engine=self._engine,
            reporter=TurnReporter(session.id, turn_id, channel.put),
        )
        session.running = running
        self._book.begin(session, turn_id)
        task = asyncio.create_task(self._run(session, running, channel, token_ids))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return turn_id

    async def _run(self, session: Session, running: RunningTurn, channel: Channel, token_ids: bool) -> None:
        outcome = await running.run()
        before = session.head
        session.running = None
        session.totals.add(outcome.usage)
        self._ledger.session(session)
        if outcome.turn is not None:
            self._book.stand_on(session, outcome.turn)
        event = ended(session, running.id, outcome, running.reporter, token_ids)
        # Until the end is told, the session takes no other turn: its events would come before this turn's last.
        session.settling = True
        try:
            await self._ledger.durable()
        except SessionError as error:
            event = unwritten(event, error, before)
        session.settling = False
        channel.put(event)
        running.done.set()

    def _turn(self, tenant: str, command: TurnGet) -> TurnRecord:
        session = self._book.with_latest(tenant, command.turn)
        if session is not None and session.running is not None:
            return session.running.record()
        return self._book.find_turn(tenant, command.turn).record(command.token_ids)

    async def _cancel(self, tenant: str, command: TurnCancel) -> str | None:
        """The head that results. A turn that has ended stays as it is."""
        session = self._book.with_latest(tenant, command.turn)
        if session is None:
            return self._book.find_turn(tenant, command.turn).id
        if session.running is not None:
            running = session.running
            running.cancel(command.keep)
            await running.done.wait()
        return _id_of(session.head)

    # ------------------------------------------------------------------ helpers

    def _record(self, session: Session) -> SessionRecord:
        return session.record(self.model, self._engine.info.max_context)

    def _channel(self, name: str) -> Channel:
        return self._channels.setdefault(name, Channel())

    def _new_id(self, kind: str) -> str:
        return f"{kind}_{self._owner}_{secrets.token_hex(12)}"


@contextlib.contextmanager
def _preparing(session: Session) -> Iterator[None]:
    """Within, the session takes no other turn. Raises: SessionError `session_busy`."""
    session.check_idle()
    session.preparing = True
    try:
        yield
    finally:
        session.preparing = False


def _with_seed(order: TurnOrder, number: int) -> TurnOrder:
    """The order of the `number`-th of several answers."""
    sampling = order.sampling
    if sampling.seed is None or number == 0:
        return order
    seed = (sampling.seed + number) % 2**64
    return dataclasses.replace(order, sampling=msgspec.structs.replace(sampling, seed=seed))


def _only_begins(command: Command, reply: Reply) -> bool:
    """Whether the reply says no more than that turns have begun, of which the journal knows nothing yet."""
    begins = isinstance(command, TurnCreate | SessionRegenerate)
    return begins and (reply.session, reply.sessions, reply.lost_tokens) == (None, None, None)


def _id_of(turn: Turn | None) -> str | None:
    return turn.id if turn else None
