from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tokenspeed.bench.bound import step_bytes
from tokenspeed.bench.decode import DecodeBench, by_kernel
from tokenspeed.bench.driver import BenchError, Driver
from tokenspeed.engine.core import EngineCore


def test_a_sound_engine_passes_and_its_figures_have_their_bound(start: Callable[..., EngineCore]) -> None:
    core = start()
    bench = DecodeBench(core, 1e9)
    assert bench.check(40) < 1e-3
    figures = bench.decode([30], 20)
    assert figures.experts == 2  # of one token in each layer
    one, other = (
        1e9 / step_bytes(core.executor.model, core.executor.pages.geometry, [30 + more], 8) for more in (0, 28)
    )
    assert other < figures.bound < one
    assert 1 / bench.step_bound_s(30) == one
    assert 2 <= bench.decode([30, 50, 20], 20).experts <= 6
    assert bench.next_turn(50, 10)[1] == 11


def test_an_engine_whose_decode_is_wrong_fails(start: Callable[..., EngineCore]) -> None:
    core = start()
    ops = core.executor.model.ops
    step = ops.delta_net_step

    def forgets(*operands: torch.Tensor) -> torch.Tensor:
        operands[6].zero_()  # the recurrent matrices
        return step(*operands)  # type: ignore[arg-type]

    ops.delta_net_step = forgets  # type: ignore[method-assign, assignment]
    with pytest.raises(BenchError, match=r"differ by|agree in"):
        DecodeBench(core, 1e9).check(40)


def test_too_few_steps_are_no_figure(start: Callable[..., EngineCore]) -> None:
    with pytest.raises(BenchError, match="too few steps"):
        DecodeBench(start(), 1e9).decode([30], 1)


def test_a_turn_that_is_refused_raises(start: Callable[..., EngineCore]) -> None:
    driver = Driver(start(max_context=64))
    driver.submit(list(range(80)), 4)
    with pytest.raises(BenchError, match="refused"):
        driver.finish()


def test_a_context_beyond_the_page_table_is_refused(start: Callable[..., EngineCore]) -> None:
    with pytest.raises(BenchError, match="do not fit into a page table of 64 tokens"):
        DecodeBench(start(max_context=64), 1e9).stage(60, 10)


def test_launches_by_kernel() -> None:
    launches = [("a", 1.0), ("b", 10.0), ("a", 3.0), ("a", 2.0), ("a", 2.0)]
    b, a = by_kernel(launches, 2)
    assert (b.name, b.launches, b.us, b.us_each) == ("b", 0.5, 5.0, 10.0)
    assert (a.name, a.launches, a.us, a.us_each) == ("a", 2.0, 4.0, 2.0)
