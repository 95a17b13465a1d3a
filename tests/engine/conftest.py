"""An engine whose logits can be looked at, and a fresh one to compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.core import EngineCore
from tokenspeed.engine.messages import (
    Cancel,
    Ended,
    EngineEvent,
    Generate,
    Rejected,
    Release,
    Started,
    Tokens,
    TurnUsage,
)
from tokenspeed.models.random_weights import tiny_checkpoint

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@dataclass
class Result:
    turn: str
    prompt: list[int]
    output: list[int]
    reason: str
    usage: TurnUsage
    started: Started | None

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output


class Lab:
    """An engine core in float64. After every tick the cache's books are checked, and at rest the model's own counter
    against the scheduler's."""

    def __init__(self, model: Path, **options: Any) -> None:
        settings = {"dtype": "float64", "page_size": 8, "pages": 96, "rows": 40, "prefill_chunk": 16} | options
        self.core = EngineCore(EngineConfig(model=str(model), **settings))
        self.known: dict[str, list[int]] = {}
        self.events: list[EngineEvent] = []
        self.logits: Tensor | None = None
        self._turns = 0
        ops = self.core.executor.channel.choices._ops
        choose = ops.choose

        def spy(logits: Tensor, *rest: Any) -> Any:
            self.logits = logits
            return choose(logits, *rest)

        ops.choose = spy  # type: ignore[method-assign]

    def submit(
        self,
        tokens: list[int],
        parent: str | None = None,
        keep: int | None = None,
        params: SamplingParams = GREEDY,
        marks: tuple[int, ...] = (),
        tenant: str = "t",
        sample: bool = True,
        lockstep: bool = False,
    ) -> str:
        self._turns += 1
        turn = f"turn{self._turns}"
        base = self.known[parent] if parent is not None else []
        self.known[turn] = (base if keep is None else base[:keep]) + tokens
        ids = np.asarray(tokens, "<i4").tobytes()
        self.core.submit(Generate(turn, tenant, ids, params, parent, keep, marks, sample, lockstep))
        return turn

    def tick(self) -> list[EngineEvent]:
        events = self.core.step()
        self.core.scheduler.cache.check()
        self.events += events
        return events

    def finish(self, turns: list[str], until: Callable[[list[EngineEvent]], None] | None = None) -> list[Result]:
        """Run to rest; the results of `turns`. `until` sees each tick's events and may submit."""
        first = len(self.events)
        while self.core.busy:
            events = self.tick()
            if until is not None:
                until(events)
        stats = self.core.stats()
        assert stats.embedded == stats.computed + stats.decoded
        results = []
        for turn in turns:
            mine = [event for event in self.events if event.turn == turn]
            output = [token for event in mine if isinstance(event, Tokens) for token in event.tokens]
            last = mine[-1]
            assert isinstance(last, Ended), last
            started = next((event for event in mine if isinstance(event, Started)), None)
            results.append(Result(turn, self.known[turn], output, last.reason, last.usage, started))
            self.known[turn] = self.known[turn] + output
        assert len(self.events) >= first
        return results

    def run(self, tokens: list[int], cancel_at: int | None = None, **how: Any) -> Result:
        """One turn to its end, cancelled once `cancel_at` ids have been seen."""
        turn = self.submit(tokens, **how)
        seen = 0

        def watch(events: list[EngineEvent]) -> None:
            nonlocal seen
            seen += sum(len(event.tokens) for event in events if isinstance(event, Tokens))
            if cancel_at is not None and seen == cancel_at:
                self.core.submit(Cancel(turn))

        return self.finish([turn], watch)[0]

    def logits_after(self, turn: str, tokens: list[int]) -> Tensor:
        """[vocabulary], of the token after lineage `turn` and `tokens`; leaves no lineage behind."""
        params = SamplingParams(temperature=0, max_tokens=1)
        probe = self.run(tokens, parent=turn, params=params)
        self.core.submit(Release([probe.turn]))
        assert self.logits is not None
        return self.logits[-1]

    def refusal(self, tokens: list[int], **how: Any) -> Rejected:
        turn = self.submit(tokens, **how)
        events = [event for event in self.tick() if event.turn == turn]
        assert len(events) == 1
        assert isinstance(events[0], Rejected)
        return events[0]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense hybrid of four layers, its weights drawn so that the state matters."""
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture
def lab(tiny: Path) -> Callable[..., Lab]:
    torch.set_num_threads(1)
    return lambda model=tiny, **options: Lab(model, **options)


@pytest.fixture
def fresh_logits(tiny: Path) -> Callable[[list[int]], Tensor]:
    """Logits [vocabulary] after `ids`, by an engine that has seen nothing else and computes them in one piece."""

    def compute(ids: list[int]) -> Tensor:
        other = Lab(tiny, prefill_chunk=4096)
        other.run(ids, params=SamplingParams(temperature=0, max_tokens=1))
        assert other.logits is not None
        return other.logits[-1]

    return compute


@pytest.fixture
def assert_exact(fresh_logits: Callable[[list[int]], Tensor]) -> Callable[[Lab, str], None]:
    """Check that a lineage's next logits are those of a fresh engine that prefilled the same ids, to 1e-9."""

    def check(lab: Lab, turn: str, tokens: tuple[int, ...] = (5,)) -> None:
        expected = fresh_logits(lab.known[turn] + list(tokens))
        got = lab.logits_after(turn, list(tokens))
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)

    return check
