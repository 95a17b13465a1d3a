"""Every sampling option, through the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import tokenspeed.pocket
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.messages import Ended, Release, Tokens
from tokenspeed.engine.vocabulary import token_bytes

MakeLab = Callable[..., Any]
PROMPT = [int(token) for token in np.random.default_rng(0).integers(2, 90, 37)]


def options(tokens: int, **how: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "ignore_eos": True, "max_tokens": tokens} | how))


def by_hand(lab: Any, params: SamplingParams, tokens: int) -> list[int]:
    """Greedy with penalties, one token at a time, on the logits of an engine that knows of no penalties."""
    output: list[int] = []
    for _ in range(tokens):
        lab.run([*PROMPT, *output], params=options(1))
        logits = lab.logits[-1].clone()
        for token in set(PROMPT) | set(output):
            value = logits[token]
            logits[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        for token in set(output):
            logits[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
        for token, bias in params.logit_bias:
            logits[token] += bias
        output.append(int(logits.argmax()))
    return output


PENALTIES = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.9},
    {"logit_bias": ((5, 30.0), (7, 29.5)), "frequency_penalty": 1.0},
    {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.3, "logit_bias": ((3, 2.0),)},
]


@pytest.mark.parametrize("how", PENALTIES)
def test_penalties_are_those_computed_by_hand(lab: MakeLab, how: dict[str, Any]) -> None:
    expected = by_hand(lab(), options(14, **how), 14)
    assert expected != lab().run(PROMPT, params=options(14)).output, "the options change nothing"
    for depth in (0, 2):
        engine = lab(depth=depth)
        plain = engine.submit(PROMPT, params=options(9))
        turn = engine.submit(PROMPT, params=options(14, **how))
        results = engine.finish([plain, turn])
        assert results[1].output == expected
        assert results[0].output == lab().run(PROMPT, params=options(9)).output, "a neighbour was changed"


def test_all_options_give_one_answer_warm_cold_and_preempted(lab: MakeLab) -> None:
    how = PENALTIES[-1] | {"temperature": 0.9, "seed": 5, "top_p": 0.95}
    expected = lab().run(PROMPT, params=options(30, **how)).output
    warm = lab(depth=1)
    warm.run(PROMPT, params=options(3), marks=(30,))
    assert warm.run(PROMPT, params=options(30, **how)).output == expected
    tight = lab(depth=1, pages=14, rows=10, max_context=80, max_sequences=3)
    turns = [tight.submit(PROMPT, params=options(30, **how)) for _ in range(3)]
    results = tight.finish(turns)
    assert [result.output for result in results] == [expected] * 3
    assert sum(result.usage.recomputed for result in results) > 0, "nothing was preempted"


def test_logprobs_and_the_most_likely(lab: MakeLab) -> None:
    engine = lab()
    turn = engine.submit(PROMPT, params=options(4, logprobs=True, top_logprobs=3))
    other = engine.submit(PROMPT[:9], params=options(4))
    one = engine.submit(PROMPT[:5], params=options(4, logprobs=True))
    result, _, _ = engine.finish([turn, other, one])
    reported: dict[str, list[Tokens]] = {}
    for event in engine.events:
        if isinstance(event, Tokens):
            reported.setdefault(event.turn, []).append(event)
    assert all(event.logprobs is None and event.top_logprobs is None for event in reported[other])
    assert all(event.top_logprobs == [[]] for event in reported[one])
    fresh = lab()
    for position, event in enumerate(reported[turn]):
        fresh.run([*PROMPT, *result.output[:position]], params=options(1))
        expected = fresh.logits[-1].log_softmax(-1)
        ranked = expected.sort(descending=True)
        assert event.logprobs == pytest.approx([expected[result.output[position]].item()], rel=1e-9)
        assert event.top_logprobs is not None
        (top,) = event.top_logprobs
        assert [token for token, _ in top] == ranked.indices[:3].tolist()
        assert [value for _, value in top] == pytest.approx(ranked.values[:3].tolist(), rel=1e-9)


@pytest.fixture
def spelled(tiny: Path, tmp_path: Path) -> Path:
    """The tiny model with a tokenizer whose id n writes the letter, or pair of letters, number n."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*letters, *(first + second for first in letters for second in letters)][:95]
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(tiny / file)
    return tmp_path


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_string_ends_with_the_token_that_completes_it(
    spelled: Path, lab: MakeLab, assert_exact: Callable[..., None], depth: int
) -> None:
    table = token_bytes(spelled)
    engine = lab(model=spelled, depth=depth)
    whole = engine.run(PROMPT, params=options(20)).output
    written = [table[token] or b"" for token in whole]
    for last in (3, 8, 14):
        string = (b"".join(written[last - 2 : last + 1])[1:]).decode()
        first = next(n for n in range(20) if string in b"".join(written[: n + 1]).decode())
        turn = engine.run(PROMPT, params=options(20, stop=("zzzz", string)))
        assert turn.output == whole[: first + 1]
        assert turn.reason == "stop"
        (ended,) = [event for event in engine.events if isinstance(event, Ended) and event.turn == turn.turn]
        assert ended.stop_string == string
        assert_exact(engine, turn.turn)


def test_stop_strings_need_a_tokenizer(lab: MakeLab) -> None:
    assert "tokenizer" in lab().refusal([1], params=options(3, stop=("a",))).message


def test_what_tokens_write_is_what_the_tokenizer_decodes() -> None:
    table = token_bytes(tokenspeed.pocket.DIRECTORY)
    tokenizer = Tokenizer.from_file(str(tokenspeed.pocket.DIRECTORY / "tokenizer.json"))
    text = 'Größe: 5 µm\n\t価格 🙂 {"a": [1, 2]}  x'
    ids = tokenizer.encode(text).ids
    assert b"".join(table[token] or b"" for token in ids).decode() == text
    added = tokenizer.get_added_tokens_decoder()
    assert [n for n, data in enumerate(table) if data is None] == sorted(added)


@pytest.mark.parametrize("chunk", [5, 64])
def test_a_warm_up_computes_the_prompt_and_no_more(lab: MakeLab, assert_exact: Callable[..., None], chunk: int) -> None:
    engine = lab(prefill_chunk=chunk, depth=1)
    turn = engine.submit(PROMPT, sample=False)
    (warm,) = engine.finish([turn])
    assert (warm.output, warm.reason, warm.usage.computed) == ([], "warmed", 37)
    assert_exact(engine, turn)
    following = engine.run([8, 9], parent=turn, params=options(3))
    assert following.usage.computed == 2
    assert following.output == lab().run([*PROMPT, 8, 9], params=options(3)).output
    engine.core.submit(Release([turn]))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"logit_bias": ((96, 1.0),)}, "0 … 95"),
        ({"logit_bias": ((5, 1e9),)}, "logit_bias of id 5"),
        ({"logit_bias": tuple((5, 1.0) for _ in range(2000))}, "2000 entries"),
        ({"stop": ("",)}, "0 characters"),
        ({"stop": ("x" * 2000,)}, "2000 characters"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "logprobs is off"),
    ],
)
def test_options_out_of_range_are_refused(lab: MakeLab, how: dict[str, Any], words: str) -> None:
    refused = lab().refusal([1], params=options(3, **how))
    assert refused.code == "bad_request"
    assert words in refused.message
