"""What a turn is to do."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.client.protocol.events import MissReason
from tokenspeed.client.protocol.items import InputItem
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.sessions.defaults import Defaults
from tokenspeed.sessions.turn import Prompt, Turn


@dataclass(frozen=True)
class TurnOrder:
    """A turn to be taken.

    Attributes:
        base, keep: the lineage that the engine goes on from, and how many of its ids are the prompt's first.
        generate: False is a warm-up.
        less: why the engine will find less than the session had, as far as the session knows.
    """

    parent: Turn | None
    items: list[InputItem]
    prompt: Prompt
    defaults: Defaults
    sampling: SamplingParams
    base: Turn | None
    keep: int
    generate: bool = True
    less: MissReason | None = None


def next_turn(
    parent: Turn | None,
    items: list[InputItem],
    prompt: Prompt,
    defaults: Defaults,
    sampling: SamplingParams,
    generate: bool,
) -> TurnOrder:
    """A turn after `parent`."""
    less: MissReason | None = None
    if parent is not None and prompt.preamble.ids != parent.prompt.preamble.ids:
        less = "updated"
    elif parent is not None and prompt.keep < parent.length:
        less = "reasoning_dropped"
    return TurnOrder(parent, items, prompt, defaults, sampling, prompt.base, prompt.keep, generate, less)


def another_answer(turn: Turn, prompt: Prompt, defaults: Defaults, sampling: SamplingParams) -> TurnOrder:
    """Another answer to the input of `turn`, whose state at the input's end is kept."""
    if prompt.preamble.ids != turn.prompt.preamble.ids:
        return TurnOrder(turn.parent, turn.input, prompt, defaults, sampling, prompt.base, prompt.keep, less="updated")
    return TurnOrder(turn.parent, turn.input, prompt, defaults, sampling, turn, prompt.input_end)
