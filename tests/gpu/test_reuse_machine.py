"""The state machine of `tests/engine/test_reuse_machine.py`, on the device in float32.

What an engine leaves behind is compared with the CPU's forward in float64. The difference is that of float32: a prompt
may be computed in chunks, a token at a time or in one piece, whose sums round differently.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import Phase

from tokenspeed.config.engine import EngineConfig
from tokenspeed.engine.core import EngineCore
from tokenspeed.kernels.registry import select
from tokenspeed.models.loading import load_model
from tokenspeed.scheduler.scheduler import Scheduler

pytestmark = pytest.mark.xdist_group("reuse machine")

TOLERANCE = 1e-3
"""Of the largest value. On a CPU float32 is off by up to 6e-6; the least that a seeded fault does is 0.02."""
EXAMPLES_S = 45
CHUNK, SEQUENCES = 64, 4


class Engines:
    """One engine a page size, which starts over for every example: a GPU's compiles and records for half a minute."""

    def __init__(self, model: Path, device: torch.device, context: int) -> None:
        self._started: dict[int, EngineCore] = {}
        self._model, self._device, self._context = model, device, context

    def start(self, **settings: Any) -> EngineCore:
        size = 8 if settings["page_size"] > 3 else 3
        if size not in self._started:
            config = EngineConfig(
                model=str(self._model),
                device=str(self._device),
                dtype="float32",
                depth=1,
                page_size=size,
                prefill_chunk=CHUNK,
                pages=self._pages(size) + 12,
                rows=15,
                max_sequences=SEQUENCES,
                max_context=self._context,
            )
            self._started[size] = EngineCore(config)
        core = self._started[size]
        # The pools are as large as any example wants them; the scheduler is told of less.
        core.limits = replace(
            core.limits,
            pages=self._pages(size) + settings["pages"] - self._pages(settings["page_size"]),
            rows=settings["rows"] - settings["depth"] + 1,
            **{name: settings[name] for name in ("prefill_chunk", "max_sequences", "junction_tokens")},
            checkpoint_interval=settings["checkpoint_interval"],
        )
        core.scheduler = Scheduler(core.limits)
        core._commands.clear()
        core._in_flight.clear()
        channel, pages, rows = core.executor.channel, core.executor.pages, core.executor.rows
        channel.finished.fill_(True)
        channel.embedded.zero_()
        for tensor in (*pages.k, *pages.v, *rows.conv, *rows.matrix, rows.hidden):
            tensor.fill_(torch.nan)
        return core

    def _pages(self, size: int) -> int:
        """Of a full context."""
        return -(-self._context // size)


@pytest.fixture(scope="module")
def machine(reuse: ModuleType, dense: Path, device: torch.device) -> Any:
    cpu = torch.device("cpu")
    truth = load_model(dense, select(cpu, torch.float64), torch.float64, cpu, "auto", 0, None)
    engines = Engines(dense, device, reuse.CONTEXT)
    how = {
        "model": dense,
        "truth": truth,
        "tolerance": TOLERANCE,
        "engine": lambda self, **settings: engines.start(**settings),
    }
    return type("Machine", (reuse.ReuseMachine,), how)


def test_nothing_makes_reuse_change_an_answer(reuse: ModuleType, machine: Any) -> None:
    reuse.run_machine(machine, 1)  # the engines are started outside of the time
    until = time.monotonic() + EXAMPLES_S
    while time.monotonic() < until:
        reuse.run_machine(machine, 5)


@pytest.mark.parametrize("fault", ["aged_row", "page_with_two_writers", "swapped_hidden"])
def test_seeded_faults_are_found(reuse: ModuleType, machine: Any, fault: str) -> None:
    seeded: Callable[[], Any] = getattr(reuse, fault)
    with seeded(), pytest.raises(BaseException, match=r"is off by|several failures|sub-exception"):
        reuse.run_machine(machine, 200, phases=(Phase.generate,))
