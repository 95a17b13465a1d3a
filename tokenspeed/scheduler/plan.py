"""What the scheduler reads (log entries) and writes (plans). Plain data: a plan can be compared and sent."""

from __future__ import annotations

import msgspec

from tokenspeed.scheduler.messages import Allow, EngineCommand, EngineEvent


class Sampled(msgspec.Struct, array_like=True):
    """One row of a step's result.

    `run` names the admission it belongs to. `token` is -1 where the logits were not finite. `live` is False for a
    sequence that had finished on the device before this step; then the rest means nothing. `decoded`: a token went
    through the model for it, rather than a prompt's end. `logprob` and `top`, if asked for.
    """

    run: int
    token: int
    live: bool
    decoded: bool
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


class LogEntry(msgspec.Struct):
    """All that the scheduler learns in one tick. `time_s` is the only clock it sees."""

    number: int
    time_s: float
    commands: list[EngineCommand | Allow]
    results: list[Sampled]


class Choice(msgspec.Struct, array_like=True, frozen=True):
    """How a run's tokens are chosen: `SamplingParams`, for the device.

    `penalties`: repetition, presence and frequency, or None; then `prompt` and `output` are the ids they look at.
    `logprobs`: how many of the most likely to report beside the chosen one; None for nothing. `forced`: ids of the
    positions from `forced_from` on. Ids are little-endian int32.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    logprobs: int | None
    penalties: tuple[float, float, float] | None
    bias: tuple[tuple[int, float], ...]
    prompt: bytes
    output: bytes
    forced_from: int
    forced: bytes


class Admit(msgspec.Struct, array_like=True):
    """A place of the step channel starts over with a new run.

    `ring`: the rows that its states go through, one step after the other. `limit`: the length (prompt and output) at
    which it is finished.
    """

    place: int
    run: int
    ring: list[int]
    limit: int
    stop_ids: list[int]
    choice: Choice


class Prefill(msgspec.Struct, array_like=True):
    """A chunk of a place's prompt.

    `tokens`: little-endian int32 ids from position `start` on. KV of positions below `write_from` is there already:
    their writes go to the sink. `read_row` 0 means no history; `write_row` takes the state after the chunk. `stores`
    are (tokens of this chunk, row) where a state in its inside is kept. `sample`: the prompt ends here.
    """

    place: int
    run: int
    start: int
    tokens: bytes
    write_from: int
    read_row: int
    write_row: int
    stores: list[tuple[int, int]]
    sample: bool


class Plan(msgspec.Struct):
    """One step, to be executed in this order: page copies, admissions, masks, page table, prefill, decode.

    `copies`: (from page, to page). `masks`: (place, mask of `Allow`). `table`: (place, page index, page). `decodes`:
    (place, run), one token each. `events` go out now.
    """

    number: int
    copies: list[tuple[int, int]]
    admits: list[Admit]
    table: list[tuple[int, int, int]]
    prefills: list[Prefill]
    decodes: list[tuple[int, int]]
    events: list[EngineEvent]
    masks: list[tuple[int, bytes]] = []

    @property
    def idle(self) -> bool:
        """Nothing for the device to do."""
        return not (self.copies or self.admits or self.prefills or self.decodes)
