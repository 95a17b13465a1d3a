"""The engine in a notebook."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tokenspeed import Engine, SamplingParams
from tokenspeed.config.model import ModelError
from tokenspeed.engine.engine import EngineRefusal

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def engine(tiny: Path) -> Engine:
    return Engine(tiny, dtype="float64")


def test_one_prompt_and_several(engine: Engine) -> None:
    one = engine.generate([5, 6, 7], GREEDY)
    assert len(one.token_ids) == 6
    assert one.finish_reason == "length"
    assert one.usage.prompt == one.usage.computed == 3
    several = engine.generate([[5, 6, 7], [8]], GREEDY)
    assert several[0].token_ids == one.token_ids
    assert several[0].usage.computed == 1
    assert several[1].usage.computed == 1


def test_a_parent_is_continued(engine: Engine) -> None:
    first = engine.generate([5, 6, 7], GREEDY)
    more = engine.generate([8, 9], GREEDY, parent=first.turn)
    assert more.usage.computed == 3
    whole = engine.generate([5, 6, 7, *first.token_ids, 8, 9], GREEDY)
    assert whole.token_ids == more.token_ids


def test_logprobs_are_those_of_the_unmodified_distribution(engine: Engine, tiny: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=True)
    got = engine.generate([5, 6, 7], params)
    assert got.logprobs is not None
    scored = [
        engine.generate([5, 6, 7, *got.token_ids[:n]], SamplingParams(temperature=0, max_tokens=1, logprobs=True))
        for n in range(3)
    ]
    assert got.logprobs == pytest.approx([one.logprobs[0] for one in scored if one.logprobs], rel=1e-9)
    assert all(logprob < 0 for logprob in got.logprobs)


def test_dummy_weights_need_a_config_alone(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    first, second = (Engine(tmp_path, load_format="dummy", seed=seed).generate([3, 4], GREEDY) for seed in (0, 0))
    other = Engine(tmp_path, load_format="dummy", seed=1).generate([3, 4], GREEDY)
    assert first.token_ids == second.token_ids != other.token_ids


def test_errors_name_the_numbers(engine: Engine, tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(EngineRefusal, match="0 … 95") as refused:
        engine.generate([5, 96], GREEDY)
    assert refused.value.code == "bad_request"
    with pytest.raises(ModelError, match=r"config\.json"):
        Engine(tmp_path)
    with pytest.raises(ValueError, match="cache is too small"):
        Engine(tiny, cache_bytes=1000)
    with pytest.raises(ValueError, match="the device 'warp' cannot be used"):
        Engine(tiny, device="warp")
    with pytest.raises(ValueError, match="max_context is 9999"):
        Engine(tiny, max_context=9999)


def test_a_released_lineage_is_gone(engine: Engine) -> None:
    first = engine.generate([5, 6, 7], GREEDY)
    engine.release(first.turn)
    with pytest.raises(EngineRefusal) as refused:
        engine.generate([8], GREEDY, parent=first.turn)
    assert refused.value.code == "unknown_lineage"


def test_a_small_cache_lowers_the_context(tiny: Path) -> None:
    engine = Engine(tiny, pages=10, rows=8, page_size=16)
    assert engine.info.max_context == 128
    full = engine.generate([3] * 120, SamplingParams(temperature=0, ignore_eos=True))
    assert (full.finish_reason, len(full.token_ids)) == ("context_length", 8)


def test_bfloat16_runs(tiny: Path) -> None:
    engine = Engine(tiny, dtype="bfloat16")
    assert engine.info.dtype == "bfloat16"
    assert engine._core.executor.rows.matrix[0].dtype == torch.float32
    assert len(engine.generate([5, 6, 7], GREEDY).token_ids) == 6


def test_an_interruption_leaves_the_engine_usable(engine: Engine) -> None:
    step = engine._core.step
    calls = 0

    def interrupted() -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return step()

    engine._core.step = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        engine.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True))
    fresh = engine.generate([5, 6, 7], GREEDY)
    assert len(fresh.token_ids) == 6
    assert engine.stats.running == engine.stats.queued == 0


def test_threads_take_turns(engine: Engine) -> None:
    expected = [engine.generate([n, 6, 7], GREEDY).token_ids for n in range(2, 8)]
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda n: engine.generate([n, 6, 7], GREEDY).token_ids, range(2, 8)))
    assert got == expected


@pytest.mark.parametrize("prompt", ["12", ["1", "2"], [1, [2, 3]], [1.5], [[1], [2.0]]])
def test_a_prompt_is_ids(engine: Engine, prompt: object) -> None:
    with pytest.raises(TypeError, match="token ids"):
        engine.generate(prompt, GREEDY)  # type: ignore[call-overload]
