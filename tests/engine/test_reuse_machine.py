"""A state machine that tries to make reuse change an answer.

It drives a whole engine in float64 with pools so small that eviction and preemption happen all the time. After every
tick everything that the cache holds (each state row with its hidden vector, each KV page as its readers see it) is
compared with what a fresh forward over the same ids leaves behind, to 1e-9; and now and then a lineage's next logits
are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor

from tokenspeed.cache.pages import PageAllocator
from tokenspeed.cache.pools import PagePool, StateRows
from tokenspeed.cache.tree import Node
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.core import EngineCore
from tokenspeed.engine.messages import Cancel, Ended, Generate, Rejected, Release, Stand, Tokens
from tokenspeed.execution.executor import Executor
from tokenspeed.models.batch import Batch
from tokenspeed.models.qwen35 import Qwen35, cache_geometry

TOLERANCE = 1e-9
CONTEXT = 48


class Fresh:
    """What a forward over ids, in one piece and from nothing, leaves behind; remembered by ids."""

    def __init__(self, model: Qwen35) -> None:
        self._model = model
        self._geometry = cache_geometry(model.config, 16, model.dtype)
        self._known: dict[tuple[int, ...], dict[str, Tensor]] = {}

    def of(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        """`state`: all of a row, flat, hidden vector last. `k`, `v`: [layers, tokens, heads, dim]. `logits`."""
        if ids not in self._known:
            self._known[ids] = self._compute(ids)
        return self._known[ids]

    @torch.inference_mode()
    def _compute(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        size, count = self._geometry.page_size, len(ids)
        pages = PagePool(self._geometry, -(-count // size) + 1, torch.device("cpu"))
        rows = StateRows(self._geometry, 2, torch.device("cpu"))
        positions = torch.arange(count)
        batch = Batch(
            positions=positions,
            starts=torch.tensor([0, count]),
            lengths=torch.tensor([count]),
            page_table=torch.arange(1, -(-count // size) + 1)[None],
            kv_rows=positions + size,
            read_rows=torch.tensor([0]),
            write_rows=torch.tensor([1]),
            decode=False,
            stores=None,
            longest_query=count,
            longest=count,
        )
        hidden = self._model.forward(torch.tensor(ids), batch, pages, rows)
        layers = range(len(pages.k))
        return {
            "state": torch.cat([*(part[1].flatten() for part in (*rows.conv, *rows.matrix)), rows.hidden[1]]),
            "k": torch.stack([pages.flat_k(layer)[size : size + count] for layer in layers]),
            "v": torch.stack([pages.flat_v(layer)[size : size + count] for layer in layers]),
            "logits": self._model.logits(hidden[-1:])[0],
        }


class Memory:
    """All that an engine's cache holds at the moment, on the host."""

    def __init__(self, executor: Executor) -> None:
        pages, rows = executor.pages, executor.rows
        self._states = [tensor.cpu() for tensor in (*rows.conv, *rows.matrix, rows.hidden)]
        layers = range(len(pages.k))
        self.k = [pages.flat_k(layer).cpu() for layer in layers]
        self.v = [pages.flat_v(layer).cpu() for layer in layers]

    def state(self, row: int) -> Tensor:
        return torch.cat([tensor[row].flatten().double() for tensor in self._states])


class ReuseMachine(RuleBasedStateMachine):
    """Random sessions of two tenants on one small engine.

    What is expected comes from the engine's own model in float64, or from `truth`, where the engine is less exact."""

    model: Path
    truth: Qwen35 | None = None
    tolerance = TOLERANCE

    def assert_equal(self, got: Tensor, expected: Tensor, what: str) -> None:
        difference = float((got.double() - expected).abs().max())
        assert difference <= self.tolerance * max(1.0, float(expected.abs().max())), f"{what} is off by {difference}"

    @initialize(
        depth=st.integers(0, 2),
        size=st.sampled_from([1, 3, 4, 8]),
        chunk=st.sampled_from([3, 7, 64]),
        pages=st.integers(0, 10),
        rows=st.integers(0, 8),
        sequences=st.integers(1, 4),
        junction=st.sampled_from([3, 1000]),
        interval=st.sampled_from([6, 1000]),
    )
    def start(self, depth, size, chunk, pages, rows, sequences, junction, interval) -> None:  # type: ignore[no-untyped-def]
        torch.set_num_threads(1)
        self.core = self.engine(
            depth=depth,
            page_size=size,
            prefill_chunk=chunk,
            pages=-(-CONTEXT // size) + 2 + pages,
            rows=depth + 6 + rows,
            max_sequences=sequences,
            junction_tokens=junction,
            checkpoint_interval=interval,
        )
        self.fresh = Fresh(self.truth or self.core.executor.model)
        self.names = 0
        self.prompts: dict[str, tuple[str, list[int]]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, tuple[str, list[int]]] = {}
        self.params: dict[str, SamplingParams] = {}
        self.ids_of: dict[Node, tuple[int, ...]] = {}

    def engine(self, **settings: Any) -> EngineCore:
        return EngineCore(EngineConfig(model=str(self.model), dtype="float64", max_context=CONTEXT, **settings))

    # ------------------------------------------------------------------ what may happen

    @rule(
        tenant=st.sampled_from("ab"),
        tokens=st.lists(st.integers(2, 6), min_size=1, max_size=14),
        parent=st.integers(0, 30),
        keep=st.one_of(st.none(), st.integers(0, CONTEXT)),
        marks=st.sets(st.integers(1, CONTEXT), max_size=3),
        most=st.integers(1, 10),
        seed=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
        forks=st.integers(1, 3),
    )
    def turn(self, tenant, tokens, parent, keep, marks, most, seed, forks) -> None:  # type: ignore[no-untyped-def]
        """Extend, fork, rewind (a parent that others have passed) and regenerate (`keep`)."""
        above = [name for name, (owner, _) in self.ended.items() if owner == tenant]
        name_above = above[parent % len(above)] if above and parent > 3 else None
        base = self.ended[name_above][1] if name_above else []
        cut = None if keep is None or name_above is None else min(keep, len(base))
        for branch in range(forks):
            own = [*tokens, *([7 + branch] if forks > 1 else [])]
            prompt = (base if cut is None else base[:cut]) + own
            self.submit(tenant, own, name_above, cut, prompt, marks, most, seed)

    def submit(self, tenant, own, parent, keep, prompt, marks, most, seed) -> str:  # type: ignore[no-untyped-def]
        self.names += 1
        name = f"t{self.names}"
        temperature = 0.0 if seed is None else 0.9
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=most, ignore_eos=True)
        ids = torch.tensor(own, dtype=torch.int32).numpy().tobytes()
        kept = tuple(sorted(mark for mark in marks if mark <= len(prompt)))
        self.core.submit(Generate(name, tenant, ids, params, parent, keep, kept))
        self.prompts[name], self.outputs[name], self.params[name] = (tenant, prompt), [], params
        return name

    @rule(ticks=st.integers(1, 6))
    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            self.tick()

    @precondition(lambda self: self.outputs)
    @rule(which=st.integers(0, 30), keep=st.sampled_from(["partial", "nothing"]))
    def cancel(self, which: int, keep: Any) -> None:
        self.core.submit(Cancel(list(self.outputs)[which % len(self.outputs)], keep))

    @precondition(lambda self: self.ended)
    @rule(which=st.integers(0, 30))
    def release(self, which: int) -> None:
        name = list(self.ended)[which % len(self.ended)]
        if not self.outputs:
            del self.ended[name]
            self.core.submit(Release([name]))

    @precondition(lambda self: self.ended)
    @rule(which=st.integers(0, 30), off=st.booleans())
    def stand(self, which: int, off: bool) -> None:
        name = list(self.ended)[which % len(self.ended)]
        self.core.submit(Stand(None, name) if off and self.core.scheduler.lineages.named(name).heads else Stand(name))

    @rule(pages=st.integers(0, 20), rows=st.integers(0, 8))
    def evict(self, pages: int, rows: int) -> None:
        cache = self.core.scheduler.cache
        cache.make_room(cache.pages.free_soon + pages, cache.rows.free_soon + rows)

    @precondition(lambda self: self.core.scheduler.running)
    @rule(which=st.integers(0, 5))
    def preempt(self, which: int) -> None:
        """One turn gives way in the next tick, where shortage would make it: after the results have been read."""
        scheduler = self.core.scheduler
        room = scheduler._room_to_decode

        def preempt_first() -> Any:
            if scheduler.running:
                scheduler._preempt(list(scheduler.running.values())[which % len(scheduler.running)])
            return room()

        scheduler._room_to_decode = preempt_first  # type: ignore[method-assign]
        self.tick()
        scheduler._room_to_decode = room  # type: ignore[method-assign]

    @precondition(lambda self: self.ended and not self.outputs)
    @rule(which=st.integers(0, 30), token=st.integers(2, 6))
    def probe(self, which: int, token: int) -> None:
        """A lineage's next logits, through the engine."""
        name = list(self.ended)[which % len(self.ended)]
        tenant, ids = self.ended[name]
        if len(ids) + 2 > CONTEXT:
            return
        prompt = [*ids, token]
        probe = self.submit(tenant, [token], name, None, prompt, set(), 1, None)
        seen = []
        choices = self.core.executor.channel.choices
        choose = choices._ops.choose
        choices._ops.choose = lambda logits, *rest: seen.append(logits) or choose(logits, *rest)  # type: ignore[func-returns-value]
        while probe in self.outputs:
            self.tick()
        choices._ops.choose = choose
        self.assert_equal(seen[-1][-1].cpu(), self.fresh.of(tuple(prompt))["logits"], "the next logits")

    # ------------------------------------------------------------------ what must hold

    def tick(self) -> None:
        events = self.core.step()
        for event in events:
            if isinstance(event, Tokens):
                self.outputs[event.turn].extend(event.tokens)
            elif isinstance(event, Rejected):
                assert event.code == "context_length_exceeded", event
                del self.outputs[event.turn]
            elif isinstance(event, Ended):
                self.end(event)
        self.check_memory()

    def end(self, event: Ended) -> None:
        tenant, prompt = self.prompts[event.turn]
        output = self.outputs.pop(event.turn)
        assert event.reason != "error"
        assert event.usage.output == len(output)
        if event.reason != "cancelled":
            assert event.usage.prompt == event.usage.reused + event.usage.computed
        if self.params[event.turn].temperature == 0:
            for position in range(len(output)):
                logits = self.fresh.of(tuple(prompt + output[:position]))["logits"]
                best = logits.topk(2).values
                tie = best[0] - best[1] < 2 * self.tolerance * max(1.0, float(logits.abs().max()))
                assert int(logits.argmax()) == output[position] or tie
        if self.core.scheduler.lineages.find(event.turn, tenant) is not None:
            self.ended[event.turn] = (tenant, prompt + output)

    def check_memory(self) -> None:
        cache, memory = self.core.scheduler.cache, Memory(self.core.executor)
        cache.check()
        for node, ids in self.live_nodes():
            if node.row:
                self.assert_equal(memory.state(node.row), self.fresh.of(ids)["state"], "a state")
            table = torch.tensor(node.page_table(cache.page_size)) if node.end else None
            if table is None or node.husk:
                continue
            positions = torch.arange(node.end)
            at = table[positions // cache.page_size] * cache.page_size + positions % cache.page_size
            for layer, (k, v) in enumerate(zip(memory.k, memory.v, strict=True)):
                self.assert_equal(k[at], self.fresh.of(ids)["k"][layer], "a page's K")
                self.assert_equal(v[at], self.fresh.of(ids)["v"][layer], "a page's V")
        for lineage in self.ended:
            assert self.core.scheduler.lineages.find(lineage, self.ended[lineage][0]) is not None

    def live_nodes(self) -> Iterator[tuple[Node, tuple[int, ...]]]:
        """Every node that can be found, with its ids, as the index has them."""
        cache = self.core.scheduler.cache
        for node, ids in cache._fresh_nodes.items():
            yield node, tuple(ids.tolist())
        for trie in cache._tries.values():
            branches = [(trie._root, ())]
            while branches:
                branch, above = branches.pop()
                ids = (*above, *branch.label.tolist())
                yield from ((node, ids) for node in branch.entries if node not in cache._fresh_rows)
                branches += [(below, ids) for below in branch.below.values()]

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(3000):
            if not self.core.busy:
                break
            self.tick()
        assert not self.core.busy, "a turn never ended"
        stats = self.core.stats()
        assert stats.embedded == stats.computed + stats.decoded
        self.core.scheduler.cache.evict_all()
        stats = self.core.stats()
        assert (stats.pages_free, stats.rows_free) == (stats.pages_total, stats.rows_total)


def run_machine(machine: type[ReuseMachine], examples: int, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=phases,
            database=None,
            derandomize=len(phases) < len(tuple(Phase)),
        ),
    )


@pytest.fixture
def machine(tiny: Path) -> type[ReuseMachine]:
    return type("Machine", (ReuseMachine,), {"model": tiny})


def test_nothing_makes_reuse_change_an_answer(machine: type[ReuseMachine]) -> None:
    run_machine(machine, 40)


@contextmanager
def aged_row() -> Iterator[None]:
    """A checkpoint holds the state of one token earlier."""
    prefill = Executor._prefill

    def aged(self: Executor, chunks: Any) -> Any:
        for chunk in chunks:
            chunk.stores = [(max(1, count - 1), row) for count, row in chunk.stores]
        return prefill(self, chunks)

    Executor._prefill = aged  # type: ignore[method-assign]
    try:
        yield
    finally:
        Executor._prefill = prefill  # type: ignore[method-assign]


@contextmanager
def page_with_two_writers() -> Iterator[None]:
    """A tail goes on in a shared page although somebody relies on what follows."""
    claim = PageAllocator.claim

    def always(self: PageAllocator, page: int, tail: int, offset: int) -> bool:
        if page in self._writers:
            return False
        self._writers[page] = tail
        self._holders[page][tail] = offset
        return True

    PageAllocator.claim = always  # type: ignore[method-assign]
    try:
        yield
    finally:
        PageAllocator.claim = claim  # type: ignore[method-assign]


@contextmanager
def swapped_hidden() -> Iterator[None]:
    """Two sequences of one decode step leave each other's hidden vector."""
    decode = Executor._decode

    def swapped(self: Executor, decodes: Any) -> Any:
        draw = decode(self, decodes)
        if len(decodes) > 1:
            ring, at = self.channel.ring, self.channel.at
            first, second = (int(ring[place, at[place]]) for place, _ in decodes[:2])
            self.rows.hidden[[first, second]] = self.rows.hidden[[second, first]]
        return draw

    Executor._decode = swapped  # type: ignore[method-assign]
    try:
        yield
    finally:
        Executor._decode = decode  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", [aged_row, page_with_two_writers, swapped_hidden])
def test_seeded_faults_are_found_within_200_examples(machine: type[ReuseMachine], fault: Any) -> None:
    with fault(), pytest.raises(BaseException, match=r"is off by|several failures|sub-exception"):
        run_machine(machine, 200, phases=(Phase.generate,))
