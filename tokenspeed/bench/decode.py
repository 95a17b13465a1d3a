"""Prefill, decode and next turns of one engine, with nothing between the clock and it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tokenspeed.bench.bound import step_bytes
from tokenspeed.bench.driver import BenchError, Driver, Timed
from tokenspeed.engine.core import EngineCore

AGREEMENT = 0.15
"""Mean difference of log-probabilities that decode and prefill may have in bfloat16, as they round differently."""
CHECKED_TOKENS = 8
TOP = 20


@dataclass(frozen=True)
class DecodeFigures:
    """Steps of some sequences at once.

    Attributes:
        tokens_per_s: of all together. bound: what the bytes of a step allow.
        experts: distinct experts that a step touched, mean over its layers.
        step_s: median time of a step. cpu_s: of that, what the host worked while it did not wait for the device.
    """

    tokens_per_s: float
    bound: float
    experts: float
    step_s: float
    cpu_s: float


class DecodeBench:
    """Measures an engine core whose sampling is greedy and whose prompts are random."""

    def __init__(self, core: EngineCore, bandwidth: float, seed: int = 0) -> None:
        """
        Args:
            bandwidth: bytes a second that can be read.
        """
        self.core = core
        self.driver = Driver(core)
        self.bandwidth = bandwidth
        self._random = np.random.default_rng(seed)

    def ids(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(0, self.core.info.vocab_size, count)]

    def check(self, length: int) -> float:
        """Log-probabilities of decoded tokens against those of a prefill of the same ids, which shares nothing with the
        first run. Returns the mean difference; raises BenchError where it is too large."""
        driver = self.driver
        first = driver.submit(self.ids(length), CHECKED_TOKENS, tenant="decoded", top_logprobs=TOP)
        driver.finish()
        ids, differences = [*first.prompt, *first.tokens], []
        for index in range(1, CHECKED_TOKENS):
            again = driver.submit(ids[: length + index], 1, tenant=f"prefilled {index}", top_logprobs=TOP)
            driver.finish()
            if again.usage.computed != length + index:
                raise BenchError(f"a prefill that shares nothing computed {again.usage.computed} tokens")
            expected, got = again.logprobs[0], first.logprobs[index]
            common = expected.keys() & got.keys()
            if len(common) < TOP // 2:
                raise BenchError(f"decode and prefill agree in {len(common)} of the {TOP} most likely ids")
            differences += [abs(expected[token] - got[token]) for token in common]
            driver.release(again)
        driver.release(first)
        mean = float(np.mean(differences))
        if not mean < AGREEMENT:
            raise BenchError(f"log-probabilities of decode and prefill differ by {mean:.3f}; {AGREEMENT} is allowed")
        return mean

    def prefill(self, length: int) -> tuple[float, Timed]:
        """Seconds from a prompt of `length` tokens that shares nothing to its first token, and its turn."""
        turn = self.driver.submit(self.ids(length), 1, tenant=f"prefill {time.perf_counter()}")
        self.driver.finish()
        if turn.usage.computed != length:
            raise BenchError(f"a prompt of {length} tokens computed {turn.usage.computed}")
        return turn.ttft_s, turn

    def next_turn(self, length: int, new: int, times: int = 3) -> tuple[float, int]:
        """Median TTFT of `new` tokens on a session of `length`, and the most tokens that one computed."""
        tenant = f"next {time.perf_counter()}"
        base = self.driver.submit(self.ids(length), 1, tenant=tenant)
        self.driver.finish()
        turns = []
        for _ in range(times):
            turn = self.driver.submit(self.ids(new), 4, parent=base, tenant=tenant)
            self.driver.finish()
            turns.append(turn)
        self.driver.release(base, *turns)
        return sorted(turn.ttft_s for turn in turns)[times // 2], max(turn.usage.computed for turn in turns)

    def decode(self, contexts: Sequence[int], tokens: int) -> DecodeFigures:
        """`tokens` steps of sequences that begin with contexts of these lengths, after their prefill."""
        driver, core = self.driver, self.core
        turns = [
            driver.submit(self.ids(length), tokens + 8, tenant=f"decode {index}")
            for index, length in enumerate(contexts)
        ]
        with _experts_counted(core) as counted:
            while any(len(turn.tokens) < 4 for turn in turns):
                self._tick()
        steps, cpu = [], []
        last = time.perf_counter()
        while core.busy:
            waited = core.waited_s
            running = all(turn.ended == 0 for turn in turns)
            self._tick()
            now = time.perf_counter()
            if running:
                steps.append(now - last)
                cpu.append(now - last - (core.waited_s - waited))
            last = now
        steps, cpu = steps[2:-4], cpu[2:-4]
        driver.release(*turns)
        middle = [length + tokens // 2 for length in contexts]
        total = step_bytes(core.executor.model, core.executor.pages.geometry, middle, round(sum(counted)))
        # Of the window in which all ran, not of single steps: what a step puts off another pays for.
        per_s = len(contexts) * len(steps) / sum(steps)
        layers = len(core.executor.model.layers)
        return DecodeFigures(
            tokens_per_s=per_s,
            bound=len(contexts) * self.bandwidth / total,
            experts=sum(counted) / layers,
            step_s=float(np.median(steps)),
            cpu_s=float(np.median(cpu)),
        )

    def _tick(self) -> None:
        events = self.core.step()
        now = time.perf_counter()
        for event in events:
            self.driver.take(event, now)

    def replays(self, context: int, steps: int) -> float:
        """Seconds of a decode step at a context that was never computed: the recorded step of one place is replayed
        over a page table of arbitrary pages. Leaves the engine unusable."""
        executor = self.core.executor
        channel = executor.channel
        pages = executor.pages.pages
        needed = -(-(context + steps) // channel.page_size)
        channel.table[0, :needed] = torch.randint(1, pages, (needed,), device=channel.table.device)
        channel.length[0], channel.finished[0], channel.limit[0] = context, False, 1 << 40
        for tensor in (*executor.pages.k, *executor.pages.v, *executor.rows.conv, *executor.rows.matrix):
            tensor.nan_to_num_(0.1)
        return executor.replay_s(0, steps)


@contextmanager
def _experts_counted(core: EngineCore) -> Iterator[list[int]]:
    """While steps run outside of their recordings: distinct experts of each layer, of the last decode step."""
    executor, ops = core.executor, core.executor.model.ops
    route = ops.route
    layers = len(executor.model.layers)
    seen: list[Any] = []
    counted: list[int] = []

    def counting(logits: Any, count: int) -> Any:
        weights, experts = route(logits, count)
        seen.append(experts)
        return weights, experts

    ops.route = counting
    try:
        with executor.unrecorded():
            yield counted
    finally:
        ops.route = route
    if core.executor.model.config.experts:
        counted += [int(experts.unique().numel()) for experts in seen[-layers:]]


def breakdown(run: Callable[[], None], steps: int) -> list[dict[str, Any]]:
    """GPU time by kernel of `steps` steps that `run` makes, per step, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name].append(event.device_time)
    rows = [
        {"kernel": name, "launches": len(times) / steps, "us": sum(times) / steps, "us_each": float(np.median(times))}
        for name, times in spent.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])
