"""The tool loop without I/O: what to send next, and when to stop."""

from __future__ import annotations

from tokenspeed.client.errors import ConnectionFailed, StepLimitExceeded
from tokenspeed.client.protocol.items import FunctionCallItem, FunctionCallOutputItem
from tokenspeed.client.tools import Toolset
from tokenspeed.client.turns import Turn

DEFAULT_MAX_STEPS = 16


class ToolLoop:
    """Follows the turns of one `Session.turn`.

    Attributes:
        tools: what runs the calls.
        steps: the turns so far.
        answers: of the last step's calls, as far as they were run. A turn's results travel in one input, so where
            another call is the caller's to answer, or the step broke off, these wait for the caller's.
    """

    def __init__(self, tools: Toolset, max_steps: int) -> None:
        if max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}; it must be at least 1")
        self.steps: tuple[Turn, ...] = ()
        self.answers: list[FunctionCallOutputItem] = []
        self._calls: list[FunctionCallItem] = []
        self.tools = tools
        self._max_steps = max_steps

    def after(self, turn: Turn) -> list[FunctionCallItem]:
        """Take a finished turn; returns the calls to run now, none if the loop is over.

        Raises:
            StepLimitExceeded: there are calls to run, but no step is left for their results.
        """
        self.steps = (*self.steps, turn)
        self.answers, self._calls = [], []
        if turn.reason not in ("tool_calls", "parse_error"):
            return []
        calls = [call for call in turn.tool_calls if self.tools.runs(call)]
        if calls and len(calls) == len(turn.tool_calls) and len(self.steps) >= self._max_steps:
            raise StepLimitExceeded(self._max_steps, self.result())
        self._calls = calls
        return calls

    @property
    def complete(self) -> bool:
        """Whether the answers are the next turn's input; else the caller has calls to answer first."""
        return len(self.answers) == len(self.steps[-1].tool_calls)

    @property
    def held(self) -> tuple[str, tuple[FunctionCallOutputItem, ...]]:
        """The answers that wait for the caller's, and the turn whose calls they answer."""
        return self.steps[-1].id, tuple(self.answers)

    def broke_off(self, head: str | None, error: BaseException) -> bool:
        """Whether a step that ended in `error` has left the session at `head` with calls that wait for results; then
        the error says how to go on."""
        if not self._calls or isinstance(error, ConnectionFailed) or self.steps[-1].id != head:
            return False
        turn = self.steps[-1]
        ran = {answer.call_id for answer in self.answers}
        calls = ", ".join(
            f"{call.name} ({'ran' if call.call_id in ran else 'did not run'})" for call in turn.tool_calls
        )
        error.add_note(
            f"The session stands at turn {turn.id}, whose calls wait for results: {calls}. Give results with "
            "session.turn([tool_output(call, …)]), which takes those that ran along where you give no other, or go "
            f"back with session.rewind({turn.parent or 'start'!r})."
        )
        return True

    def result(self) -> Turn:
        """The last turn, with the ones before it as its steps."""
        *earlier, last = self.steps
        return last.after(tuple(earlier))
