"""What a ready engine does not do: wait for the device on the way of a step, compile, record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.messages import Cancel
from tokenspeed.execution.executor import Executor
from tokenspeed.scheduler.plan import LogEntry, Plan

BOTH = pytest.mark.parametrize(
    "lab",
    [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("engine", "mixture")],
    indirect=True,
)
"""A dense model in float32 and a mixture of experts in bfloat16."""
STEPS = 10


def options(tokens: int, **how: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "ignore_eos": True, "max_tokens": tokens} | how))


def every_option(penalties: list[dict[str, Any]]) -> list[SamplingParams]:
    """Each option by itself, and all together."""
    drawn = {"temperature": 0.9, "seed": 5}
    single = [
        {},
        drawn,
        drawn | {"top_k": 7},
        drawn | {"top_p": 0.8},
        drawn | {"min_p": 0.05},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 20},
        {"stop_token_ids": tuple(range(64))},
        {"forced_token_ids": (7, 8, 9)},
        {"ignore_eos": False},
        *penalties,
    ]
    everything = {"top_k": 50, "top_p": 0.95, "min_p": 0.01, "logprobs": True, "top_logprobs": 3}
    return [options(12, **how) for how in [*single, drawn | penalties[-1] | everything]]


def work(lab: Any, params: list[SamplingParams]) -> None:
    """Prompts of all kinds in batches of all sizes, with every option: new, continued, forked in the middle of a page,
    longer than a chunk, with states kept inside, in lockstep, cancelled, evicted, warmed up, to the context's end."""
    rng = np.random.default_rng(3)

    def ids(length: int) -> list[int]:
        return [int(token) for token in rng.integers(2, 96, length)]

    for length in (1, 2, 3, 15, 16, 17, 63, 64, 65, 130, 300):
        lab.run(ids(length), params=options(3), marks=tuple(sorted({1, length // 2 or 1, length})))
    trunk = lab.run(ids(77), params=options(5))
    for count in range(1, 10):
        turns = [
            lab.submit(ids(1 + 11 * number), params=params[(count + number) % len(params)], parent=parent, marks=marks)
            for number in range(count)
            for parent, marks in [(trunk.turn, ()) if number % 2 else (None, (1,))]
        ]
        lab.finish(turns)
    for chosen in params:
        lab.run(ids(9), params=chosen, parent=trunk.turn, keep=70)
    lab.core.guide = lambda turn, token: b"\xfe\xff\xff\x7f" * 3 if token is None or token % 2 else None
    turns = [lab.submit(ids(5), params=chosen, lockstep=True) for chosen in params[:9]]
    lab.finish(turns)
    turns = [lab.submit(ids(100), params=options(40)) for _ in range(12)]
    for turn in turns[::3]:
        lab.tick()
        lab.core.submit(Cancel(turn))
    lab.finish(turns)
    lab.core.scheduler.cache.evict_all()
    lab.finish([lab.submit(ids(33), sample=False), lab.submit(ids(505), params=options(50))])
    lab.run([5], parent=trunk.turn, params=options(4))


@BOTH
def test_nothing_is_compiled_or_recorded_once_it_is_ready(
    lab: Any, sampling_options: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture looks for compilations; a recording would fail here."""

    def no(*_: Any, **__: Any) -> Any:
        raise AssertionError("a graph is recorded")

    if lab.core.executor._graphs is not None:
        monkeypatch.setattr(torch.cuda, "CUDAGraph", no)
        monkeypatch.setattr(torch.cuda, "graph", no)
    work(lab, every_option(sampling_options.PENALTIES))


@contextmanager
def no_waiting() -> Iterator[None]:
    """A call that waits for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@BOTH
def test_no_launch_waits_for_the_device(
    lab: Any, gpu: torch.device, sampling_options: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, kinds = Executor.launch, Counter[str]()

    def watched(executor: Executor, plan: Plan) -> Any:
        for kind in ("copies", "admits", "masks", "table", "prefills", "decodes"):
            kinds[kind] += bool(getattr(plan, kind))
        with no_waiting():
            return launch(executor, plan)

    monkeypatch.setattr(Executor, "launch", watched)
    work(lab, every_option(sampling_options.PENALTIES))
    assert all(kinds[kind] for kind in ("copies", "admits", "masks", "table", "prefills", "decodes")), kinds


def test_waiting_would_be_seen(gpu: torch.device) -> None:
    ones = torch.ones(3, device=gpu)
    with no_waiting(), pytest.raises(RuntimeError):
        ones.sum().item()


def plain_steps(lab: Any, prompts: list[int]) -> Callable[[], list[Plan]]:
    """A batch of turns, of these prompts' lengths, far enough into their answers that `STEPS` ticks follow in which
    nothing but a decode step is planned; gives what runs these ticks."""
    plans: list[Plan] = []

    def on_tick(entry: LogEntry, plan: Plan) -> None:
        plans.append(plan)

    lab.core.on_tick = on_tick
    turns = [lab.submit([5] * length, params=options(60), tenant=f"plain {length}") for length in prompts]
    while not plans or not (plans[-1].table and len(plans[-1].decodes) == len(turns)):
        lab.tick()
    plans.clear()

    def run() -> list[Plan]:
        for _ in range(STEPS):
            lab.core.step()
        return plans

    return run


@BOTH
@pytest.mark.parametrize("count", [1, 3])
def test_plain_steps_are_plain(lab: Any, count: int) -> None:
    """What the count of launches relies on; runs on a CPU, too."""
    plans = plain_steps(lab, [16] * count)()
    assert len(plans) == STEPS
    assert all(len(plan.decodes) == count and not (plan.table or plan.admits or plan.prefills) for plan in plans)
    lab.finish([])


@BOTH
@pytest.mark.parametrize("count", [1, 3])
def test_a_decode_step_is_one_launch_and_one_copy(lab: Any, gpu: torch.device, count: int) -> None:
    """The recorded step is launched, and the tokens are copied to the host: nothing else, and no wait but for the event
    of the step before."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):
        torch.ones(1, device=gpu).add_(1)  # the profiler sets itself up
    run = plain_steps(lab, [16] * count)
    torch.cuda.synchronize(gpu)
    with torch.profiler.profile(activities=activities) as profile:
        run()
    lab.finish([])
    # The runtime's and driver's calls, as the host made them.
    calls = Counter(event.name for event in profile.events() if event.name.startswith("cu"))
    replays = sum(times for name, times in calls.items() if "GraphLaunch" in name)
    launches = sum(times for name, times in calls.items() if "Launch" in name)
    copies = sum(times for name, times in calls.items() if "Memcpy" in name)
    assert (replays, launches, copies) == (STEPS, STEPS, STEPS), calls
    assert calls["cudaStreamSynchronize"] == 0, calls
    assert calls["cudaEventSynchronize"] <= STEPS, calls
