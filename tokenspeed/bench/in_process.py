"""An engine in this process as a target of the agentic workload."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np

from tokenspeed.bench.agentic import Answer, Ask, Script
from tokenspeed.bench.driver import Driver, Timed
from tokenspeed.engine.core import EngineCore


class EngineTarget:
    """Takes turns with an engine core, on random token ids. Every conversation has a tenant of its own."""

    cache_at_start = "nothing is shared: each conversation is a tenant of its own"
    shared = 0

    def __init__(self, core: EngineCore) -> None:
        self._driver = Driver(core)
        self._vocabulary = core.info.vocab_size
        self._tenants = (f"conversation {number}" for number in count())

    def slack(self, generate: int) -> int:
        return 0

    def converse(self, scripts: Sequence[Script]) -> None:
        driver = self._driver
        talks: dict[str, tuple[Script, str]] = {}  # by the running turn
        taken: list[Timed] = []
        for script in scripts:
            tenant = next(self._tenants)
            talks[self._submit(next(script), tenant, None).name] = script, tenant
        while talks:
            for turn in driver.step():
                script, tenant = talks.pop(turn.name)
                taken.append(turn)
                try:
                    ask = script.send(_answer(turn))
                except StopIteration:
                    continue
                talks[self._submit(ask, tenant, turn).name] = script, tenant
        driver.release(*taken)

    def _submit(self, ask: Ask, tenant: str, parent: Timed | None) -> Timed:
        drawn = np.random.default_rng(list(ask.seed.encode())).integers(0, self._vocabulary, ask.tokens)
        return self._driver.submit(drawn.tolist(), ask.generate, parent=parent, tenant=tenant)


def _answer(turn: Timed) -> Answer:
    usage = turn.usage
    arrivals = [moment - turn.submitted for moment in turn.token_times]
    return Answer(usage.prompt, usage.output, usage.reused, usage.computed, turn.tokens, arrivals)
