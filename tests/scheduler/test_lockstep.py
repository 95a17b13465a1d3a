from __future__ import annotations

import numpy as np

from tokenspeed.config.sampling import SamplingParams
from tokenspeed.scheduler.limits import Limits
from tokenspeed.scheduler.messages import Allow, Cancel, Generate
from tokenspeed.scheduler.plan import LogEntry
from tokenspeed.scheduler.scheduler import Scheduler

LIMITS = Limits(
    page_size=4,
    pages=20,
    rows=20,
    max_sequences=1,
    prefill_chunk=8,
    depth=1,
    max_context=24,
    max_queue=6,
    vocab_size=5,
    eos_token_ids=(4,),
)
MASK = b"\3\0\0\0"


def generate(turn: str, lockstep: bool) -> Generate:
    ids = np.asarray([1, 2, 3], "<i4").tobytes()
    return Generate(turn, "t", ids, SamplingParams(temperature=0), lockstep=lockstep)


def test_a_mask_does_not_outlive_its_turn() -> None:
    """The place goes to another turn in the very tick in which the mask came."""
    scheduler = Scheduler(LIMITS)
    first = scheduler.tick(LogEntry(0, 0.0, [generate("a", True), Allow("a", MASK), generate("b", True)], []))
    assert first.masks == [(0, MASK)]
    second = scheduler.tick(LogEntry(1, 1.0, [Allow("a", b"\1\0\0\0"), Cancel("a")], []))
    assert [admit.place for admit in second.admits] == [0]
    assert second.masks == []


def test_only_turns_in_lockstep_take_masks() -> None:
    scheduler = Scheduler(LIMITS)
    plan = scheduler.tick(LogEntry(0, 0.0, [generate("a", False), Allow("a", MASK), Allow("unknown", MASK)], []))
    assert plan.admits
    assert plan.masks == []
