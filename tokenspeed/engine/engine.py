"""The engine in a notebook: token ids in, token ids out, in this process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np

from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.engine.core import EngineCore
from tokenspeed.engine.messages import (
    Cancel,
    Ended,
    EngineEvent,
    EngineInfo,
    EngineStats,
    Generate,
    Rejected,
    Release,
    Tokens,
    TurnTimings,
    TurnUsage,
)

TENANT = "notebook"


class EngineRefusal(ValueError):
    """A request that the engine did not take, or a turn that failed. `code` is stable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Generation:
    """A finished turn.

    Attributes:
        token_ids: the new ids, a stop id included.
        finish_reason: `stop`, `length` or `context_length`.
        logprobs: beside `token_ids`, if asked for.
        usage: `prompt`, `reused`, `computed`, `output`, `recomputed`, `remaining`.
        timings: seconds.
        turn: names its lineage, for `parent=`.
    """

    turn: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: list[float] | None = None
    usage: TurnUsage = field(default_factory=TurnUsage)
    timings: TurnTimings = field(default_factory=TurnTimings)


class Engine:
    """A model and its prefix cache. Calls from several threads follow one another.

        engine = Engine("path/to/model")
        first = engine.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=8))
        more = engine.generate([7, 8], parent=first.turn)     # computes 3 tokens: the last sampled one, 7 and 8

    Args:
        model: a Hugging Face model directory, or a repository id.
        options: further fields of `EngineConfig`.

    Raises:
        ModelError: for a model that cannot be loaded.
    """

    def __init__(self, model: str | Any, **options: Any) -> None:
        self._core = EngineCore(EngineConfig(model=str(model), **options))
        self._names = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def info(self) -> EngineInfo:
        return self._core.info

    @property
    def stats(self) -> EngineStats:
        return self._core.stats()

    @overload
    def generate(
        self, token_ids: Sequence[int], params: SamplingParams | None = None, *, parent: str | None = None
    ) -> Generation: ...

    @overload
    def generate(
        self, token_ids: Sequence[Sequence[int]], params: SamplingParams | None = None, *, parent: str | None = None
    ) -> list[Generation]: ...

    def generate(
        self,
        token_ids: Sequence[int] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        parent: str | None = None,
    ) -> Generation | list[Generation]:
        """Sample from the end of a prompt, or of several at once.

        Args:
            token_ids: the prompt's ids, or a list of prompts.
            parent: a `Generation.turn`; the prompts continue after its ids and compute only what is new.

        Raises:
            EngineRefusal: with the code `context_length_exceeded`, `bad_request`, `unknown_lineage` or `queue_full`.
        """
        prompts, many = _prompts(token_ids)
        with self._lock:
            generations = self._run(prompts, params or SamplingParams(), parent)
        return generations if many else generations[0]

    def _run(self, prompts: list[list[int]], params: SamplingParams, parent: str | None) -> list[Generation]:
        turns: dict[str, Generation] = {}
        for prompt in prompts:
            name = f"turn_{next(self._names)}"
            turns[name] = Generation(name, logprobs=[] if params.logprobs else None)
            # A state one token before the end: the same prompt, or a longer one, then computes what follows it.
            marks = (len(prompt) - 1,) if parent is None and len(prompt) > 1 else ()
            self._core.submit(Generate(name, TENANT, np.asarray(prompt, "<i4").tobytes(), params, parent, marks=marks))
        refused: Rejected | Ended | None = None
        try:
            while self._core.busy:
                for event in self._core.step():
                    if event.turn in turns:
                        refused = _take(turns[event.turn], event) or refused
        except BaseException:
            # Interrupted: nothing of these turns is wanted any more.
            for name in turns:
                self._core.submit(Cancel(name, "nothing"))
            raise
        if refused is not None:
            code = refused.code if isinstance(refused, Rejected) else "engine_error"
            raise EngineRefusal(code, refused.message or code)
        return list(turns.values())

    def release(self, turn: str) -> None:
        """Forget a lineage: its ids, and, when room is needed, its cache before others'."""
        with self._lock:
            self._core.submit(Release([turn]))


def _prompts(token_ids: Sequence[int] | Sequence[Sequence[int]]) -> tuple[list[list[int]], bool]:
    """The prompts, and whether they came as a list of prompts. Raises TypeError on anything but ids."""
    items: list[Any] = list(token_ids)
    many = bool(items) and isinstance(items[0], Sequence | np.ndarray) and not isinstance(items[0], str)
    prompts = [list(prompt) if isinstance(prompt, Sequence | np.ndarray) else [prompt] for prompt in items]
    if not many:
        prompts = [items]
    for token in itertools.chain.from_iterable(prompts):
        if not isinstance(token, int | np.integer):
            raise TypeError(f"a prompt is a list of token ids; {token!r} is none")
    return prompts, many


def _take(generation: Generation, event: EngineEvent) -> Rejected | Ended | None:
    """Note what an event says; returns it if it is a failure."""
    if isinstance(event, Tokens):
        generation.token_ids.extend(event.tokens)
        if generation.logprobs is not None:
            generation.logprobs.extend(event.logprobs or [])
    elif isinstance(event, Ended):
        generation.finish_reason, generation.usage, generation.timings = event.reason, event.usage, event.timings
        return event if event.reason == "error" else None
    elif isinstance(event, Rejected):
        return event
    return None
