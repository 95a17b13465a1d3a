"""Prefill, decode and next turns of one engine, with nothing between the clock and it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        self.driver.release(turn)
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
        """At least `tokens` steps of sequences that begin with contexts of these lengths, after their prefill.

        Raises:
            BenchError: a turn failed, or `tokens` are too few to leave out the first and the last steps.
        """
        driver, core = self.driver, self.core
        output = self.output_tokens(contexts, tokens)
        turns = [
            driver.submit(self.ids(length), output, tenant=f"decode {index}") for index, length in enumerate(contexts)
        ]
        with _experts_counted(core) as counted:
            while any(len(turn.tokens) < 4 for turn in turns):
                driver.step()
        steps, cpu, lengths = [], [], []
        last = time.perf_counter()
        while core.busy:
            waited = core.waited_s
            running = all(turn.ended == 0 for turn in turns)
            driver.step()
            now = time.perf_counter()
            if running:
                steps.append(now - last)
                cpu.append(now - last - (core.waited_s - waited))
                lengths.append([length + len(turn.tokens) for length, turn in zip(contexts, turns, strict=True)])
            last = now
        driver.release(*turns)
        steps, cpu, lengths = steps[2:-4], cpu[2:-4], lengths[2:-4]
        if not steps:
            raise BenchError(f"{tokens} tokens are too few steps to time")
        middle = lengths[len(lengths) // 2]
        total = step_bytes(core.executor.model, core.executor.pages.geometry, middle, sum(counted))
        # Of the window in which all ran, not of single steps: what a step puts off another pays for.
        per_s = len(contexts) * len(steps) / sum(steps)
        return DecodeFigures(
            tokens_per_s=per_s,
            bound=len(contexts) * self.bandwidth / total,
            experts=sum(counted) / len(core.executor.model.layers),
            step_s=float(np.median(steps)),
            cpu_s=float(np.median(cpu)),
        )

    def output_tokens(self, contexts: Sequence[int], tokens: int) -> int:
        """What each sequence generates for `decode` to have its steps: while the last context is computed, those that
        are ready take steps already."""
        return tokens + sum(contexts) // self.core.limits.prefill_chunk + 8

    @torch.inference_mode()
    def stage(self, context: int, steps: int) -> None:
        """Make place 0 a sequence of `context` tokens that were never computed, on a page table of arbitrary pages full
        of random numbers, to be replayed for `steps` steps. What the engine had cached is lost."""
        executor = self.core.executor
        channel, rows = executor.channel, executor.rows
        needed = -(-(context + steps + 1) // channel.page_size)
        if needed > channel.table.shape[1]:
            room = channel.table.shape[1] * channel.page_size
            raise BenchError(f"{context} tokens and {steps} steps do not fit into a page table of {room} tokens")
        for tensor in (*executor.pages.k, *executor.pages.v):
            tensor.normal_()
        for tensor in (*rows.conv, *rows.matrix, rows.hidden):
            tensor.zero_()
        channel.table[0, :needed] = torch.randint(1, executor.pages.pages, (needed,), device=channel.table.device)
        channel.ring[0] = torch.arange(1, channel.ring.shape[1] + 1, device=channel.ring.device)
        channel.at[0], channel.token[0], channel.stop_ids[0] = 0, 0, -1
        channel.length[0], channel.finished[0], channel.limit[0] = context, False, 1 << 40

    @torch.inference_mode()
    def replays(self, context: int, steps: int) -> float:
        """Seconds of a decode step at a context that was never computed (`stage`): the recorded step of one place is
        replayed. Leaves the engine unusable for turns. Raises BenchError if a step went wrong."""
        self.stage(context, steps)
        channel = self.core.executor.channel
        seconds = self.core.executor.replay_s(0, steps)
        grown = int(channel.length[0]) - context
        if bool(channel.finished[0]) or grown != steps + 1:
            raise BenchError(f"{steps + 1} steps were replayed, and the sequence has grown by {grown} tokens")
        return seconds

    def step_bound_s(self, context: int) -> float:
        """Seconds that the bytes of a step of one sequence at `context` tokens take at least."""
        executor = self.core.executor
        experts = executor.model.config.experts_per_token * len(executor.model.layers)
        return step_bytes(executor.model, executor.pages.geometry, [context], experts) / self.bandwidth


@contextmanager
def _experts_counted(core: EngineCore) -> Iterator[list[int]]:
    """While steps run outside of their recordings: distinct experts of each layer, of the last decode step."""
    executor, ops = core.executor, core.executor.model.ops
    route = ops.route
    layers = len(executor.model.layers)
    seen: list[Any] = []
    counted: list[int] = []

    def counting(logits: Any, experts_per_token: int, *rest: Any) -> Any:
        weights, experts = route(logits, experts_per_token, *rest)
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


@dataclass(frozen=True)
class Kernel:
    """What a kernel takes of a step. `launches`: how many. `us`: microseconds of all of them. `us_each`: median."""

    name: str
    launches: float
    us: float
    us_each: float


def breakdown(run: Callable[[], object], steps: int) -> list[Kernel]:
    """GPU time by kernel of `steps` steps that `run` makes, per step, the longest first."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    on_gpu = (event for event in profiler.events() if event.device_type == DeviceType.CUDA)
    return by_kernel(((event.name, event.device_time) for event in on_gpu), steps)


def by_kernel(launches: Iterable[tuple[str, float]], steps: int) -> list[Kernel]:
    """Launches (kernel, microseconds) that `steps` steps made, summed up by kernel, the longest first."""
    spent: dict[str, list[float]] = defaultdict(list)
    for name, time_us in launches:
        spent[name].append(time_us)
    kernels = [Kernel(name, len(us) / steps, sum(us) / steps, float(np.median(us))) for name, us in spent.items()]
    return sorted(kernels, key=lambda kernel: -kernel.us)
