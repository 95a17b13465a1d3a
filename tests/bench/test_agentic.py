from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tokenspeed.bench.agentic import Answer, Ask, Script, Workload, measure
from tokenspeed.bench.driver import BenchError
from tokenspeed.bench.in_process import EngineTarget
from tokenspeed.engine.core import EngineCore

SMALL = Workload(context=60, turns=4, new=15, generate=10)


def prompts(workload: Workload) -> list[int]:
    step = workload.new + workload.generate
    return [workload.context + turn * step for turn in range(workload.turns)]


@pytest.mark.parametrize("conversations", [1, 3])
def test_an_engine_reuses_all_but_what_is_new_and_one(start: Callable[..., EngineCore], conversations: int) -> None:
    workload = replace(SMALL, conversations=conversations)
    report = measure(EngineTarget(start()), workload)
    expected = prompts(workload)
    for number in range(1, conversations + 1):
        rows = [row for row in report.rows if row.conversation == number]
        assert [row.answer.prompt for row in rows] == expected
        assert [row.new for row in rows] == [60, 15, 15, 15]
        assert [row.answer.computed for row in rows] == [60, 16, 16, 16]
        assert [row.answer.output for row in rows] == [10] * 4
    assert report.hit_rate_bound == pytest.approx(1 - (60 + 3 * 15) / sum(expected))
    assert report.hit_rate == pytest.approx(1 - (60 + 3 * 16) / sum(expected))
    assert report.first_reused == 0
    assert report.as_dict()["rows"][1]["reused"] == expected[1] - 16


def test_without_a_prefix_cache_nothing_is_reused(start: Callable[..., EngineCore]) -> None:
    report = measure(EngineTarget(start(prefix_cache=False)), SMALL)
    assert report.hit_rate == 0
    assert report.hit_rate_bound > 0.6


def test_the_bound_of_the_workload_that_is_reported() -> None:
    whole = Workload()
    expected = prompts(whole)
    new = whole.context + (whole.turns - 1) * whole.new
    assert expected[-1] + whole.generate == whole.longest
    report = measure(Pretender(), whole)
    assert report.hit_rate_bound == pytest.approx(1 - new / sum(expected))
    assert report.hit_rate_bound == pytest.approx(0.914, abs=0.0005)


def test_what_is_timed_is_taken_from_the_arrivals() -> None:
    answer = Answer(100, 9, None, None, "", [0.5, 0.6, 0.7, 0.8, 1.3])
    assert answer.ttft_s == 0.5
    assert answer.tokens_per_s == pytest.approx(8 / 0.8)
    assert answer.itl_s == pytest.approx(0.05)  # four gaps of 0.1 s at the median, for eight tokens
    alone = Answer(100, 1, None, None, "", [0.5])
    assert (alone.tokens_per_s, alone.itl_s) == (None, None)


class Pretender:
    """Answers at once, as `change` has it."""

    cache_at_start = "pretended"
    shared = 0

    def __init__(self, change: Callable[[int, Answer], Answer] = lambda turn, answer: answer) -> None:
        self._change = change
        self._talks = 0

    def slack(self, generate: int) -> int:
        return 0

    def converse(self, scripts: Sequence[Script]) -> None:
        for script in scripts:
            self._talks += 1
            self._converse(script)

    def _converse(self, script: Script) -> None:
        history, turn, ask = 0, 0, next(script)
        while True:
            turn += 1
            answer = self._change(turn, self._answer(history, ask))
            history += ask.tokens + ask.generate
            try:
                ask = script.send(answer)
            except StopIteration:
                return

    def _answer(self, history: int, ask: Ask) -> Answer:
        return Answer(history + ask.tokens, ask.generate, history, ask.tokens, ask.seed, [0.1, 0.2])


@pytest.mark.parametrize(
    ("turn", "change", "complaint"),
    [
        (2, lambda answer: replace(answer, prompt=84, computed=14), "turn 2: the prompt has 84 tokens; its history of"),
        (3, lambda answer: replace(answer, computed=14), "95 reused tokens and 14 computed ones are not the prompt's"),
        (4, lambda answer: replace(answer, output=9), "9 tokens were generated; 10 were asked for"),
        (1, lambda answer: replace(answer, reused=1, computed=59), "1 tokens of the first turn came from the cache"),
    ],
)
def test_a_failed_gate_is_no_report(turn: int, change: Callable[[Answer], Answer], complaint: str) -> None:
    target = Pretender(lambda number, answer: change(answer) if number == turn else answer)
    with pytest.raises(BenchError, match=complaint):
        measure(target, SMALL)


def test_a_first_turn_answered_differently_is_no_report() -> None:
    said = iter("ab")
    with pytest.raises(BenchError, match="asked twice was answered 'a', then 'b'"):
        measure(Pretender(lambda turn, answer: replace(answer, said=next(said))), SMALL)


def test_what_a_server_does_not_tell_is_not_reported() -> None:
    report = measure(Pretender(lambda turn, answer: replace(answer, reused=None, computed=None)), SMALL)
    assert (report.hit_rate, report.first_reused) == (None, None)
    assert report.hit_rate_bound > 0
