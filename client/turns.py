"""A turn as the caller sees it, and how its events add up to one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal

from tokenspeed.client.errors import ProtocolError
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import (
    MissReason,
    Timings,
    TokenLogprob,
    TurnDelta,
    TurnEnded,
    TurnEvent,
    TurnItem,
    TurnProgress,
    TurnReason,
    TurnRecord,
    TurnStarted,
    TurnStatus,
    Usage,
)
from tokenspeed.client.protocol.items import (
    FunctionCallItem,
    InputItem,
    Item,
    MessageItem,
    OutputTextPart,
    ReasoningItem,
    ReasoningTextPart,
    joined_text,
)

Channel = Literal["text", "reasoning", "arguments"]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed answer.

    Attributes:
        channel: `text`, `reasoning`, or `arguments` of a tool call.
        text: what to append; the pieces of one item concatenate to its text or to its JSON arguments.
        item: the output item's index in its turn.
        turn: the turn's id; over a tool loop one stream carries several turns.
        name: on a tool call's first delta, the tool's name.
        call_id: on a tool call's first delta, the call's id.
        logprobs: if asked for, of the tokens sampled since the delta before, whether or not they wrote text.
    """

    channel: Channel
    text: str
    item: int
    turn: str
    name: str | None = None
    call_id: str | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a session. It never changes; a running turn listed by `Session.turns` is a picture of the moment.

    Attributes:
        id: `resp_…`.
        session: the id of the session that it was taken on.
        parent: the turn before it, None for a session's first.
        items: the output: reasoning, messages and function calls in the order in which they were generated.
        status: `completed`, `incomplete`, `cancelled`, or `running` in a list.
        reason: why it ended: `stop`, `tool_calls`, `length`, `context_length`, `cancelled`, `parse_error`, or `warmed`
            where nothing was to be generated.
        usage: tokens (`Usage`).
        timings: seconds (`Timings`).
        input: the items that the turn was given, in a list of turns.
        stop_string: the one that ended it.
        miss_reason: why less was reused than the session had, of a turn that this client took.
        logprobs: of every output token, if asked for.
        prompt_token_ids, output_token_ids: the exact ids, if asked for.
    """

    id: str
    session: str
    parent: str | None
    items: list[Item]
    status: TurnStatus | Literal["running"]
    reason: TurnReason | None
    usage: Usage
    timings: Timings
    input: list[InputItem] = field(default_factory=list)
    stop_string: str | None = None
    miss_reason: MissReason | None = None
    logprobs: list[TokenLogprob] | None = field(default=None, repr=False)
    prompt_token_ids: list[int] | None = field(default=None, repr=False)
    output_token_ids: list[int] | None = field(default=None, repr=False)
    _earlier: tuple[Turn, ...] = field(default=(), repr=False)

    @property
    def text(self) -> str:
        """The answer's text, without reasoning and tool calls."""
        return "".join(item.text for item in self.items if isinstance(item, MessageItem))

    @property
    def reasoning(self) -> str:
        """The text of the model's reasoning; empty if there was none."""
        return "".join(item.text for item in self.items if isinstance(item, ReasoningItem))

    @property
    def tool_calls(self) -> list[FunctionCallItem]:
        """The tools that the model calls in this turn."""
        return [item for item in self.items if isinstance(item, FunctionCallItem)]

    @property
    def steps(self) -> tuple[Turn, ...]:
        """The turns that one `Session.turn` took, in order, this one the last: more than one when tools were run.
        The usage of the whole loop is the sum over them."""
        return (*self._earlier, self)

    def after(self, earlier: tuple[Turn, ...]) -> Turn:
        """This turn as the last step of a loop that began with `earlier`."""
        return replace(self, _earlier=earlier)

    @classmethod
    def of(cls, record: TurnRecord, session: str) -> Turn:
        """The turn that a record of `session.turns` describes."""
        return cls(
            record.id,
            session,
            record.parent,
            record.output,
            record.status,
            record.reason,
            record.usage,
            record.timings,
            record.input,
            record.stop_string,
            prompt_token_ids=record.prompt_token_ids,
            output_token_ids=record.output_token_ids,
        )


class TurnAssembly:
    """Adds up the events of one turn. Knows no sockets.

    Events must arrive in the order of `seq`, from 0. One that was seen before is dropped, so replayed events do no
    harm; a hole raises. `deltas` holds what the caller has not taken yet. An item whose text did not come in deltas
    whole yields its rest as a delta when it is finished, so a stream misses nothing.
    """

    def __init__(self, turn: str) -> None:
        self.id = turn
        self.deltas: deque[Delta] = deque()
        self._parent: str | None = None
        self.ended: TurnEnded | None = None
        self.failure: Exception | None = None
        self._next_seq = 0
        self._session = ""
        self._started: TurnStarted | None = None
        self._items: dict[int, Item] = {}
        self._pieces: dict[int, list[Delta]] = {}
        self._logprobs: list[TokenLogprob] | None = None

    @property
    def over(self) -> bool:
        """No event will change this turn any more."""
        return self.ended is not None or self.failure is not None

    def assume_parent(self, parent: str | None) -> None:
        """The turn that this one follows as far as the caller knows. The first event says it for sure; a turn that is
        cancelled while it is queued has no such event."""
        if self._started is None:
            self._parent = parent

    def apply(self, event: TurnEvent) -> None:
        """Take the turn's next event.

        Raises:
            ProtocolError: an event before it is missing, or the turn has ended.
        """
        if event.seq < self._next_seq:
            return
        first = event.seq
        if isinstance(event, TurnDelta | TurnProgress) and event.first is not None:
            first = event.first
        if first != self._next_seq:
            raise ProtocolError(f"turn {self.id}: event {first} arrived, {self._next_seq} was expected")
        if self.ended is not None:
            raise ProtocolError(f"turn {self.id}: event {event.seq} after its end")
        self._next_seq = event.seq + 1
        self._session = event.session
        match event:
            case TurnStarted():
                self._started = event
                self._parent = event.parent
            case TurnDelta():
                self._add(
                    Delta(event.channel, event.text, event.item, self.id, event.name, event.call_id, event.logprobs)
                )
                self._add_logprobs(event.logprobs)
            case TurnItem():
                self._finish_item(event.index, event.item)
            case TurnEnded():
                self.ended = event
                self._add_logprobs(event.logprobs)

    def fail(self, error: Exception) -> None:
        """End the turn for the caller: its remaining events will not arrive."""
        if not self.over:
            self.failure = error

    def result(self) -> Turn:
        """The turn as far as its events go.

        Raises:
            SessionError: the turn failed in the server.
            Exception: what `fail` was given.
        """
        if self.failure is not None:
            raise self.failure
        ended = self.ended
        if ended is not None and ended.status == "failed":
            raise failure_of(ended)
        indices = sorted(self._items.keys() | self._pieces.keys())
        return Turn(
            self.id,
            self._session,
            self._parent,
            [self._items[index] if index in self._items else self._partial(index) for index in indices],
            ended.status if ended else "running",
            ended.reason if ended else None,
            ended.usage if ended else self._planned(),
            ended.timings if ended else Timings(),
            stop_string=ended.stop_string if ended else None,
            miss_reason=self._started.miss_reason if self._started else None,
            logprobs=self._logprobs,
            prompt_token_ids=ended.prompt_token_ids if ended else None,
            output_token_ids=ended.output_token_ids if ended else None,
        )

    def _planned(self) -> Usage:
        started = self._started
        if started is None:
            return Usage()
        return Usage(prompt=started.prompt_tokens, reused=started.reused, computed=started.to_compute)

    def _add(self, delta: Delta) -> None:
        self._pieces.setdefault(delta.item, []).append(delta)
        self.deltas.append(delta)

    def _add_logprobs(self, logprobs: list[TokenLogprob] | None) -> None:
        if logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += logprobs

    def _finish_item(self, index: int, item: Item) -> None:
        self._items[index] = item
        channel, whole = _stream_of(item)
        seen = "".join(delta.text for delta in self._pieces.get(index, []))
        if index in self._pieces and not (whole.startswith(seen) and len(whole) > len(seen)):
            return
        name, call_id = (item.name, item.call_id) if isinstance(item, FunctionCallItem) else (None, None)
        if index in self._pieces:
            name = call_id = None
        self._add(Delta(channel, whole[len(seen) :], index, self.id, name, call_id))

    def _partial(self, index: int) -> Item:
        pieces = self._pieces[index]
        text = "".join(delta.text for delta in pieces)
        match pieces[0].channel:
            case "reasoning":
                return ReasoningItem([ReasoningTextPart(text)], status="incomplete")
            case "arguments":
                first = pieces[0]
                return FunctionCallItem(first.call_id or "", first.name or "", text, status="incomplete")
            case "text":
                return MessageItem("assistant", [OutputTextPart(text)], status="incomplete")


def failure_of(ended: TurnEnded) -> SessionError:
    """The error that a failed turn ended with."""
    error = ended.error
    if error is None:
        return SessionError("engine_error", f"turn {ended.turn} failed")
    return SessionError(error.code, error.message, detail=error.detail, retry_after_ms=error.retry_after_ms)


def _stream_of(item: Item) -> tuple[Channel, str]:
    """The channel and the whole text of a finished item."""
    match item:
        case ReasoningItem():
            return "reasoning", item.text
        case FunctionCallItem():
            return "arguments", item.arguments
        case MessageItem():
            return "text", item.text
        case _:
            return "text", joined_text(item.output)
