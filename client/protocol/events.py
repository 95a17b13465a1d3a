"""Replies and events of the native protocol.

`seq` counts a turn's events from 0. For a reader who is slow, neighbouring deltas of one item are merged, and so are
progress events: the merged event bears the `seq` of the last and, as `first`, that of the first.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tokenspeed.client.protocol.commands import ReasoningRule, Sampling
from tokenspeed.client.protocol.errors import Retry
from tokenspeed.client.protocol.items import FunctionTool, InputItem, Item

TurnStatus = Literal["completed", "incomplete", "cancelled", "failed"]
TurnReason = Literal["stop", "tool_calls", "length", "context_length", "cancelled", "warmed", "parse_error", "error"]
SessionState = Literal["idle", "running", "closed"]
MissReason = Literal["evicted", "off", "cold", "reasoning_dropped", "updated"]
"""Why a turn reused less than its session had. `off`: the prefix cache is switched off. `cold`: the engine did not know
the lineage, for it was started anew. `updated`: instructions or tools have changed."""


class Reused(msgspec.Struct):
    """Prompt tokens that were not computed again, by the tier that held them."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk


class Usage(msgspec.Struct):
    """A turn's tokens. `prompt == reused.total + computed`; `output` includes `reasoning` and the stop token;
    `remaining` is the room left in the model's context after the turn. `recomputed` is none of these: tokens that were
    computed again because the turn had to give way to others.

    A turn that was cancelled while its prompt was not yet processed reused and computed less than its prompt: exactly
    what was processed, nothing while it was queued. Where the engine itself was lost, the counts are those planned.
    """

    prompt: int = 0
    reused: Reused = msgspec.field(default_factory=Reused)
    computed: int = 0
    output: int = 0
    reasoning: int = 0
    remaining: int = 0
    recomputed: int = 0


class Timings(msgspec.Struct):
    """Seconds. `ttft_s` runs from the turn's arrival to its first output token."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    itl_p50_s: float = 0.0
    tokens_per_s: float = 0.0


class TurnRecord(msgspec.Struct, omit_defaults=True):
    """A finished or running turn, as `session.turns` lists it."""

    id: str
    parent: str | None
    status: TurnStatus | Literal["running"]
    reason: TurnReason | None
    input: list[InputItem]
    output: list[Item]
    usage: Usage
    timings: Timings
    stop_string: str | None = None
    prompt_token_ids: list[int] | None = None
    output_token_ids: list[int] | None = None


class Residency(msgspec.Struct):
    """Of the ids that a session stands on, how many its next turn would find computed, by tier."""

    device: int = 0
    host: int = 0
    disk: int = 0


class SessionRecord(msgspec.Struct, omit_defaults=True):
    """A session. `prefix_tokens`: ids of the rendered preamble. `running`: the turn that is being taken.

    `session.get` alone adds the residency and the cheap rewind points: turns of the lineage, oldest first, from which
    a next turn computes at most one token beside the new ones (and what the rule `drop` makes it render again).
    """

    id: str
    model: str
    state: SessionState
    head: str | None
    instructions: str | None
    tools: list[FunctionTool]
    sampling: Sampling
    reasoning: ReasoningRule
    labels: dict[str, str]
    turns: int
    tokens: int
    prefix_tokens: int
    remaining: int
    residency: Residency | None = None
    rewind_points: list[str] | None = None
    running: str | None = None


class SessionTotals(msgspec.Struct):
    """Sums over a session's own turns. `hit_rate` is reused ÷ prompt tokens."""

    turns: int
    prompt: int
    reused: Reused
    computed: int
    output: int
    reasoning: int
    hit_rate: float


class Reply(msgspec.Struct, tag_field="type", tag="reply", omit_defaults=True):
    """The answer to a command; which fields are set depends on the command (PROTOCOL: the table of commands).

    `turn.create` with `parent` sets `session` and `turn`, or with `n` > 1 `sessions` and `turn_ids`, side by side.
    `lost_tokens` is set by what changes tools, instructions or the reasoning rule: at most so many cached tokens of the
    head's lineage cannot be reused by the next turn. `after`: what `session.list` goes on from.
    """

    id: str
    session: SessionRecord | None = None
    sessions: list[SessionRecord] | None = None
    turn: str | None = None
    turn_ids: list[str] | None = None
    head: str | None = None
    turns: list[TurnRecord] | None = None
    totals: SessionTotals | None = None
    lost_tokens: int | None = None
    after: str | None = None


class ErrorEvent(msgspec.Struct, tag_field="type", tag="error", omit_defaults=True):
    """A refused command (`id` is the command's) or a fault of the connection (`id` is None)."""

    code: str
    message: str
    retry: Retry
    id: str | None = None
    retry_after_ms: int | None = None
    detail: dict[str, Any] = {}


class TurnStarted(msgspec.Struct, tag_field="type", tag="turn.started", omit_defaults=True):
    session: str
    turn: str
    seq: int
    parent: str | None
    prompt_tokens: int
    reused: Reused
    to_compute: int
    miss_reason: MissReason | None = None


class TurnProgress(msgspec.Struct, tag_field="type", tag="turn.progress", omit_defaults=True):
    """`done` of `total` prompt tokens are in the cache; while queued, `position` is the place in the queue."""

    session: str
    turn: str
    seq: int
    phase: Literal["queued", "prefill"]
    done: int
    total: int
    position: int | None = None
    first: int | None = None


class TokenLogprob(msgspec.Struct, omit_defaults=True):
    """A sampled token's log-probability under the model's own distribution, and (id, log-probability) of the most
    likely ones, in falling order."""

    id: int
    logprob: float
    top: list[tuple[int, float]] = []


class TurnDelta(msgspec.Struct, tag_field="type", tag="turn.delta", omit_defaults=True):
    """A piece of output item `item` (its index in the turn). For a call, `arguments` deltas concatenate to the JSON
    text and the first one carries `name` and `call_id`.

    `logprobs`, where asked for, are of the tokens sampled since the delta before, whether or not they wrote text; those
    after the last delta are in `turn.ended`. All of them together are the turn's output, in order.
    """

    session: str
    turn: str
    seq: int
    item: int
    channel: Literal["text", "reasoning", "arguments"]
    text: str
    name: str | None = None
    call_id: str | None = None
    first: int | None = None
    logprobs: list[TokenLogprob] | None = None


class TurnItem(msgspec.Struct, tag_field="type", tag="turn.item", omit_defaults=True):
    """A finished output item; `index` is its place in the turn's output."""

    session: str
    turn: str
    seq: int
    index: int
    item: Item


class TurnEnded(msgspec.Struct, tag_field="type", tag="turn.ended", omit_defaults=True):
    """The turn's last event. `head` is where the session stands now. `error` is set when `status` is `failed`.
    `stop_string` is the one that ended the turn (its reason is `stop`); no text has a character of it."""

    session: str
    turn: str
    seq: int
    status: TurnStatus
    reason: TurnReason
    usage: Usage
    timings: Timings
    head: str | None
    error: ErrorEvent | None = None
    stop_string: str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_token_ids: list[int] | None = None
    output_token_ids: list[int] | None = None


TurnEvent = TurnStarted | TurnProgress | TurnDelta | TurnItem | TurnEnded
Event = TurnEvent | ErrorEvent
ServerMessage = Reply | Event
