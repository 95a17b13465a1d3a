"""A turn's last event."""

from __future__ import annotations

import msgspec

from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import ErrorEvent, TurnEnded
from tokenspeed.sessions.reporter import TurnReporter
from tokenspeed.sessions.running import Outcome
from tokenspeed.sessions.session import Session
from tokenspeed.sessions.turn import Turn


def ended(session: Session, turn_id: str, outcome: Outcome, reporter: TurnReporter, token_ids: bool) -> TurnEnded:
    """Of a turn whose session stands where it left it. `token_ids`: with the exact ids of what is kept."""
    kept = outcome.turn if token_ids else None
    return TurnEnded(
        session=session.id,
        turn=turn_id,
        seq=reporter.next_seq(),
        status=outcome.status,
        reason=outcome.reason,
        usage=outcome.usage,
        timings=outcome.timings,
        head=session.head.id if session.head else None,
        error=outcome.error,
        stop_string=outcome.turn.stop_string if outcome.turn else None,
        logprobs=reporter.rest(),
        prompt_token_ids=kept.prompt.ids().tolist() if kept else None,
        output_token_ids=kept.output_ids.tolist() if kept else None,
    )


def unwritten(event: TurnEnded, error: SessionError, head: Turn | None) -> TurnEnded:
    """The end of a turn that could not be journalled: it does not count, and the session stands at `head` as before."""
    return msgspec.structs.replace(
        event,
        status="failed",
        reason="error",
        head=head.id if head else None,
        error=ErrorEvent(error.code, error.message, error.retry),
        stop_string=None,
        prompt_token_ids=None,
        output_token_ids=None,
    )
