"""A turn under way: the engine's events in, the wire's events out."""

from __future__ import annotations

import asyncio
import logging
import sys
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

from tokenspeed.client.protocol.errors import ERROR_RULES
from tokenspeed.client.protocol.events import (
    ErrorEvent,
    MissReason,
    Reused,
    Timings,
    TokenLogprob,
    TurnReason,
    TurnRecord,
    TurnStatus,
    Usage,
)
from tokenspeed.client.protocol.items import FunctionCallItem
from tokenspeed.engine.client import EngineClient, EngineGone
from tokenspeed.engine.messages import (
    Cancel,
    Ended,
    EngineEvent,
    Generate,
    Progress,
    Rejected,
    Started,
    Tokens,
    TurnTimings,
    TurnUsage,
)
from tokenspeed.sessions.formats.output import OutputParser
from tokenspeed.sessions.order import TurnOrder
from tokenspeed.sessions.reporter import TurnReporter
from tokenspeed.sessions.tokenizer import Ids
from tokenspeed.sessions.turn import Turn

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How a turn ended. `turn` is None where nothing of it stays."""

    turn: Turn | None
    status: TurnStatus
    reason: TurnReason
    usage: Usage
    timings: Timings
    error: ErrorEvent | None = None


class RunningTurn:
    """Drives one turn through the engine. It is submitted when it is made; `run` follows it to its end.

    Attributes:
        reporter: what writes its events.
        done: set once the session stands where the turn left it.
    """

    def __init__(
        self,
        turn_id: str,
        tenant: str,
        order: TurnOrder,
        parser: OutputParser,
        engine: EngineClient,
        reporter: TurnReporter,
    ) -> None:
        self.id = turn_id
        self.tenant = tenant
        self.reporter = reporter
        self.done = asyncio.Event()
        self._order = order
        self._parser = parser
        self._engine = engine
        self._output: Ids = array("i")
        self._keep: Literal["partial", "nothing"] | None = None  # set by a cancel
        self._resent = False
        self._usage = Usage(prompt=order.prompt.length)
        self._events = self._submit()

    def cancel(self, keep: Literal["partial", "nothing"]) -> None:
        """Ask for the end; of several calls the first counts."""
        if self._keep is None:
            self._keep = keep
            self._engine.cancel(Cancel(self.id, keep))

    def record(self) -> TurnRecord:
        return TurnRecord(
            id=self.id,
            parent=self._parent_id,
            status="running",
            reason=None,
            input=self._order.items,
            output=list(self._parser.items),
            usage=self._usage,
            timings=Timings(),
        )

    async def run(self) -> Outcome:
        """Follow the turn to its end, whatever that is."""
        try:
            return await self._follow()
        except EngineGone as error:
            return self._failure("engine_restarted", str(error) or "the engine ended while the turn ran")
        except Exception as error:
            _log.exception("turn %s failed", self.id)
            self._engine.cancel(Cancel(self.id, "nothing"))
            return self._failure("engine_error", f"{type(error).__name__}: {error}")

    async def _follow(self) -> Outcome:
        while True:
            rejected: Rejected | None = None
            async for event in self._events:
                if isinstance(event, Ended):
                    return self._end(event)
                if isinstance(event, Rejected):
                    rejected = event
                else:
                    self._take(event)
            if rejected is None:
                return self._failure("engine_error", "the engine stopped answering before the turn's end")
            if rejected.code != "unknown_lineage" or self._resent:
                code = rejected.code if rejected.code in ERROR_RULES else "engine_error"
                return self._failure(code, rejected.message)
            if self._keep is not None:
                # The engine never had the turn, so it has nothing to cancel.
                return self._end(
                    Ended(self.id, "cancelled", TurnUsage(prompt=self._order.prompt.length), TurnTimings())
                )
            self._resent = True
            self._events = self._submit()

    @property
    def _parent_id(self) -> str | None:
        return self._order.parent.id if self._order.parent else None

    def _submit(self) -> AsyncIterator[EngineEvent]:
        """Send what is new after the base, or all of it to an engine that does not know the base."""
        order = self._order
        base, keep = (None, 0) if self._resent else (order.base, order.keep)
        return self._engine.generate(
            Generate(
                turn=self.id,
                tenant=self.tenant,
                tokens=_little_endian(order.prompt.ids_from(keep)),
                sampling=order.sampling,
                parent=base.id if base else None,
                keep=keep if base and keep != base.length else None,
                marks=order.prompt.marks,
                sample=order.generate,
            )
        )

    def _take(self, event: Started | Progress | Tokens) -> None:
        if isinstance(event, Tokens):
            self._output.extend(event.tokens)
            self._usage.output = len(self._output)
            if event.logprobs is None:
                self.reporter.output(self._parser.feed(event.tokens))
            else:
                self._take_with_logprobs(event.tokens, event.logprobs, event.top_logprobs)
            self._usage.reasoning = self._parser.reasoning_tokens
        elif isinstance(event, Started):
            self._usage.reused = Reused(device=event.reused)
            self._usage.computed = event.to_compute
            self.reporter.started(event, self._parent_id, self._miss_reason(event))
        else:
            self.reporter.progress(event)

    def _take_with_logprobs(
        self, tokens: list[int], logprobs: list[float], tops: list[list[tuple[int, float]]] | None
    ) -> None:
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            self.reporter.sampled(TokenLogprob(token, logprob, tops[place] if tops else []))
            self.reporter.output(self._parser.feed([token]))

    def _miss_reason(self, event: Started) -> MissReason | None:
        """Why less was reused than the session had: the engine's reason, or one that only the session knows."""
        if event.miss_reason is not None:
            return event.miss_reason
        if self._resent and event.reused < self._order.keep - 1:
            return "cold"
        return self._order.less

    def _end(self, ended: Ended) -> Outcome:
        usage, timings = self._counted(ended.usage), _timed(ended.timings)
        if ended.reason == "error":
            return self._failure("engine_error", ended.message or "the engine failed", usage, timings)
        if ended.reason == "cancelled" and self._keep == "nothing":
            return Outcome(None, "cancelled", "cancelled", usage, timings)
        if ended.usage.output != len(self._output):
            # Standing on ids that the engine does not hold would answer from another conversation than shown.
            message = f"the engine kept {ended.usage.output} of the turn's tokens and reported {len(self._output)}"
            return self._failure("engine_error", message, usage, timings)
        self.reporter.output(self._parser.finish(cut=ended.reason not in ("stop", "warmed"), stop=ended.stop_string))
        status, reason = self._ending(ended)
        turn = Turn(
            id=self.id,
            parent=self._order.parent,
            prompt=self._order.prompt,
            input=self._order.items,
            output=list(self._parser.items),
            output_ids=self._output,
            hidden=tuple(self._parser.hidden),
            cut=self._parser.cut,
            status=status,
            reason=reason,
            usage=usage,
            timings=timings,
            defaults=self._order.defaults,
            stop_string=ended.stop_string,
        )
        return Outcome(turn, status, reason, usage, timings)

    def _ending(self, ended: Ended) -> tuple[TurnStatus, TurnReason]:
        if ended.reason == "length":
            return "incomplete", "length"
        if ended.reason == "context_length":
            return "incomplete", "context_length"
        if ended.reason == "cancelled":
            return "cancelled", "cancelled"
        if ended.reason == "warmed":
            return "completed", "warmed"
        calls = [item for item in self._parser.items if isinstance(item, FunctionCallItem)]
        if not calls:
            return "completed", "stop"
        if calls[-1].parse_error is None:
            return "completed", "tool_calls"
        return "incomplete", "stop" if ended.stop_string is not None and self._parser.cut == "call" else "parse_error"

    def _failure(self, code: str, message: str, usage: Usage | None = None, timings: Timings | None = None) -> Outcome:
        error = ErrorEvent(code=code, message=message, retry=ERROR_RULES[code].retry)
        return Outcome(None, "failed", "error", usage or self._usage, timings or Timings(), error)

    def _counted(self, usage: TurnUsage) -> Usage:
        return Usage(
            prompt=usage.prompt,
            reused=Reused(device=usage.reused),
            computed=usage.computed,
            output=usage.output,
            reasoning=self._parser.reasoning_tokens,
            remaining=usage.remaining,
            recomputed=usage.recomputed,
        )


def _timed(timings: TurnTimings) -> Timings:
    return Timings(
        queue_s=timings.queue_s,
        prefill_s=timings.prefill_s,
        ttft_s=timings.ttft_s,
        itl_p50_s=timings.itl_p50_s,
        tokens_per_s=timings.tokens_per_s,
    )


def _little_endian(ids: Ids) -> bytes:
    if sys.byteorder == "little":
        return ids.tobytes()
    swapped = array("i", ids)
    swapped.byteswap()
    return swapped.tobytes()
