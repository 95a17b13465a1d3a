"""Turns in lockstep: each token is chosen once the host has seen the one before, from the ids that it then allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.messages import Ended, Generate
from tokenspeed.scheduler.plan import LogEntry, Plan

MakeLab = Callable[..., Any]
VOCABULARY = 96
PROMPT = [int(token) for token in np.random.default_rng(0).integers(2, 90, 37)]
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def answer(tokens: int, **how: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "ignore_eos": True, "max_tokens": tokens} | how))


def only(*tokens: int) -> bytes:
    """A mask that allows these ids."""
    bits = np.zeros(VOCABULARY, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


class Guide:
    """Remembers what it was asked."""

    def __init__(self, mask: Callable[[str, int], bytes | None]) -> None:
        self._mask = mask
        self.seen: dict[str, list[int]] = {}

    def __call__(self, turn: str, token: int | None) -> bytes | None:
        seen = self.seen.setdefault(turn, [])
        if token is not None:
            seen.append(token)
        return self._mask(turn, len(seen))


@DEPTHS
@pytest.mark.parametrize("mask", [None, only(*range(VOCABULARY))])
def test_where_all_is_allowed_the_ids_are_those_without(
    lab: MakeLab, assert_exact: Callable[..., None], depth: int, mask: bytes | None
) -> None:
    for how in ({}, {"temperature": 0.9, "seed": 3, "top_p": 0.9}):
        expected = lab().run(PROMPT, params=answer(12, **how)).output
        engine = lab(depth=depth)
        engine.core.guide = guide = Guide(lambda turn, number: mask)
        turn = engine.run(PROMPT, params=answer(12, **how), lockstep=True)
        assert turn.output == expected
        # What follows the last token is asked for too: that the turn ends there is for the scheduler to find.
        assert guide.seen == {turn.turn: expected}
        assert_exact(engine, turn.turn)


@DEPTHS
def test_a_mask_decides_the_very_next_token(lab: MakeLab, assert_exact: Callable[..., None], depth: int) -> None:
    engine = lab(depth=depth, prefill_chunk=10)
    plain = lab().run(PROMPT, params=answer(12)).output
    must = {0: 7, 1: 8, 4: 9}
    engine.core.guide = Guide(lambda turn, number: only(must[number]) if number in must else None)
    turn = engine.run(PROMPT, params=answer(12), lockstep=True)
    expected: list[int] = []
    for number in range(12):
        free = lab().run([*PROMPT, *expected], params=answer(1)).output
        expected.append(must.get(number, free[0]))
    assert turn.output == expected
    assert turn.output != plain
    assert_exact(engine, turn.turn)
    following = engine.run(PROMPT, params=answer(12))
    assert following.output == plain, "the place still has the mask"


@DEPTHS
def test_of_several_allowed_ids_the_likeliest_is_chosen(lab: MakeLab, depth: int) -> None:
    allowed = [int(token) for token in np.random.default_rng(1).choice(VOCABULARY, 9, replace=False)]
    engine = lab(depth=depth)
    engine.core.guide = Guide(lambda turn, number: only(*allowed))
    turn = engine.run(PROMPT, params=answer(8), lockstep=True)
    other = lab()
    for position, token in enumerate(turn.output):
        other.run([*PROMPT, *turn.output[:position]], params=answer(1))
        logits = other.logits[-1]
        assert token == max(allowed, key=lambda candidate: float(logits[candidate]))


@DEPTHS
def test_neighbours_lose_no_tick(lab: MakeLab, depth: int) -> None:
    """A turn in lockstep takes every (depth + 1)th step; the others' ids and ticks are as they were."""

    def together(lockstep: bool) -> tuple[list[list[int]], list[int], list[list[int]]]:
        engine = lab(depth=depth, prefill_chunk=512)
        ended: dict[str, int] = {}
        steps: list[list[int]] = []

        def on_tick(entry: LogEntry, plan: Plan) -> None:
            ended.update({event.turn: entry.number for event in plan.events if isinstance(event, Ended)})
            steps.append([run for _, run in plan.decodes])

        engine.core.on_tick = on_tick
        engine.core.guide = Guide(lambda turn, number: None)
        turns = [
            engine.submit(PROMPT[:9], params=answer(20)),
            engine.submit(PROMPT, params=answer(8), lockstep=lockstep),
            engine.submit(PROMPT[:20], params=answer(15)),
        ]
        results = engine.finish(turns)
        return [result.output for result in results], [ended[turn] for turn in turns], steps

    free, free_ends, free_steps = together(False)
    held, held_ends, held_steps = together(True)
    assert held == free
    assert [held_ends[0], held_ends[2]] == [free_ends[0], free_ends[2]]
    # Its first token comes of its prefill, in tick 0, and is seen depth + 1 ticks later; so on for seven more.
    assert held_ends[1] == 8 * (depth + 1)
    ticks = [tick for tick, runs in enumerate(held_steps) if 2 in runs]
    assert ticks == [number * (depth + 1) for number in range(1, 8)]
    assert sum(run == 2 for runs in free_steps for run in runs) >= 7


def test_a_turn_that_gave_way_goes_on_with_its_mask(lab: MakeLab) -> None:
    """The mask of the token that is next belongs to the turn, not to the place that it had."""
    rng = np.random.default_rng(2)
    prompts = [[int(token) for token in rng.integers(2, 90, 30)] for _ in range(5)]

    def mask(turn: str, number: int) -> bytes | None:
        return only(*range(number % 7, VOCABULARY, 7)) if number % 3 else None

    def run(engine: Any) -> Any:
        engine.core.guide = Guide(mask)
        turns = [
            engine.submit(prompt, params=answer(30), lockstep=number % 2 == 0) for number, prompt in enumerate(prompts)
        ]
        return engine.finish(turns)

    expected = [result.output for result in run(lab())]
    results = run(lab(depth=1, pages=14, rows=10, max_context=64, max_sequences=4))
    assert [result.output for result in results] == expected
    assert sum(result.usage.recomputed for result in results) > 0, "nothing was preempted"


def test_a_mask_that_allows_nothing_fails_the_turn(lab: MakeLab) -> None:
    engine = lab(depth=1)
    first = engine.run(PROMPT, params=answer(5))
    engine.core.guide = Guide(lambda turn, number: only() if number == 3 else None)
    turn = engine.submit([5], parent=first.turn, params=answer(9), lockstep=True)
    (failed,) = engine.finish([turn])
    assert (failed.reason, len(failed.output)) == ("error", 3)
    assert engine.refusal([1], parent=turn).code == "unknown_lineage"
    assert engine.run([5], parent=first.turn, params=answer(5)).reason == "length"


def test_a_mask_of_the_wrong_size_is_an_error_of_the_guide(lab: MakeLab) -> None:
    engine = lab()
    engine.core.guide = Guide(lambda turn, number: b"\xff" * 4)
    with pytest.raises(ValueError, match="4 bytes; 12 are needed"):
        engine.core.submit(Generate("t", "t", b"\1\0\0\0", answer(1), lockstep=True))


def test_options_that_masks_stand_beside(lab: MakeLab) -> None:
    engine = lab(depth=1)
    engine.core.guide = Guide(lambda turn, number: only(3, 5, 7))
    how = {"temperature": 1.0, "seed": 1, "top_k": 2, "frequency_penalty": 0.5, "logit_bias": ((9, 100.0),)}
    turn = engine.run(PROMPT, params=answer(15, **how), lockstep=True)
    assert set(turn.output) <= {3, 5, 7}
    assert len(set(turn.output)) > 1
