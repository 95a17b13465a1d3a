"""The engine itself: a model, its cache, a scheduler and the loop that ties them. Runs where it is called."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable

import msgspec
import torch

from tokenspeed.cache.pools import PagePool, StateRows
from tokenspeed.cache.prefix_cache import SHARED
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.memory import cache_bytes, divide, torch_dtype, usable_device
from tokenspeed.engine.messages import Allow, EngineCommand, EngineEvent, EngineInfo, EngineStats, Generate, Rejected
from tokenspeed.engine.startup import Startup
from tokenspeed.engine.vocabulary import token_bytes
from tokenspeed.execution.channel import StepChannel
from tokenspeed.execution.choices import Choices
from tokenspeed.execution.executor import Executor, Step
from tokenspeed.execution.graphs import buckets
from tokenspeed.execution.selftest import check_operators
from tokenspeed.kernels.registry import compilations, select
from tokenspeed.models.loading import load_model
from tokenspeed.models.qwen35 import cache_geometry
from tokenspeed.models.repository import resolve
from tokenspeed.scheduler.limits import Limits
from tokenspeed.scheduler.plan import LogEntry, Plan
from tokenspeed.scheduler.scheduler import Scheduler

Guide = Callable[[str, int | None], bytes | None]
"""Of a turn in lockstep and its newest token (None: it has none yet) the mask, of `Allow`, of the ids that may follow;
None: any."""

Progress = Callable[[str, int, int], None]
"""What is done at the moment, how much of it, of how much."""

LOADING, CHECKING, COMPILING, RECORDING = "loading tensors", "checking operators", "compiling", "recording decode steps"


class EngineCore:
    """Submit commands, call `step` while `busy`, take events.

    Attributes:
        limits: what the scheduler works within.
        info: what is served.
        on_tick: called with every log entry and its plan.
        guide: asked what the next token of each turn in lockstep may be; None: anything.
        waited_s: how long `step` has waited for the device, all in all.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_tick: Callable[[LogEntry, Plan], None] | None = None,
    ) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        device = usable_device(config.device)
        steps = config.steps(device.type)
        startup = Startup(progress)
        path = resolve(config.model)
        dtype = torch_dtype(config.dtype, device)
        ops = select(device, dtype)
        with startup.phase(LOADING) as done:
            model = load_model(path, ops, dtype, device, config.load_format, config.seed, done)
        shape = model.config
        geometry = cache_geometry(shape, steps.page_size, dtype)
        sizes = divide(config, cache_bytes(config, device), geometry, shape.max_positions, steps.depth)
        self.limits = Limits(
            page_size=steps.page_size,
            pages=sizes.pages,
            rows=sizes.rows,
            max_sequences=config.max_sequences,
            prefill_chunk=steps.prefill_chunk,
            depth=steps.depth,
            max_context=sizes.max_context,
            max_queue=config.max_queue,
            vocab_size=shape.vocabulary,
            eos_token_ids=shape.eos_ids,
            prefix_cache=config.prefix_cache,
            forced_tokens=config.forced_tokens,
            junction_tokens=config.junction_tokens,
            checkpoint_interval=config.checkpoint_interval,
        )
        self.scheduler = Scheduler(self.limits, token_bytes(path))
        pages, rows = PagePool(geometry, sizes.pages, device), StateRows(geometry, sizes.rows, device)
        places, context = config.max_sequences + 1, sizes.max_context
        choices = Choices(ops, places, shape.vocabulary, context if config.forced_tokens else None, device)
        table = -(-context // steps.page_size)
        channel = StepChannel.empty(places, steps.depth + 1, table, steps.page_size, choices, ops, device)
        self.executor = Executor(model, pages, rows, channel)
        if device.type == "cuda":
            with startup.phase(CHECKING):
                check_operators(model, geometry)
            with startup.phase(COMPILING) as done:
                self.executor.warm_up(steps.prefill_chunk, sizes.max_context, done)
            with startup.phase(RECORDING) as done:
                sizes_recorded = buckets(config.max_sequences)
                for number, size in enumerate(reversed(sizes_recorded)):
                    done(number, len(sizes_recorded))
                    self.executor.record(size)
        self._compiled = compilations()
        self.info = EngineInfo(
            model=path.name,
            vocab_size=shape.vocabulary,
            max_context=sizes.max_context,
            eos_token_ids=list(shape.eos_ids),
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            operators=ops.chosen,
            startup_s=startup.seconds,
        )
        self.on_tick = on_tick
        self.guide: Guide | None = None
        self._mask_bytes = 4 * (-(-shape.vocabulary // 32))
        self._clock = clock
        self._depth = steps.depth
        self._ticks = 0
        self.waited_s = 0.0
        self._commands: list[EngineCommand | Allow] = []
        self._in_flight: deque[Step] = deque()
        self._share(config.shared_prefixes)

    def _share(self, prefixes: tuple[bytes, ...]) -> None:
        """Compute what all tenants may reuse. Raises ValueError where that cannot be."""
        for number, tokens in enumerate(prefixes):
            self.submit(Generate(f"shared_{number}", SHARED, tokens, SamplingParams(), sample=False))
        while self.busy:
            for event in self.step():
                if isinstance(event, Rejected):
                    raise ValueError(f"a shared prefix cannot be computed: {event.message}")

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._commands) or self.scheduler.busy or any(step.draws for step in self._in_flight)

    def submit(self, command: EngineCommand) -> None:
        """Take a command for the next tick. A turn without a seed gets one here, outside the scheduler."""
        if isinstance(command, Generate) and command.sampling.seed is None:
            sampling = msgspec.structs.replace(command.sampling, seed=secrets.randbits(64))
            command = msgspec.structs.replace(command, sampling=sampling)
        self._commands.append(command)
        if isinstance(command, Generate) and command.lockstep:
            self._guide(command.turn, None)

    def step(self) -> list[EngineEvent]:
        """One tick: read the result that is `depth` steps late, plan, launch. Returns what became known."""
        ready = len(self._in_flight) > self._depth
        begun = time.perf_counter()
        results = self._in_flight.popleft().result() if ready else []
        self.waited_s += time.perf_counter() - begun
        for turn, token in self.scheduler.seen_in_lockstep(results):
            self._guide(turn, token)
        entry = LogEntry(self._ticks, self._clock(), self._commands, results)
        self._ticks += 1
        self._commands = []
        plan = self.scheduler.tick(entry)
        self._in_flight.append(self.executor.launch(plan))
        if self.on_tick is not None:
            self.on_tick(entry, plan)
        return plan.events

    def _guide(self, turn: str, token: int | None) -> None:
        """Put into the next entry what a turn may go on with. Raises ValueError for a mask of the wrong size."""
        if self.guide is None:
            return
        mask = self.guide(turn, token) or b""
        if len(mask) not in (0, self._mask_bytes):
            raise ValueError(f"the mask of turn {turn!r} has {len(mask)} bytes; {self._mask_bytes} are needed")
        self._commands.append(Allow(turn, mask))

    def residency(self, turns: list[str]) -> list[int]:
        """For each lineage, the length whose state is kept; 0 for unknown ones."""
        return self.scheduler.residency(turns)

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        pages, rows = scheduler.cache.pages, scheduler.cache.rows
        return EngineStats(
            running=len(scheduler.running),
            queued=len(scheduler.queue),
            embedded=int(self.executor.embedded),
            computed=scheduler.computed,
            reused=scheduler.reused,
            decoded=scheduler.decoded,
            pages_total=pages.total,
            pages_free=pages.free_soon,
            rows_total=rows.total,
            rows_free=rows.free_soon,
            late_compilations=compilations() - self._compiled,
        )
