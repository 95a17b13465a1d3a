"""Agreement with transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed.models.random_weights import random_tensors, tiny_config

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
NEAR_TIE = 1e-3

# Lengths around every edge: convolution window (3, 4), page (4 here), chunk (64), and the mean of the range.
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 31, 32, 33, 63, 64, 65, 66, 67, 68, 100, 127, 128, 129, 191, 192, 193, 200]
CHUNKS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64]

MODELS = {
    "moe, 2 value heads a key head": {},
    "moe, 3, tied": {"linear_num_value_heads": 6, "tie_word_embeddings": True},
    "moe, 4, tied": {"linear_num_value_heads": 8, "tie_word_embeddings": True, "num_experts_per_tok": 3},
    "dense, 2, tied": {"model_type": "qwen3_5_text", "tie_word_embeddings": True},
    "dense, 3": {"model_type": "qwen3_5_text", "linear_num_value_heads": 6},
    "dense, 4": {"model_type": "qwen3_5_text", "linear_num_value_heads": 8, "num_key_value_heads": 1},
}


class Reference:
    """Logits of transformers' model with the same weights, and where its choices are near ties."""

    def __init__(self, changes: dict[str, Any], ids: list[int], model: Any) -> None:
        raw = tiny_config(**changes)
        fields = {name: value for name, value in raw.items() if name != "model_type"}
        if raw["model_type"] == "qwen3_5_text":
            config = transformers.Qwen3_5TextConfig(**fields)
            oracle = transformers.Qwen3_5ForCausalLM(config)
        else:
            config = transformers.Qwen3_5MoeTextConfig(**fields)
            oracle = transformers.Qwen3_5MoeForCausalLM(config)
        weights = dict(random_tensors(model.config, 0, torch.float32, torch.device("cpu")))
        absent, unknown = oracle.load_state_dict(weights, strict=False)
        assert not unknown
        assert set(absent) <= ({"lm_head.weight"} if raw["tie_word_embeddings"] else set())
        oracle.tie_weights()
        routed = {"output_router_logits": True} if model.config.experts else {}
        with torch.inference_mode():
            output = oracle.float().eval()(torch.tensor([ids]), **routed)
        self.logits: Tensor = output.logits[0]
        top = self.logits.topk(2).values
        near = top[:, 0] - top[:, 1] < NEAR_TIE
        if model.config.experts:
            chosen = model.config.experts_per_token
            for router in output.router_logits:
                ranked = router.softmax(-1).sort(descending=True).values
                # A token that goes to another expert changes everything after it.
                near |= (ranked[:, chosen - 1] - ranked[:, chosen] < NEAR_TIE).cummax(0).values
        self.near_tie: Tensor = near


class Comparison:
    """Positions compared, and those that differ where the reference itself was near a tie."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.compared = 0
        self.excused = 0

    def check(self, logits: Tensor, end: int) -> None:
        """`logits` [tokens, vocabulary] are of the positions that end before `end`."""
        expected = self.reference.logits[end - logits.shape[0] : end]
        near_tie = self.reference.near_tie[end - logits.shape[0] : end]
        gap = (logits - expected).abs().amax(-1) / expected.abs().amax(-1)
        differs = ~(gap < TOLERANCE) | (logits.argmax(-1) != expected.argmax(-1))
        unexcused = (differs & ~near_tie).nonzero()[:, 0].tolist()
        assert not unexcused, f"differs at {unexcused}, by up to {float(gap.max()):.1e}"
        self.compared += logits.shape[0]
        self.excused += int(differs.sum())

    def report(self, record: Callable[[str, object], None]) -> None:
        record("positions compared", self.compared)
        record("positions excused", self.excused)
        print(f"{self.compared} positions compared, {self.excused} excused by a near tie of the reference")
        assert self.excused <= self.compared // 1000


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_logits_and_greedy_ids_agree(
    changes: dict[str, Any],
    make_model: Any,
    make_bench: Any,
    make_work: Any,
    ids: list[int],
    record_property: Callable[[str, object], None],
) -> None:
    model = make_model(torch.float32, **changes)
    reference = Reference(changes, ids, model)
    comparison = Comparison(reference)

    # Each length as a prompt by itself, then all of them as one ragged batch, then one more token for each.
    for length in LENGTHS:
        bench = make_bench(model)
        comparison.check(bench.run(bench.line(), ids[:length]), length)
    bench = make_bench(model)
    lines = [bench.line() for _ in LENGTHS]
    works = [make_work(line, ids[:length]) for line, length in zip(lines, LENGTHS, strict=True)]
    for length, logits in zip(LENGTHS, bench.logits(*works), strict=True):
        comparison.check(logits, length)
    works = [make_work(line, ids[line.length : line.length + 1]) for line in lines[:-1]]
    for line, logits in zip(lines, bench.logits(*works), strict=False):
        comparison.check(logits, line.length)

    # The whole in chunks.
    for chunk in CHUNKS:
        bench = make_bench(model)
        comparison.check(bench.run(bench.line(), ids, chunk), len(ids))
    comparison.report(record_property)
    assert comparison.compared == 2 * sum(LENGTHS) + len(LENGTHS) - 1 + len(CHUNKS) * len(ids)


@pytest.mark.parametrize("name", ["moe, 2 value heads a key head", "dense, 3"])
def test_every_chunk_size_in_one_ragged_batch(
    name: str,
    make_model: Any,
    make_bench: Any,
    make_work: Any,
    ids: list[int],
    record_property: Callable[[str, object], None],
) -> None:
    """64 copies of a prompt side by side, the one of number n in chunks of n tokens."""
    model = make_model(torch.float32, **MODELS[name])
    comparison = Comparison(Reference(MODELS[name], ids, model))
    bench = make_bench(model, pages=64 * 50 + 1)
    ids = ids[:140]
    waiting = {chunk: bench.line() for chunk in range(1, 65)}
    while waiting:
        works = [make_work(line, ids[line.length : line.length + chunk]) for chunk, line in waiting.items()]
        for line, logits in zip(waiting.values(), bench.logits(*works), strict=True):
            comparison.check(logits, line.length)
        waiting = {chunk: line for chunk, line in waiting.items() if line.length < len(ids)}
    assert comparison.compared == 64 * len(ids)
    comparison.report(record_property)


def test_a_long_position_rotates_as_the_reference_does(make_model: Any, make_bench: Any, ids: list[int]) -> None:
    """1,300 tokens: RoPE and the page table beyond the first hundred, against one forward of the oracle."""
    model = make_model(torch.float32)
    long = (ids * 7)[:1300]
    comparison = Comparison(Reference({}, long, model))
    bench = make_bench(model, page_size=16)
    comparison.check(bench.run(bench.line(), long, 500, 37, 700), 1300)
