"""A turn's events on the wire: numbered, and each token's log-probability with the text that it led to."""

from __future__ import annotations

from collections.abc import Callable

from tokenspeed.client.protocol.events import (
    MissReason,
    Reused,
    TokenLogprob,
    TurnDelta,
    TurnEvent,
    TurnItem,
    TurnProgress,
    TurnStarted,
)
from tokenspeed.engine.messages import Progress, Started
from tokenspeed.sessions.formats.output import Delta, OutputEvent


class TurnReporter:
    """Writes the events of one turn, but for the last."""

    def __init__(self, session_id: str, turn_id: str, emit: Callable[[TurnEvent], None]) -> None:
        self._session = session_id
        self._turn = turn_id
        self._emit = emit
        self._seq = 0
        self._logprobs: list[TokenLogprob] = []  # of tokens sampled since the last delta

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq - 1

    def started(self, event: Started, parent: str | None, miss_reason: MissReason | None) -> None:
        self._emit(
            TurnStarted(
                session=self._session,
                turn=self._turn,
                seq=self.next_seq(),
                parent=parent,
                prompt_tokens=event.prompt,
                reused=Reused(device=event.reused),
                to_compute=event.to_compute,
                miss_reason=miss_reason,
            )
        )

    def progress(self, event: Progress) -> None:
        self._emit(
            TurnProgress(
                session=self._session,
                turn=self._turn,
                seq=self.next_seq(),
                phase=event.phase,
                done=event.done,
                total=event.total,
                position=event.position,
            )
        )

    def sampled(self, logprob: TokenLogprob) -> None:
        """A token was sampled whose text, if it has any, is still to come."""
        self._logprobs.append(logprob)

    def rest(self) -> list[TokenLogprob] | None:
        """The log-probabilities that no delta has carried; None for none."""
        rest, self._logprobs = self._logprobs, []
        return rest or None

    def output(self, events: list[OutputEvent]) -> None:
        for event in events:
            if isinstance(event, Delta):
                self._emit(
                    TurnDelta(
                        session=self._session,
                        turn=self._turn,
                        seq=self.next_seq(),
                        item=event.item,
                        channel=event.channel,
                        text=event.text,
                        name=event.name,
                        call_id=event.call_id,
                        logprobs=self.rest(),
                    )
                )
            else:
                self._emit(
                    TurnItem(
                        session=self._session,
                        turn=self._turn,
                        seq=self.next_seq(),
                        index=event.index,
                        item=event.item,
                    )
                )
