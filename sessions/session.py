"""A session: a movable head over turns, with the defaults of the turns to come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import Reused, SessionRecord, SessionState, SessionTotals, Usage
from tokenspeed.client.protocol.items import FunctionCallOutputItem, InputItem, MessageItem
from tokenspeed.sessions.bounds import MAX_ITEMS, check_number
from tokenspeed.sessions.defaults import Defaults
from tokenspeed.sessions.turn import Turn, path

if TYPE_CHECKING:
    from tokenspeed.sessions.running import RunningTurn


class Totals:
    """Sums over the turns that a session took itself, however they ended."""

    def __init__(self) -> None:
        self.turns = self.prompt = self.reused = self.computed = self.output = self.reasoning = 0

    def add(self, usage: Usage) -> None:
        self.turns += 1
        self.prompt += usage.prompt
        self.reused += usage.reused.total
        self.computed += usage.computed
        self.output += usage.output
        self.reasoning += usage.reasoning

    def report(self) -> SessionTotals:
        return SessionTotals(
            turns=self.turns,
            prompt=self.prompt,
            reused=Reused(device=self.reused),
            computed=self.computed,
            output=self.output,
            reasoning=self.reasoning,
            hit_rate=self.reused / self.prompt if self.prompt else 0.0,
        )


@dataclass(eq=False)
class Session:
    """`running` is the turn under way; `preparing` is true while its input is being tokenised, `settling` while its end
    is on its way to the disk; `latest` is the id of the turn begun last."""

    id: str
    tenant: str
    defaults: Defaults
    head: Turn | None = None
    running: RunningTurn | None = None
    preparing: bool = False
    settling: bool = False
    latest: str | None = None
    totals: Totals = field(default_factory=Totals)

    @property
    def state(self) -> SessionState:
        return "running" if self.running or self.preparing or self.settling else "idle"

    @property
    def length(self) -> int:
        """Ids that the next turn starts from."""
        return self.head.length if self.head else len(self.defaults.preamble.ids)

    def check_idle(self) -> None:
        """Raises: SessionError `session_busy`."""
        if self.state == "running":
            turn = f" {self.running.id}" if self.running else ""
            raise SessionError("session_busy", f"session {self.id} is taking turn{turn}; it takes one at a time")

    def check_head(self, expected: str | None) -> None:
        """`expected`: a turn's id, or `start`; None expects nothing. Raises: SessionError `head_moved`."""
        head = self.head.id if self.head else None
        if expected is not None and expected != (head or "start"):
            message = f"session {self.id} stands at {head or 'start'}, not at {expected}"
            raise SessionError("head_moved", message, detail={"expected": expected, "head": head})

    def turn_in_lineage(self, turn_id: str) -> Turn:
        """Raises: SessionError `turn_not_found`."""
        for turn in path(self.head):
            if turn.id == turn_id:
                return turn
        raise SessionError("turn_not_found", f"session {self.id} has no turn {turn_id} in its lineage")

    def record(self, model: str, max_context: int) -> SessionRecord:
        defaults = self.defaults
        return SessionRecord(
            id=self.id,
            model=model,
            state=self.state,
            head=self.head.id if self.head else None,
            instructions=defaults.instructions,
            tools=defaults.tools,
            sampling=defaults.sampling,
            reasoning=defaults.reasoning,
            labels=defaults.labels,
            turns=self.head.depth if self.head else 0,
            tokens=self.length,
            prefix_tokens=len(defaults.preamble.ids),
            remaining=max(0, max_context - self.length),
            running=self.running.id if self.running else None,
        )


def checked_input(given: str | list[InputItem], head: Turn | None, generate: bool = True) -> list[InputItem]:
    """A turn's input as items, if it may follow `head`.

    Where the head ended in `tool_calls`, each of its calls wants one result in this input, beside which messages may
    stand; a user's message alone is refused, for the model would never learn what became of its calls. Calls of a
    turn that ended otherwise (cut, cancelled, unreadable) need not be answered; but the model tells results apart by
    their order, so a result wants those of all calls before its own. After a warm-up the input may be empty: its own
    input is answered, if the turn is to generate.

    Raises:
        SessionError: `bad_request`, `unknown_call_id`, `missing_tool_result`.
    """
    items: list[InputItem] = [MessageItem("user", given)] if isinstance(given, str) else given
    check_number("the number of input items", len(items), MAX_ITEMS)
    if given in ("", []) and head is not None and head.warmed and generate:
        return []
    if not any(isinstance(item, FunctionCallOutputItem) or item.text for item in items):
        raise SessionError("bad_request", "the input is empty; a turn needs a message or a tool result")
    calls = [call.call_id for call in head.calls()] if head else []
    unanswered, answered = list(calls), 0
    for item in items:
        if not isinstance(item, FunctionCallOutputItem):
            continue
        if item.call_id not in unanswered:
            state = "has its result already" if item.call_id in calls else "is not one of the last turn's calls"
            raise SessionError("unknown_call_id", f"{item.call_id} {state}", detail={"open_calls": unanswered})
        unanswered.remove(item.call_id)
        answered = max(answered, calls.index(item.call_id) + 1)
    all_of_them = head is not None and head.reason == "tool_calls"
    waiting = [call for call in (calls if all_of_them else calls[:answered]) if call in unanswered]
    if waiting:
        message = (
            f"the last turn's calls wait for results: {', '.join(waiting)}; "
            f"give one for each in one input, or rewind to {head.parent.id if head and head.parent else 'start'}"
        )
        raise SessionError("missing_tool_result", message, detail={"open_calls": unanswered})
    return items
