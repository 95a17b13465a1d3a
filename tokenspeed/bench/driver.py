"""An engine core driven turn by turn, with the time of every event."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.core import EngineCore
from tokenspeed.engine.messages import Ended, EngineEvent, Generate, Rejected, Release, Tokens, TurnUsage


class BenchError(RuntimeError):
    """A turn did not end as a measurement needs it to; there is no figure."""


@dataclass
class Timed:
    """A turn and when what happened to it. Times are of `time.perf_counter`, in seconds.

    Attributes:
        name: of its lineage. prompt: its new ids.
        tokens: output ids; `token_times`: when each became known.
        logprobs: {id: log-probability} of the most likely ids at each output position, if asked for.
    """

    name: str
    prompt: list[int]
    submitted: float
    tokens: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    usage: TurnUsage = field(default_factory=TurnUsage)
    ended: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.submitted


class Driver:
    """Takes turns with an engine core and waits for them."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._running: dict[str, Timed] = {}
        self._names = (f"bench{number}" for number in count())

    def submit(
        self,
        prompt: list[int],
        tokens: int,
        *,
        parent: Timed | None = None,
        tenant: str = "bench",
        top_logprobs: int = 0,
        temperature: float = 0.0,
        forced: tuple[int, ...] = (),
    ) -> Timed:
        """A turn of `tokens` output tokens."""
        sampling = SamplingParams(
            temperature=temperature,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=top_logprobs > 0,
            top_logprobs=top_logprobs,
            forced_token_ids=forced,
        )
        ids = np.asarray(prompt, "<i4").tobytes()
        turn = Timed(next(self._names), prompt, time.perf_counter())
        self._running[turn.name] = turn
        self.core.submit(Generate(turn.name, tenant, ids, sampling, parent.name if parent else None))
        return turn

    def release(self, *turns: Timed) -> None:
        """Forget turns that have ended, and finish what runs."""
        self.core.submit(Release([turn.name for turn in turns]))
        self.finish()

    def finish(self) -> None:
        """Run until every turn has ended. Raises BenchError if one was refused or failed."""
        while self.core.busy:
            self.step()

    def step(self) -> list[Timed]:
        """One tick; the turns that it ended. Raises BenchError if one was refused or failed."""
        events = self.core.step()
        now = time.perf_counter()
        ended = (self._take(event, now) for event in events)
        return [turn for turn in ended if turn is not None]

    def _take(self, event: EngineEvent, now: float) -> Timed | None:
        """Note an event that became known at `now`; the turn if it is its last."""
        turn = self._running[event.turn]
        if isinstance(event, Rejected):
            raise BenchError(f"a turn was refused: {event.message}")
        if isinstance(event, Tokens):
            turn.tokens += event.tokens
            turn.token_times += [now] * len(event.tokens)
            turn.logprobs += [dict(ids) for ids in event.top_logprobs or []]
        elif isinstance(event, Ended):
            turn.usage, turn.ended = event.usage, now
            del self._running[event.turn]
            if event.reason != "length":
                raise BenchError(f"a turn ended by {event.reason}: {event.message}")
            return turn
        return None
