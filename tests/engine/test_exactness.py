"""Reuse never changes the answer: float64 logits of every lineage equal a fresh engine's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.messages import Cancel, EngineEvent, Progress

MakeLab = Callable[..., Any]
PROMPT = [int(token) for token in np.random.default_rng(0).integers(2, 90, 37)]


def answer(tokens: int, **how: Any) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens, **how)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(("page_size", "chunk"), [(8, 16), (5, 7), (1, 64)])
def test_extend_fork_and_rewind(
    lab: MakeLab, assert_exact: Callable[..., None], depth: int, page_size: int, chunk: int
) -> None:
    engine = lab(depth=depth, page_size=page_size, pages=400, prefill_chunk=chunk)
    first = engine.run(PROMPT, params=answer(11), marks=(9, 33))
    second = engine.run([7, 8, 9], parent=first.turn, params=answer(6))
    fork = engine.run([70, 71], parent=first.turn, params=answer(5))
    rewound = engine.run([8], parent=second.turn, keep=33, params=answer(4))
    deeper = engine.run([3] * 20, parent=fork.turn, params=answer(3))
    assert second.usage.computed == 4
    assert fork.usage.computed == 3
    assert rewound.usage.computed == 1
    assert deeper.usage.computed == 21
    for turn in (first, second, fork, rewound, deeper):
        assert_exact(engine, turn.turn)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_cancel_at_every_position(lab: MakeLab, fresh_logits: Callable[..., Any], depth: int) -> None:
    engine = lab(depth=depth)
    whole = engine.run(PROMPT, params=answer(42))
    for position in range(1, 41):
        cut = engine.run(PROMPT, params=answer(42), cancel_at=position)
        assert cut.reason == "cancelled"
        # The steps in flight when the cancel was sent are not kept, but one result may arrive with it.
        assert cut.output == whole.output[: len(cut.output)]
        assert position <= len(cut.output) <= position + 1
        got = engine.logits_after(cut.turn, [5])
        torch.testing.assert_close(got, fresh_logits([*cut.ids, 5]), rtol=1e-9, atol=1e-9)
        follow = engine.run([5, 6], parent=cut.turn, params=answer(1))
        assert follow.usage.computed <= 3


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("ticks", range(5))
def test_cancel_in_the_queue_and_in_prefill(
    lab: MakeLab, assert_exact: Callable[..., None], depth: int, ticks: int
) -> None:
    engine = lab(depth=depth, prefill_chunk=10)
    turn = engine.submit(PROMPT, params=answer(4))
    for _ in range(ticks):
        engine.tick()
    engine.core.submit(Cancel(turn))
    (cut,) = engine.finish([turn])
    assert cut.reason == "cancelled"
    assert cut.usage.computed == min(37, 10 * ticks)
    assert_exact(engine, turn)
    follow = engine.run([5], parent=turn, params=answer(1))
    assert follow.usage.prompt == 38 + len(cut.output)


def test_cancel_keeping_nothing_leaves_the_parent_as_it_was(lab: MakeLab, assert_exact: Callable[..., None]) -> None:
    engine = lab(depth=1)
    first = engine.run(PROMPT, params=answer(5))
    turn = engine.submit([4, 5, 6], parent=first.turn, params=answer(9))
    for _ in range(5):
        engine.tick()
    engine.core.submit(Cancel(turn, "nothing"))
    engine.finish([turn])
    assert engine.refusal([1], parent=turn).code == "unknown_lineage"
    assert_exact(engine, first.turn)
    assert engine.run([9], parent=first.turn, params=answer(1)).usage.computed == 2


def test_turns_side_by_side_do_not_see_each_other(lab: MakeLab) -> None:
    rng = np.random.default_rng(1)
    prompts = [[int(token) for token in rng.integers(2, 90, length)] for length in (1, 3, 8, 17, 31, 40)]
    alone = [lab().run(prompt, params=answer(12)).output for prompt in prompts]
    for depth in (0, 2):
        engine = lab(depth=depth, max_sequences=4)
        turns = [engine.submit(prompt, params=answer(12)) for prompt in prompts]
        assert [result.output for result in engine.finish(turns)] == alone


def test_shortage_preempts_and_evicts_without_changing_a_token(lab: MakeLab) -> None:
    rng = np.random.default_rng(2)
    prompts = [[int(token) for token in rng.integers(2, 90, 30)] for _ in range(5)]
    for params in (answer(30), SamplingParams(temperature=0.8, seed=11, max_tokens=30, ignore_eos=True)):
        roomy = lab()
        expected = [roomy.run(prompt, params=params).output for prompt in prompts]
        tight = lab(depth=1, pages=14, rows=10, max_context=64, max_sequences=4)
        turns = [tight.submit(prompt, params=params) for prompt in prompts]
        results = tight.finish(turns)
        assert [result.output for result in results] == expected
        assert sum(result.usage.recomputed for result in results) > 0, "nothing was preempted"


def test_an_evicted_lineage_is_recomputed_and_says_so(lab: MakeLab, assert_exact: Callable[..., None]) -> None:
    engine = lab()
    first = engine.run(PROMPT, params=answer(5))
    engine.core.scheduler.cache.evict_all()
    again = engine.run([5], parent=first.turn, params=answer(3))
    assert again.started is not None
    assert again.started.miss_reason == "evicted"
    assert again.usage.reused == 0
    assert_exact(engine, first.turn)


def test_without_the_prefix_cache_every_turn_computes_its_prompt(lab: MakeLab) -> None:
    warm, cold = lab(), lab(prefix_cache=False)
    outputs = []
    for engine, reused, reason in ((warm, 41, None), (cold, 0, "off")):
        first = engine.run(PROMPT, params=answer(5))
        second = engine.run([5, 6], parent=first.turn, params=answer(9))
        assert (second.usage.reused, second.usage.computed) == (reused, 44 - reused)
        assert second.started.miss_reason == reason
        outputs.append(second.output)
    assert outputs[0] == outputs[1]


def test_only_the_state_was_dropped(lab: MakeLab, assert_exact: Callable[..., None]) -> None:
    """Tokens whose KV is there are computed again for their state, and their KV is left alone (law 3)."""
    engine = lab()
    first = engine.run(PROMPT, params=answer(12), marks=(9,))
    cache = engine.core.scheduler.cache
    (end,) = [node for node in cache.nodes if node.end == 48]
    cache._drop_row(end)
    before = [tensor.clone() for tensor in engine.core.executor.pages.k]
    again = engine.run([5, 6], parent=first.turn, params=answer(1))
    assert again.usage.reused == 9
    for layer, (was, now) in enumerate(zip(before, engine.core.executor.pages.k, strict=True)):
        # Rows that nobody has written may hold NaN.
        changed = ~((was == now) | (was.isnan() & now.isnan())).all(-1).all(-1)
        changed[0] = False  # the sink
        assert int(changed.sum()) <= 3, layer
    assert_exact(engine, first.turn)


def test_tenants_do_not_share(lab: MakeLab) -> None:
    engine = lab()
    first = engine.run(PROMPT, params=answer(3), tenant="a", marks=(37,))
    assert engine.run(PROMPT, params=answer(3), tenant="b").usage.reused == 0
    assert engine.run([*PROMPT, 4], params=answer(3), tenant="a").usage.reused == 37
    assert engine.refusal([1], parent=first.turn, tenant="b").code == "unknown_lineage"


def test_what_the_operator_shares_every_tenant_reuses(lab: MakeLab, assert_exact: Callable[..., None]) -> None:
    engine = lab(shared_prefixes=[np.asarray(PROMPT[:20], "<i4").tobytes()], prefill_chunk=512)
    first = engine.run(PROMPT, params=answer(3), tenant="a", marks=(20,))
    other = engine.run([*PROMPT[:20], 5], params=answer(3), tenant="b", marks=(20,))
    assert (first.usage.reused, other.usage.reused) == (20, 20)
    assert engine.run(PROMPT, params=answer(3), tenant="b").usage.reused == 20, "a's own part is not shared"
    assert engine.run([5], parent=first.turn, params=answer(1), tenant="a").usage.computed == 2
    assert_exact(engine, engine.run([7], params=answer(2)).turn)
    engine.core.scheduler.cache.evict_all()
    assert engine.run(PROMPT, params=answer(3), tenant="a").usage.reused == 0
    with pytest.raises(ValueError, match="shared prefix"):
        lab(shared_prefixes=[b""])


def test_a_prompt_computes_only_what_its_preamble_has_not(lab: MakeLab, assert_exact: Callable[..., None]) -> None:
    engine = lab(prefill_chunk=512)
    engine.run(PROMPT, params=answer(3), marks=(20, 36))
    other = engine.run([*PROMPT[:20], 1, 2, 3], params=answer(3), marks=(20,))
    assert other.usage.reused == 20
    assert other.usage.computed == 3
    assert_exact(engine, other.turn)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_stop_ids_end_a_turn_and_are_kept(lab: MakeLab, assert_exact: Callable[..., None], depth: int) -> None:
    whole = lab().run(PROMPT, params=answer(20)).output
    for position in (0, 1, 7):
        stop = whole[position]
        expected = whole[: whole.index(stop) + 1]
        engine = lab(depth=depth)
        got = engine.run(PROMPT, params=answer(20, stop_token_ids=(stop,)))
        assert got.output == expected
        assert got.reason == "stop"
        assert_exact(engine, got.turn)


def test_noise_is_a_function_of_seed_and_position(lab: MakeLab) -> None:
    def drawn(tokens: int, seed: int = 2**63 + 5) -> SamplingParams:
        return SamplingParams(
            temperature=1.1, top_k=40, top_p=0.95, min_p=0.01, seed=seed, max_tokens=tokens, ignore_eos=True
        )

    alone = lab().run(PROMPT, params=drawn(25)).output
    assert lab().run(PROMPT, params=drawn(25, seed=1)).output != alone
    engine = lab(depth=2)
    turns = [engine.submit(PROMPT[:n], params=answer(9)) for n in (3, 30)] + [engine.submit(PROMPT, params=drawn(25))]
    assert engine.finish(turns)[-1].output == alone
    prefix = engine.run(PROMPT, params=drawn(25), cancel_at=10)
    warm = engine.run([], parent=prefix.turn, params=drawn(25 - len(prefix.output)))
    assert prefix.output + warm.output == alone


def test_a_full_context_ends_the_turn_or_refuses_it(lab: MakeLab) -> None:
    engine = lab(max_context=64)
    full = engine.run([3] * 60, params=SamplingParams(temperature=0, ignore_eos=True))
    assert (full.reason, len(full.output), full.usage.remaining) == ("context_length", 4, 0)
    refused = engine.refusal([1], parent=full.turn)
    assert refused.code == "context_length_exceeded"
    assert "maximum context length is 64 tokens" in refused.message
    assert "65" in refused.message
    assert engine.run([1], parent=full.turn, keep=40, params=answer(2)).output


@pytest.mark.parametrize(
    ("tokens", "how", "words"),
    [
        ([], {}, "empty"),
        ([96], {}, "0 … 95"),
        ([-1], {}, "0 … 95"),
        ([1], {"marks": (2,)}, "marks"),
        ([1, 2], {"marks": (2, 1)}, "marks"),
        ([1], {"params": SamplingParams(temperature=-1)}, "temperature"),
        ([1], {"params": SamplingParams(temperature=float("nan"))}, "temperature"),
        ([1], {"params": SamplingParams(top_p=0)}, "top_p"),
        ([1], {"params": SamplingParams(max_tokens=0)}, "max_tokens"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(lab: MakeLab, tokens: list[int], how: Any, words: str) -> None:
    refused = lab().refusal(tokens, **how)
    assert refused.code == "bad_request"
    assert words in refused.message


def test_the_queue_is_bounded(lab: MakeLab) -> None:
    engine = lab(max_queue=2, max_sequences=1)
    turns = [engine.submit([1, 2], params=answer(2)) for _ in range(2)]
    engine.tick()
    turns += [engine.submit([1, 2], params=answer(2)) for _ in range(2)]
    (refused,) = [event for event in engine.tick() if event.turn == turns[3]]
    assert refused.code == "queue_full"
    assert [result.reason for result in engine.finish(turns[:3])] == ["length"] * 3


def test_logits_that_are_not_finite_fail_the_turn_and_are_never_sealed(lab: MakeLab) -> None:
    engine = lab()
    first = engine.run(PROMPT, params=answer(5))
    embedding = engine.core.executor.model.parameters["embedding"]
    kept = embedding[50].clone()
    embedding[50] = float("nan")
    turn = engine.submit([50], parent=first.turn, params=answer(5))
    (failed,) = engine.finish([turn])
    embedding[50] = kept
    assert failed.reason == "error"
    assert engine.refusal([1], parent=turn).code == "unknown_lineage"
    assert engine.run([50], parent=first.turn, params=answer(5)).reason == "length"


def test_progress_is_reported_once_a_second(lab: MakeLab) -> None:
    engine = lab(prefill_chunk=1)
    engine.core._clock = iter(np.arange(0, 100, 0.5)).__next__
    turn = engine.submit(PROMPT, params=answer(2))
    events: list[EngineEvent] = []
    engine.finish([turn], events.extend)
    progress = [event.done for event in events if isinstance(event, Progress)]
    assert progress == list(range(3, 37, 2))


@pytest.mark.parametrize("damage", ["zero", "swap", "age"])
def test_a_damaged_state_or_page_moves_the_logits(lab: MakeLab, damage: str) -> None:
    """The exactness tests would see it: 10⁴ times their tolerance, whatever single tensor is hit."""
    engine = lab(prefill_chunk=512)
    first = engine.run(PROMPT, params=answer(8), marks=(20,))
    other = engine.run([9, 8, 7, 6, 5, 4, 3, 2, 1] * 4, params=answer(8))
    aged = engine.run([*PROMPT, *first.output[:6]], params=answer(1))
    cache, executor = engine.core.scheduler.cache, engine.core.executor

    def node_of(turn: Any) -> Any:
        return engine.core.scheduler.lineages.find(turn.turn, "t").node

    row, donor = node_of(first).row, {"zero": 0, "swap": node_of(other).row, "age": node_of(aged).row}[damage]
    pages = node_of(first).page_table(8)
    foreign = node_of(other).page_table(8)
    truth = engine.logits_after(first.turn, [5])
    state = [(tensor, row, donor) for tensor in (*executor.rows.conv, *executor.rows.matrix)]
    if damage != "age":
        pairs = zip(pages[:4], foreign, strict=False)
        state += [
            (tensor, page, 0 if damage == "zero" else other_page)
            for page, other_page in pairs
            for tensor in (*executor.pages.k, *executor.pages.v)
        ]
    for tensor, target, source in state:
        kept = tensor[target].clone()
        tensor[target] = torch.zeros_like(kept) if damage == "zero" else tensor[source]
        moved = (engine.logits_after(first.turn, [5]) - truth).abs().max()
        tensor[target] = kept
        assert moved > 1e-5, (damage, target, float(moved))
    torch.testing.assert_close(engine.logits_after(first.turn, [5]), truth, rtol=1e-9, atol=1e-9)
    cache.check()


def test_forced_ids_are_what_the_output_begins_with(lab: MakeLab, assert_exact: Callable[..., None]) -> None:
    forced = (7, 8, 9, 7)
    for depth in (0, 2):
        engine = lab(depth=depth, forced_tokens=True)
        turn = engine.run(PROMPT, params=answer(6, forced_token_ids=forced))
        free = engine.run([*PROMPT, *forced], params=answer(2))
        assert turn.output == [*forced, *free.output]
        assert_exact(engine, turn.turn)
        stopped = engine.run(PROMPT, params=answer(6, forced_token_ids=forced, stop_token_ids=(9,)))
        assert (stopped.output, stopped.reason) == ([7, 8, 9], "stop")
        assert engine.run(PROMPT, params=answer(2)).output == lab().run(PROMPT, params=answer(2)).output
    assert "0 … 95" in engine.refusal([1], params=answer(2, forced_token_ids=(96,))).message
    assert "not allowed" in lab().refusal([1], params=answer(2, forced_token_ids=(5,))).message
