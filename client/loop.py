"""The tool loop without I/O: what to send next, and when to stop."""

from __future__ import annotations

from tokenspeed.client.errors import StepLimitExceeded
from tokenspeed.client.protocol.items import FunctionCallItem, FunctionCallOutputItem
from tokenspeed.client.tools import Toolset
from tokenspeed.client.turns import Turn

DEFAULT_MAX_STEPS = 16


class ToolLoop:
    """Follows the turns of one `Session.turn`.

    Attributes:
        tools: what runs the calls.
        steps: the turns so far.
        held: answers that were run although another call of the same turn is the caller's to answer. A turn's results
            travel in one input, so these wait for the caller's.
    """

    def __init__(self, tools: Toolset, max_steps: int) -> None:
        if max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}; it must be at least 1")
        self.steps: tuple[Turn, ...] = ()
        self.held: list[FunctionCallOutputItem] = []
        self.tools = tools
        self._max_steps = max_steps

    def after(self, turn: Turn) -> list[FunctionCallItem]:
        """Take a finished turn; returns the calls to run now, none if the loop is over.

        Raises:
            StepLimitExceeded: there are calls to run, but no step is left for their results.
        """
        self.steps = (*self.steps, turn)
        if turn.reason not in ("tool_calls", "parse_error"):
            return []
        calls = [call for call in turn.tool_calls if self.tools.runs(call)]
        if calls and len(calls) == len(turn.tool_calls) and len(self.steps) >= self._max_steps:
            raise StepLimitExceeded(self._max_steps, self.result())
        return calls

    def answered(self, outputs: list[FunctionCallOutputItem]) -> list[FunctionCallOutputItem] | None:
        """The next turn's input once the calls were run; None if the caller has calls to answer first."""
        if len(outputs) == len(self.steps[-1].tool_calls):
            return outputs
        self.held = outputs
        return None

    def result(self) -> Turn:
        """The last turn, with the ones before it as its steps."""
        *earlier, last = self.steps
        return last.after(tuple(earlier))
