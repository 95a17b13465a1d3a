"""Which states are kept, and what is computed once: counted through the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.messages import Cancel, Release, Stand

MakeLab = Callable[..., Any]


def answer(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens)


def ids(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(2, 90, count)]


@pytest.mark.parametrize("depth", [0, 2])
def test_forks_that_arrive_together_compute_what_they_share_once(
    lab: MakeLab, assert_exact: Callable[..., None], depth: int
) -> None:
    shared = ids(0, 60)
    engine = lab(depth=depth, junction_tokens=8, prefill_chunk=16, max_sequences=8)
    turns = [engine.submit([*shared, *ids(n, 5)], params=answer(3)) for n in range(1, 7)]
    results = engine.finish(turns)
    assert results[0].usage.computed == 65
    assert [result.usage.computed for result in results[1:]] == [5] * 5
    for turn in turns:
        assert_exact(engine, turn)


def test_forks_may_join_a_prefill_that_is_under_way(lab: MakeLab, assert_exact: Callable[..., None]) -> None:
    shared = ids(0, 90)
    engine = lab(junction_tokens=8, prefill_chunk=16)
    first = engine.submit([*shared, 1], params=answer(3))
    for _ in range(3):
        engine.tick()
    late = [engine.submit([*shared[:80], n], params=answer(3)) for n in (1, 2)]
    results = engine.finish([first, *late])
    assert [result.usage.computed for result in results] == [91, 1, 1]
    for turn in late:
        assert_exact(engine, turn)


def test_a_turn_that_waits_for_another_survives_its_end(lab: MakeLab) -> None:
    shared = ids(0, 90)
    engine = lab(junction_tokens=8, prefill_chunk=16)
    first = engine.submit([*shared, 1], params=answer(3))
    engine.tick()
    second = engine.submit([*shared, 2], params=answer(3))
    engine.tick()
    engine.core.submit(Cancel(first, "nothing"))
    (result,) = engine.finish([second])
    assert result.reason == "length"
    assert result.usage.computed == 91 - 32, "what the cancelled turn had computed is used"


def test_a_junction_is_kept_where_prompts_part(lab: MakeLab, assert_exact: Callable[..., None]) -> None:
    shared = ids(0, 50)
    engine = lab(junction_tokens=20, prefill_chunk=512)
    computed = [engine.run([*shared, *ids(n, 9)], params=answer(2)).usage.computed for n in (1, 2, 3)]
    assert computed == [59, 59, 9], "the second leaves a state where it parts from the first"
    few = lab(junction_tokens=51, prefill_chunk=512)
    computed = [few.run([*shared, *ids(n, 9)], params=answer(2)).usage.computed for n in (1, 2, 3)]
    assert computed == [59, 59, 59]
    assert_exact(engine, "turn3")


def test_a_long_prompt_keeps_states_at_intervals(lab: MakeLab, assert_exact: Callable[..., None]) -> None:
    prompt = ids(0, 100)
    engine = lab(checkpoint_interval=30, junction_tokens=1000)
    engine.run(prompt, params=answer(2))
    cut = engine.run([*prompt[:70], 5], params=answer(2))
    assert cut.usage.reused == 60
    assert_exact(engine, cut.turn)
    without = lab(checkpoint_interval=1000, junction_tokens=1000)
    without.run(prompt, params=answer(2))
    assert without.run([*prompt[:70], 5], params=answer(2)).usage.reused == 0


def test_states_that_were_superseded_go_before_those_that_sessions_stand_on(lab: MakeLab) -> None:
    engine = lab(rows=20, depth=0)
    heads = {}
    for session in range(4):
        turn = engine.run(ids(session, 20), params=answer(2), marks=(10,)).turn
        for step in range(4):
            following = engine.run([step + 3], parent=turn, params=answer(2)).turn
            engine.core.submit(Stand(on=following, off=turn))
            turn = following
        heads[session] = turn
    # 4 sessions × (5 ends + 1 mark) is more than there are rows: 19, one for the ring.
    for turn in heads.values():
        assert engine.run([7], parent=turn, params=answer(1)).usage.computed == 2


def test_a_head_that_others_have_passed_is_kept_for_its_session(lab: MakeLab) -> None:
    """Two sessions stand on one turn; one goes on and on, the other comes back later."""
    for standing in (True, False):
        engine = lab(rows=10, depth=0)
        first = engine.run(ids(0, 3), params=answer(2)).turn
        engine.core.submit(Stand(on=first))
        if standing:
            engine.core.submit(Stand(on=first))
        turn = first
        for step in range(20):
            following = engine.run([step + 3], parent=turn, params=answer(2)).turn
            engine.core.submit(Stand(on=following, off=turn))
            turn = following
        back = engine.run([9], parent=first, params=answer(1))
        assert (back.usage.computed == 2) == standing


def test_what_no_lineage_needs_goes_first(lab: MakeLab) -> None:
    engine = lab(rows=12, depth=0)
    kept = engine.run(ids(0, 30), params=answer(2)).turn
    for n in range(1, 30):
        turn = engine.run(ids(n, 30), params=answer(2)).turn
        engine.core.submit(Release([turn]))
    assert engine.run([9], parent=kept, params=answer(1)).usage.computed == 2


def test_of_two_states_the_one_that_saves_more_stays(lab: MakeLab) -> None:
    engine = lab(rows=8, depth=0, pages=200)
    ends = {}
    for n, length in ((0, 200), (1, 10), (2, 30), (3, 30), (4, 30), (5, 30), (6, 30), (7, 30)):
        result = engine.run(ids(n, length), params=answer(2))
        ends[n] = result.ids
        engine.core.submit(Release([result.turn]))
    engine.core.step()

    def kept(n: int) -> int:
        return int(engine.core.scheduler.cache.kept("t", np.asarray(ends[n], np.int32)))

    assert kept(0) == 201
    assert kept(1) == 0
