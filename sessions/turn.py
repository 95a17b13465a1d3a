"""A turn: a step of a conversation with its exact token ids, immutable like a commit."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from tokenspeed.client.protocol.events import Timings, TurnReason, TurnRecord, TurnStatus, Usage
from tokenspeed.client.protocol.items import FunctionCallItem, InputItem, Item
from tokenspeed.sessions.defaults import Defaults
from tokenspeed.sessions.formats.qwen import Cut
from tokenspeed.sessions.preamble import Preamble
from tokenspeed.sessions.tokenizer import Ids


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What a turn sends to the engine.

        0 … keep          keep … length
        ids of `base`     `fresh`

    Attributes:
        base: the turn whose ids (prompt and output) the prompt begins with; None for none.
        fresh: the ids after those; only these were tokenised or assembled anew.
        input_ids: the input by itself, from the end-of-turn token before it to `input_end`.
        preamble: system text and tools that the ids begin with.
        input_end: where the generation prompt begins; a warm-up has none and ends here.
        marks: positions whose checkpoint is worth keeping, ascending.
    """

    base: Turn | None
    keep: int
    fresh: Ids
    input_ids: Ids
    preamble: Preamble
    input_end: int
    marks: tuple[int, ...]

    @property
    def preamble_end(self) -> int:
        return len(self.preamble.ids)

    @property
    def length(self) -> int:
        return self.keep + len(self.fresh)

    def ids(self) -> Ids:
        return lineage(self.base, self.keep) + self.fresh

    def ids_from(self, start: int) -> Ids:
        """The ids after the first `start`."""
        return self.fresh[start - self.keep :] if start >= self.keep else self.ids()[start:]


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A finished turn that a session can stand on.

    Attributes:
        parent: the turn before it in the conversation; `prompt.base` is the parent or one of its ancestors.
        output_ids: the sampled ids, stop token included.
        hidden: runs `[start, end)` of `output_ids` that go when reasoning is dropped.
        cut: inside what the output stopped; None for text or a regular end.
        stop_string: the one that ended it; it is in `output_ids`, but in no item.
        defaults: those of the session that made it.
    """

    id: str
    parent: Turn | None = field(repr=False)  # a printed turn is one turn, not its whole past
    prompt: Prompt = field(repr=False)
    input: list[InputItem]
    output: list[Item]
    output_ids: Ids
    hidden: tuple[tuple[int, int], ...]
    cut: Cut | None
    status: TurnStatus
    reason: TurnReason
    usage: Usage
    timings: Timings
    defaults: Defaults = field(repr=False)
    stop_string: str | None = None
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", 1 if self.parent is None else self.parent.depth + 1)

    @property
    def warmed(self) -> bool:
        """Only its input was computed: no answer has begun, and what follows goes on right behind the input."""
        return self.reason == "warmed"

    @property
    def length(self) -> int:
        """Ids of prompt and output."""
        return self.prompt.length + len(self.output_ids)

    def ids(self) -> Ids:
        """Prompt and output."""
        return lineage(self, self.length)

    def visible_ids(self) -> Ids:
        """The output without its reasoning, as it was sampled."""
        kept: Ids = array("i")
        position = 0
        for start, end in self.hidden:
            kept += self.output_ids[position:start]
            position = end
        return kept + self.output_ids[position:]

    def calls(self) -> list[FunctionCallItem]:
        return [item for item in self.output if isinstance(item, FunctionCallItem)]

    def record(self, token_ids: bool = False) -> TurnRecord:
        return TurnRecord(
            id=self.id,
            parent=self.parent.id if self.parent else None,
            status=self.status,
            reason=self.reason,
            input=self.input,
            output=self.output,
            usage=self.usage,
            timings=self.timings,
            stop_string=self.stop_string,
            prompt_token_ids=self.prompt.ids().tolist() if token_ids else None,
            output_token_ids=self.output_ids.tolist() if token_ids else None,
        )


def lineage(turn: Turn | None, length: int) -> Ids:
    """The first `length` ids of a turn's prompt and output."""
    runs: list[Ids] = []
    while turn is not None and length > 0:
        own = turn.prompt.fresh + turn.output_ids
        if length > turn.prompt.keep:
            runs.append(own[: length - turn.prompt.keep])
        length = min(length, turn.prompt.keep)
        turn = turn.prompt.base
    ids: Ids = array("i")
    for run in reversed(runs):
        ids += run
    return ids


def path(turn: Turn | None) -> list[Turn]:
    """The turns from the conversation's first to this one."""
    turns: list[Turn] = []
    while turn is not None:
        turns.append(turn)
        turn = turn.parent
    return turns[::-1]
