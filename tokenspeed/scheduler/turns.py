"""A turn's way: queued → prefilling → decoding. Each state owns what it needs and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import numpy as np

from tokenspeed.cache.lineage import Lineage
from tokenspeed.cache.tree import Tail
from tokenspeed.cache.trie import Ids
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.scheduler.messages import TurnTimings, TurnUsage
from tokenspeed.scheduler.plan import Choice
from tokenspeed.scheduler.stopping import StopStrings


@dataclass(eq=False)
class Turn:
    """What is true of a turn in every state.

    `ids` are the prompt's; `outputs` the ids sampled and seen so far; `limit` the length (prompt and output) it may
    reach, `by_context` whether that is the context's end rather than its own `max_tokens`; `mask` what the next token
    may be, if `lockstep`.
    """

    name: str
    tenant: str
    lineage: Lineage
    ids: Ids
    marks: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int]
    limit: int
    by_context: bool
    stopping: StopStrings
    sample: bool
    lockstep: bool
    expected: int
    arrived_s: float
    outputs: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    admitted_s: float | None = None
    progress_s: float = 0.0
    reused: int = 0
    computed: int = 0
    recomputed: int = 0
    stop_string: str | None = None
    mask: bytes = b""

    @property
    def length(self) -> int:
        return len(self.ids) + len(self.outputs)

    def all_ids(self) -> Ids:
        return np.concatenate([self.ids, np.asarray(self.outputs, np.int32)])

    def choice(self) -> Choice:
        """For an admission now."""
        params = self.params
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        off = penalties == (1.0, 0.0, 0.0)
        return Choice(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed or 0,
            logprobs=params.top_logprobs if params.logprobs else None,
            penalties=None if off else penalties,
            bias=params.logit_bias,
            prompt=b"" if off else self.ids.astype("<i4").tobytes(),
            output=b"" if off else np.asarray(self.outputs, "<i4").tobytes(),
            forced_from=len(self.ids),
            forced=np.asarray(params.forced_token_ids, "<i4").tobytes(),
        )

    def usage(self, max_context: int) -> TurnUsage:
        return TurnUsage(
            prompt=len(self.ids),
            reused=self.reused,
            computed=self.computed,
            output=len(self.outputs),
            recomputed=self.recomputed,
            remaining=max(0, max_context - self.length),
        )

    def timings(self, now_s: float) -> TurnTimings:
        times = self.token_times_s
        admitted = self.admitted_s if self.admitted_s is not None else now_s
        first = times[0] if times else now_s
        gaps = [later - earlier for earlier, later in pairwise(times)]
        spread = times[-1] - first if times else 0.0
        return TurnTimings(
            queue_s=admitted - self.arrived_s,
            prefill_s=first - admitted,
            ttft_s=first - self.arrived_s,
            itl_p50_s=median(gaps) if gaps else 0.0,
            tokens_per_s=len(gaps) / spread if spread > 0 else 0.0,
        )


@dataclass(eq=False)
class Queued:
    turn: Turn


@dataclass(eq=False)
class Prefilling:
    """`ids` [0, done) have been sent to the device; before the first chunk `row` is the checkpoint's, afterwards the
    ring's first. `marks`: positions ahead whose state is kept, `junctions` those that the scheduler chose. `told`: the
    mask that the place has."""

    turn: Turn
    run: int
    place: int
    tail: Tail
    ids: Ids
    done: int
    row: int
    marks: list[int]
    junctions: set[int]
    write_from: int
    told: bytes = b""

    def sealed(self) -> tuple[int, int]:
        """(length, ring row) of the furthest state that the device will have."""
        return self.done, self.tail.ring[0]


@dataclass(eq=False)
class Decoding:
    """`base` is the length whose state is in ring row 0; the step that sampled from there was the last prefill chunk.

    With n of the run's outputs seen, the state after `base + n - 1` tokens is in ring row `(n - 1) % len(ring)`: the
    ring is as long as the steps in flight plus one, so it has not been written over.
    """

    turn: Turn
    run: int
    place: int
    tail: Tail
    base: int
    told: bytes = b""
    enqueued: int = 0
    seen: int = 0

    @property
    def next_position(self) -> int:
        return self.base + self.enqueued

    @property
    def held(self) -> bool:
        """Whether the turn is in lockstep and its last token is still on its way."""
        return self.turn.lockstep and self.seen <= self.enqueued

    def sealed(self) -> tuple[int, int]:
        """(length, ring row) of the state at the last kept token but one."""
        steps = max(0, self.seen - 1)
        assert self.enqueued - steps < len(self.tail.ring)
        return self.base + steps, self.tail.ring[steps % len(self.tail.ring)]


Running = Prefilling | Decoding
State = Queued | Running
