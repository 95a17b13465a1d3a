"""What crosses the border of the engine: commands in, events out. Token ids only; no text, no sessions.

A **lineage** is named by the turn that made it and is the exact ids of that turn's prompt and kept output. A turn
begins with (a prefix of) an earlier lineage of its tenant and adds ids to it. Lineages live until released.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenspeed.config.sampling import SamplingParams


class Generate(msgspec.Struct, tag="generate", omit_defaults=True):
    """Extend a lineage and sample from its end.

    Attributes:
        turn: a fresh name, the new lineage's afterwards.
        tenant: matching never crosses it.
        tokens: the ids after the parent's, little-endian int32.
        parent: the lineage that the prompt begins with; None begins from nothing.
        keep: how many of the parent's ids the prompt begins with; None is all of them.
        sample: False only computes the prompt (a warm-up): the turn ends with no output.
        marks: ascending prompt positions (lengths) whose state is kept as a checkpoint: preamble end, input end.
        lockstep: a token is chosen only once the one before has been seen, so that `Allow` can say what it may be. The
            turn then has one step in flight and takes every (depth + 1)th; its neighbours take each.
    """

    turn: str
    tenant: str
    tokens: bytes
    sampling: SamplingParams
    parent: str | None = None
    keep: int | None = None
    marks: tuple[int, ...] = ()
    sample: bool = True
    lockstep: bool = False


class Cancel(msgspec.Struct, tag="cancel", omit_defaults=True):
    """End a turn now, in any phase. `partial` keeps prompt and output so far as a lineage; `nothing` forgets it.
    Cancelling a turn that has ended does nothing."""

    turn: str
    keep: Literal["partial", "nothing"] = "partial"


class Release(msgspec.Struct, tag="release"):
    """No session stands on these lineages or may return to them: forget their ids; their cache may go first."""

    turns: list[str]


class Stand(msgspec.Struct, tag="stand"):
    """A session's head moved to lineage `on` and from lineage `off` (None: it opened, closed, or stands at the start).
    Where sessions stand, states are kept longest. Unknown lineages are passed over."""

    on: str | None = None
    off: str | None = None


EngineCommand = Generate | Cancel | Release | Stand


class Allow(msgspec.Struct, tag="allow", omit_defaults=True):
    """What the next tokens of a turn in lockstep may be, until told otherwise. It comes with the result that holds the
    token before, or with the turn itself; so no client can send it, the core alone. Unknown turns are passed over.

    Attributes:
        mask: int32 words [⌈vocabulary / 32⌉], little-endian, bit i % 32 of word i // 32 for id i; empty allows all.
    """

    turn: str
    mask: bytes = b""


MissReason = Literal["evicted", "off"]


class Started(msgspec.Struct, tag="started", omit_defaults=True):
    """The turn was admitted. `prompt == reused + to_compute`. `miss_reason` is set when less was reused than had
    been cached of the parent: it was `evicted`, or the prefix cache is `off`."""

    turn: str
    prompt: int
    reused: int
    to_compute: int
    miss_reason: MissReason | None = None


class Progress(msgspec.Struct, tag="progress", omit_defaults=True):
    """At most one a second while queued or in prefill. `position`: place in the queue, from 0."""

    turn: str
    phase: Literal["queued", "prefill"]
    done: int
    total: int
    position: int | None = None


class Tokens(msgspec.Struct, tag="tokens", omit_defaults=True):
    """Newly sampled ids, in order; `logprobs` beside them if asked for, and `top_logprobs`: for each, (id, its
    log-probability) of the most likely, in falling order."""

    turn: str
    tokens: list[int]
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None


class TurnUsage(msgspec.Struct):
    """Token counts of a finished turn. `prompt == reused + computed` unless it was cut before its prefill ended (then
    the rest was never computed). `output`: kept ids. `recomputed`: tokens computed again because the turn had to give
    way to others in between. `remaining`: room left in the context."""

    prompt: int = 0
    reused: int = 0
    computed: int = 0
    output: int = 0
    recomputed: int = 0
    remaining: int = 0


class TurnTimings(msgspec.Struct):
    """Seconds by the engine's clock."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    itl_p50_s: float = 0.0
    tokens_per_s: float = 0.0


EndReason = Literal["stop", "length", "context_length", "cancelled", "warmed", "error"]


class Ended(msgspec.Struct, tag="ended", omit_defaults=True):
    """The turn's last event. `stop`: a stop id, kept as the last token, or the stop string `stop_string`, whose text is
    complete with the last token. `length`: `max_tokens`. `context_length`: the model's context is full. `warmed`: a
    turn that was not to sample. `error`: `message` says what failed; the lineage does not exist."""

    turn: str
    reason: EndReason
    usage: TurnUsage
    timings: TurnTimings
    message: str | None = None
    stop_string: str | None = None


class Rejected(msgspec.Struct, tag="rejected", omit_defaults=True):
    """The turn never began. `unknown_lineage`: send the whole prompt with `parent=None`."""

    turn: str
    code: Literal["unknown_lineage", "bad_request", "context_length_exceeded", "queue_full"]
    message: str


EngineEvent = Started | Progress | Tokens | Ended | Rejected
