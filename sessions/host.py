"""The session host: a command struct in, a reply out, and the events of turns on the channel that started them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from tokenspeed.client.protocol.commands import (
    Command,
    Sampling,
    SessionClose,
    SessionFork,
    SessionGet,
    SessionList,
    SessionOpen,
    SessionRewind,
    SessionTurns,
    SessionUsage,
    TurnCancel,
    TurnCreate,
)
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import Reply, SessionRecord, TurnEnded, TurnEvent
from tokenspeed.client.protocol.items import FunctionTool, InputItem
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.client import EngineClient
from tokenspeed.engine.messages import EngineInfo
from tokenspeed.sessions.channel import Channel
from tokenspeed.sessions.formats.arguments import ParameterTypes
from tokenspeed.sessions.formats.output import OutputParser
from tokenspeed.sessions.formats.qwen import QwenFormat
from tokenspeed.sessions.formats.selftest import self_test
from tokenspeed.sessions.formats.template import ChatTemplate
from tokenspeed.sessions.running import RunningTurn
from tokenspeed.sessions.sampling import checkpoint_sampling, resolve
from tokenspeed.sessions.session import Defaults, Session, checked_input
from tokenspeed.sessions.store import TurnStore
from tokenspeed.sessions.tokenizer import ChatTokenizer
from tokenspeed.sessions.transcript import Transcript
from tokenspeed.sessions.turn import Prompt, Turn, path

MAX_FORKS = 64
"""Sessions that one `session.fork` may make."""

_LONG_INPUT = 16_384
"""Characters from which an input is tokenised on a thread, so that the event loop is not held up by it."""


class SessionHost:
    """Serves the sessions of one engine. All methods are called on one event loop.

    A tenant sees only its own: what belongs to another is answered like what does not exist.
    """

    def __init__(
        self, engine: EngineClient, model_directory: Path, owner: str = "a", model_name: str | None = None
    ) -> None:
        """
        Args:
            model_directory: holds `tokenizer.json`, the chat template and perhaps `generation_config.json`.
            owner: the host's name in the ids that it gives.
            model_name: what clients call the model; the engine's name for it by default.

        Raises:
            ValueError: the tokenizer, the template or the sampling defaults cannot be used; the message says why.
        """
        self._engine = engine
        self._owner = owner
        self._model = model_name or engine.info.model
        self._tokenizer = ChatTokenizer(model_directory)
        if self._tokenizer.largest_id >= engine.info.vocab_size:
            raise ValueError(
                f"the tokenizer has ids up to {self._tokenizer.largest_id}, the model only up to "
                f"{engine.info.vocab_size - 1}"
            )
        template = ChatTemplate.load(model_directory)
        self._format = QwenFormat(template, self._tokenizer)
        self_test(self._format, template)
        self._transcript = Transcript(self._format, self._tokenizer)
        self._checkpoint_sampling = checkpoint_sampling(model_directory)
        self._sessions: dict[str, Session] = {}
        self._turns = TurnStore()
        self._latest: dict[str, Session] = {}  # each session's newest turn, running or ended
        self._channels: dict[str, Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def model(self) -> str:
        """The name that clients use for the model."""
        return self._model

    async def request(self, tenant: str, command: Command, channel: str) -> Reply:
        """Carry out a command. A turn's id is in the reply to `turn.create`, its events follow on `channel`.

        `turn.cancel` and `session.close` reply once the turn has ended.

        Raises:
            SessionError: the command is refused; nothing has changed.
        """
        match command:
            case SessionOpen():
                return Reply(command.id, session=self._record(self._open(tenant, command)))
            case TurnCreate():
                return Reply(command.id, turn=await self._create(tenant, command, channel))
            case TurnCancel():
                return Reply(command.id, turn=command.turn, head=await self._cancel(tenant, command))
            case SessionFork():
                return Reply(command.id, sessions=[self._record(fork) for fork in self._fork(tenant, command)])
            case SessionRewind():
                session = self._rewind(tenant, command)
                return Reply(command.id, session=self._record(session), head=_id_of(session.head))
            case SessionGet():
                return Reply(command.id, session=self._record(self._find(tenant, command.session)))
            case SessionList():
                own = [session for session in self._sessions.values() if session.tenant == tenant]
                return Reply(command.id, sessions=[self._record(session) for session in own])
            case SessionTurns():
                session = self._find(tenant, command.session)
                running = [session.running.record()] if session.running else []
                turns = [turn.record(command.token_ids) for turn in path(session.head)]
                return Reply(command.id, turns=turns + running)
            case SessionUsage():
                return Reply(command.id, totals=self._find(tenant, command.session).totals.report())
            case SessionClose():
                await self._close(tenant, command)
                return Reply(command.id)
            case _:
                raise SessionError("bad_request", f"{type(command).__name__} is not served")

    def events(self, channel: str) -> AsyncIterator[TurnEvent]:
        """The events of all turns that `channel` started, until it is closed. One reader a channel."""
        return self._channel(channel).read()

    async def close_channel(self, channel: str) -> None:
        """Forget a channel. Its turns run on; what becomes of them is for the caller to say, with `turn.cancel`."""
        gone = self._channels.pop(channel, None)
        if gone is not None:
            gone.close()

    async def close(self) -> None:
        """End all turns, keeping their partial output, and all channels. The engine stays as it is."""
        for session in self._sessions.values():
            if session.running is not None:
                session.running.cancel("partial")
        await asyncio.gather(*self._tasks)
        for channel in list(self._channels):
            await self.close_channel(channel)

    def _open(self, tenant: str, command: SessionOpen) -> Session:
        if command.model is not None and command.model != self._model:
            raise SessionError("bad_request", f"the model {command.model!r} is not served here; {self._model!r} is")
        if command.reasoning == "drop" and self._format.visible_opening is None:
            raise SessionError("bad_request", "this model's chat template keeps all reasoning; it cannot be dropped")
        tools = command.tools or []
        _check_tools(tools)
        self._resolve(command.sampling)
        instructions = command.instructions or None
        preamble = self._transcript.preamble(instructions, tools)
        self._check_length(len(preamble.ids))
        defaults = Defaults(
            instructions=instructions,
            tools=tools,
            sampling=command.sampling or Sampling(),
            reasoning=command.reasoning or "keep",
            labels=command.labels or {},
            preamble=preamble,
            types=ParameterTypes(tools),
        )
        return self._add_session(tenant, defaults, None)

    async def _create(self, tenant: str, command: TurnCreate, channel: str) -> str:
        if command.session is None:
            raise SessionError("bad_request", "turn.create needs a session")
        session = self._find(tenant, command.session)
        session.check_idle()
        sampling = self._resolve(command.sampling, session.defaults.sampling)
        items = checked_input(command.input, session.head)
        # Taken before the wait below: should the channel close meanwhile, its successor is not written to.
        events = self._channel(channel)
        session.preparing = True
        try:
            prompt = await self._prompt(session, items)
        finally:
            session.preparing = False
        self._find(tenant, command.session)  # it may have been closed meanwhile
        self._check_length(prompt.length)
        return self._start(session, items, prompt, sampling, events, command.token_ids)

    async def _prompt(self, session: Session, items: list[InputItem]) -> Prompt:
        defaults = session.defaults
        given = (defaults.preamble, defaults.reasoning, session.head, items)
        if sum(len(item.text) for item in items) < _LONG_INPUT:
            return self._transcript.prompt(*given)
        return await asyncio.to_thread(self._transcript.prompt, *given)

    def _start(
        self,
        session: Session,
        items: list[InputItem],
        prompt: Prompt,
        sampling: SamplingParams,
        channel: Channel,
        token_ids: bool,
    ) -> str:
        stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= frozenset(self._engine.info.eos_token_ids)
        running = RunningTurn(
            turn_id=self._new_id("resp"),
            session_id=session.id,
            tenant=session.tenant,
            parent=session.head,
            items=items,
            prompt=prompt,
            sampling=sampling,
            parser=OutputParser(self._format, self._tokenizer, session.defaults.types, stops, self._new_id),
            engine=self._engine,
            emit=channel.put,
        )
        if session.latest is not None:
            self._latest.pop(session.latest, None)
        session.running, session.latest = running, running.id
        self._latest[running.id] = session
        task = asyncio.create_task(self._run(session, running, channel, token_ids))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return running.id

    async def _run(self, session: Session, running: RunningTurn, channel: Channel, token_ids: bool) -> None:
        outcome = await running.run()
        session.running = None
        session.totals.add(outcome.usage)
        if outcome.turn is not None:
            self._turns.add(session.tenant, outcome.turn)
            self._move(session, outcome.turn)
        kept = outcome.turn if token_ids else None
        channel.put(
            TurnEnded(
                session=session.id,
                turn=running.id,
                seq=running.next_seq(),
                status=outcome.status,
                reason=outcome.reason,
                usage=outcome.usage,
                timings=outcome.timings,
                head=_id_of(session.head),
                error=outcome.error,
                prompt_token_ids=kept.prompt.ids().tolist() if kept else None,
                output_token_ids=kept.output_ids.tolist() if kept else None,
            )
        )
        running.done.set()

    async def _cancel(self, tenant: str, command: TurnCancel) -> str | None:
        """The head that results. A turn that has ended stays as it is."""
        session = self._latest.get(command.turn)
        if session is not None and session.tenant == tenant:
            if session.running is not None:
                running = session.running
                running.cancel(command.keep)
                await running.done.wait()
            return _id_of(session.head)
        if self._turns.find(tenant, command.turn) is None:
            raise SessionError("turn_not_found", f"there is no turn {command.turn}")
        return command.turn

    def _fork(self, tenant: str, command: SessionFork) -> list[Session]:
        session = self._find(tenant, command.session)
        if not 1 <= command.n <= MAX_FORKS:
            raise SessionError("bad_request", f"n is {command.n}; it must be between 1 and {MAX_FORKS}")
        head = session.head if command.at is None else session.turn_in_lineage(command.at)
        return [self._add_session(tenant, session.defaults, head) for _ in range(command.n)]

    def _rewind(self, tenant: str, command: SessionRewind) -> Session:
        session = self._find(tenant, command.session)
        session.check_idle()
        self._move(session, None if command.to == "start" else session.turn_in_lineage(command.to))
        return session

    async def _close(self, tenant: str, command: SessionClose) -> None:
        session = self._find(tenant, command.session)
        running = session.running
        if running is not None:
            running.cancel("nothing")
            await running.done.wait()
        if self._sessions.pop(session.id, None) is not None:
            self._move(session, None)
            if session.latest is not None:
                self._latest.pop(session.latest, None)

    def _add_session(self, tenant: str, defaults: Defaults, head: Turn | None) -> Session:
        session = Session(self._new_id("sess"), tenant, defaults)
        self._sessions[session.id] = session
        self._move(session, head)
        return session

    def _move(self, session: Session, head: Turn | None) -> None:
        """Put the head on another turn; what nobody can reach then is released."""
        self._turns.hold(head)
        gone = self._turns.let_go(session.head)
        session.head = head
        if gone:
            self._engine.release(gone)

    def _find(self, tenant: str, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None or session.tenant != tenant:
            raise SessionError("session_not_found", f"there is no session {session_id}")
        return session

    def _resolve(self, *layers: Sampling | None) -> SamplingParams:
        params = resolve([*layers, self._checkpoint_sampling], self._engine.info.vocab_size)
        end = self._tokenizer.added[self._format.end_of_turn]
        if params.ignore_eos or end in self._engine.info.eos_token_ids:
            return params
        # The format's own end of a turn ends it, whatever the checkpoint's list says.
        return msgspec.structs.replace(params, stop_token_ids=(*params.stop_token_ids, end))

    def _record(self, session: Session) -> SessionRecord:
        return session.record(self._model, self._engine.info.max_context)

    def _check_length(self, length: int) -> None:
        limit = self._engine.info.max_context
        if length >= limit:
            raise SessionError(
                "context_length_exceeded",
                f"the maximum context length is {limit} tokens; the prompt has {length}, and one is needed to answer",
                detail={"limit": limit, "prompt": length},
            )

    def _channel(self, name: str) -> Channel:
        return self._channels.setdefault(name, Channel())

    def _new_id(self, kind: str) -> str:
        return f"{kind}_{self._owner}_{secrets.token_hex(12)}"


def _id_of(turn: Turn | None) -> str | None:
    return turn.id if turn else None


def _check_tools(tools: list[FunctionTool]) -> None:
    names = [tool.name for tool in tools]
    for name in names:
        if not name or names.count(name) > 1:
            raise SessionError("bad_request", f"the tool name {name!r} is given {names.count(name)} times or empty")
