"""Sequences side by side: each answers as it does alone, and what only lies in the cache stays as it is to the byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.messages import Cancel, Tokens

pytestmark = pytest.mark.xdist_group("engine")

NEAR_TIE = 1e-3
"""Gaps between the two largest logits that a sum in another order could close: float32 moves logits by about 1e-5."""
POISON = 50
"""An id that no prompt holds and no answer below."""


def answer(tokens: int, **how: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "ignore_eos": True, "max_tokens": tokens} | how))


def alone(lab: Any, prompt: list[int], tokens: int) -> list[int] | None:
    """A prompt's answer, None if it was a near tie anywhere."""
    turn = lab.run(prompt, params=answer(tokens, logprobs=True, top_logprobs=2), tenant="alone")
    mine = [event for event in lab.events if isinstance(event, Tokens) and event.turn == turn.turn]
    gaps = [top[0][1] - top[1][1] for event in mine for top in event.top_logprobs]
    return turn.output if min(gaps) > NEAR_TIE and POISON not in turn.output else None


@pytest.fixture(scope="module")
def answers(engine: Any) -> list[tuple[list[int], list[int]]]:
    """Nine prompts of 3 to 75 tokens and their answers of 6 to 46 tokens, each by a sequence alone."""
    rng = np.random.default_rng(0)
    found: list[tuple[list[int], list[int]]] = []
    while len(found) < 9:
        prompt = rng.integers(2, POISON, 3 + 9 * len(found)).tolist()
        output = alone(engine, prompt, 6 + 5 * (4 * len(found) % 9))
        if output is not None:
            found.append((prompt, output))
    return found


class Canaries:
    """Every state and every K and V that nodes of the cache hold now, as bytes."""

    def __init__(self, lab: Any) -> None:
        self._core = lab.core
        self._nodes = [(node, node.row) for node in self._core.scheduler.cache.nodes if not node.husk]
        assert len(self._nodes) >= 5
        self._kept = self._bytes()

    def _bytes(self) -> list[Tensor]:
        pages, rows = self._core.executor.pages, self._core.executor.rows
        size, device = pages.geometry.page_size, self._core.executor.model.device
        held = []
        for node, row in self._nodes:
            if row:
                held += [tensor[row] for tensor in (*rows.conv, *rows.matrix, rows.hidden)]
            table = torch.tensor(node.page_table(size), device=device)
            positions = torch.arange(node.end, device=device)
            at = table[positions // size] * size + positions % size
            for layer in range(len(pages.k)):
                held += [pages.flat_k(layer)[at], pages.flat_v(layer)[at]]
        return [tensor.contiguous().view(torch.uint8).cpu().clone() for tensor in held]

    def check(self) -> None:
        for node, row in self._nodes:
            assert not node.removed
            assert node.row == row
        for number, (now, then) in enumerate(zip(self._bytes(), self._kept, strict=True)):
            assert torch.equal(now, then), f"canary {number} has changed"


def residents(lab: Any) -> Any:
    """Sessions that nobody runs: extended, forked, cancelled, ended in the middle of a page and at its end."""
    first = lab.run(list(range(2, 42)), params=answer(9), marks=(16, 33), tenant="canary")
    lab.run([5, 6, 7], parent=first.turn, params=answer(12), tenant="canary")
    lab.run([8], parent=first.turn, params=answer(16), tenant="canary")
    lab.run([9] * 70, parent=first.turn, keep=20, params=answer(3), tenant="canary")
    lab.run([3, 4], params=answer(40), tenant="canary", cancel_at=7)
    return first


@pytest.mark.parametrize("where", ["page", "row"])
def test_a_changed_canary_is_seen(lab: Any, where: str) -> None:
    residents(lab)
    canaries = Canaries(lab)
    node = next(node for node in lab.core.scheduler.cache.nodes if node.row)
    executor = lab.core.executor
    tensor, at = (executor.pages.v[0], node.pages[0]) if where == "page" else (executor.rows.matrix[0], node.row)
    tensor[at].view(-1)[0] += 1
    with pytest.raises(AssertionError, match="has changed"):
        canaries.check()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9])
def test_each_answers_as_it_does_alone(lab: Any, answers: list[tuple[list[int], list[int]]], count: int) -> None:
    """At the edges of the buckets and beside them. They end one after the other, so steps shrink through all sizes."""
    residents(lab)
    canaries = Canaries(lab)
    chosen = answers[-count:]
    turns = [lab.submit(prompt, params=answer(len(output)), tenant="side") for prompt, output in chosen]
    results = lab.finish(turns)
    assert [result.output for result in results] == [output for _, output in chosen]
    canaries.check()


def test_cancelled_neighbours_leave_no_trace(lab: Any, answers: list[tuple[list[int], list[int]]]) -> None:
    parent = residents(lab)
    canaries = Canaries(lab)
    turns = [lab.submit(prompt, params=answer(len(output)), tenant="side") for prompt, output in answers[:6]]
    cut = [lab.submit([7 + number], parent=parent.turn, params=answer(60), tenant="canary") for number in range(3)]
    for turn in cut:
        for _ in range(4):
            lab.tick()
        lab.core.submit(Cancel(turn, "nothing"))
    results = lab.finish([*turns, *cut])
    assert [result.output for result in results[:6]] == [output for _, output in answers[:6]]
    assert [result.reason for result in results[6:]] == ["cancelled"] * 3
    canaries.check()


def finite(lab: Any) -> bool:
    """Whether all that nodes of the cache hold is."""
    pages, rows = lab.core.executor.pages, lab.core.executor.rows
    size = pages.geometry.page_size
    for node in lab.core.scheduler.cache.nodes:
        if node.row and not all(bool(t[node.row].isfinite().all()) for t in (*rows.conv, *rows.matrix, rows.hidden)):
            return False
        table, positions = torch.tensor(node.page_table(size)), torch.arange(node.end)
        at = (table[positions // size] * size + positions % size).to(pages.k[0].device)
        for layer in range(len(pages.k)):
            if not bool(pages.flat_k(layer)[at].isfinite().all() & pages.flat_v(layer)[at].isfinite().all()):
                return False
    return True


@pytest.mark.parametrize("where", ["embedding", "page", "row"])
def test_what_is_not_finite_fails_its_turn_alone(
    lab: Any, answers: list[tuple[list[int], list[int]]], where: str
) -> None:
    """A NaN in a token's embedding hits a prompt; one in a page or in a state a step in the middle of an answer."""
    parent = residents(lab)
    core = lab.core
    expected = lab.run([6], parent=parent.turn, params=answer(30), tenant="canary").output
    known = set(core.scheduler.cache.nodes)
    canaries = Canaries(lab)
    turns = [lab.submit(prompt, params=answer(len(output)), tenant="side") for prompt, output in answers[1:7]]
    embedding = core.executor.model.parameters["embedding"]
    kept = embedding[POISON].clone()
    if where == "embedding":
        embedding[POISON] = torch.nan
    own = [POISON] if where == "embedding" else [6, 7]
    victim = lab.submit(own, parent=parent.turn, params=answer(100), tenant="canary")
    if where != "embedding":
        for _ in range(500):
            lab.tick()
            state = core.scheduler._turns[victim]
            if len(state.turn.outputs) >= 40:
                break
        tail = state.tail
        if where == "page":
            core.executor.pages.k[0][tail.pages[1]] = torch.nan
        else:
            for row in tail.ring:
                core.executor.rows.matrix[0][row] = torch.nan
    results = lab.finish([*turns, victim])
    embedding[POISON] = kept
    assert results[-1].reason == "error"
    assert len(results[-1].output) in ((0,) if where == "embedding" else (40, 41, 42, 43))
    assert [result.output for result in results[:-1]] == [output for _, output in answers[1:7]]
    assert lab.refusal([1], parent=victim, tenant="canary").code == "unknown_lineage"
    canaries.check()
    assert finite(lab), "something that is not finite was sealed"
    new = set(core.scheduler.cache.nodes) - known
    assert {node.tenant for node in new} <= {"side"}
    assert lab.run([6], parent=parent.turn, params=answer(30), tenant="canary").output == expected
    # The pages and rows that it had go to others, who do not see what is in them.
    turns = [lab.submit(prompt, params=answer(len(output)), tenant="later") for prompt, output in answers]
    assert [result.output for result in lab.finish(turns)] == [output for _, output in answers]
