"""Before an engine is ready: every operator that is not the reference is compared with it, on the model's own weights.

A ragged prefill with stored states and two decode steps run through two of the model's layers, one of each kind, with
the reference operators. What each operator was given is kept, and then given to the implementation that was chosen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenspeed.cache.pools import CacheGeometry, PagePool, StateRows
from tokenspeed.execution.channel import StepChannel
from tokenspeed.execution.choices import Choices
from tokenspeed.execution.executor import Executor
from tokenspeed.kernels.registry import Operators
from tokenspeed.models.qwen35 import Qwen35
from tokenspeed.scheduler.plan import Admit, Choice, Plan, Prefill

LENGTHS = (1, 67, 130)
"""Of the prompts: one token, and more than one and two chunks of the delta rule."""
POOLS = ("k_pages", "v_pages", "windows", "matrices")
"""Arguments whose first entry is a sink, which may hold anything."""
UNSPECIFIED = (".page_table", ".logprobs", ".top_ids", ".top_logprobs")
"""Results that hold anything in places that nobody looks at."""
BOUNDS = {torch.bfloat16: 2e-2, torch.float32: 1e-3, torch.float64: 1e-9}
"""‖got − expected‖ ÷ ‖expected‖, by the model's element type."""


Weights = frozenset[int]
"""Addresses of a model's parameters."""


class OperatorError(RuntimeError):
    """An implementation does not compute what its operator means."""

    code = "bad_operator"


def check_operators(model: Qwen35, geometry: CacheGeometry, lengths: tuple[int, int, int] = LENGTHS) -> None:
    """Raises OperatorError for the first implementation of `model.ops` that does not agree with the reference over
    prompts of `lengths`."""
    ops = model.ops
    chosen = {name: getattr(ops, name) for name, by in ops.chosen.items() if by != "reference"}
    calls: list[tuple[str, Call]] = []
    weights = frozenset(value.data_ptr() for value in model.parameters.values())
    try:
        for name in chosen:
            setattr(ops, name, _recording(name, getattr(Operators, name), calls, weights))
        _run(model.one_layer_of_each_kind(), geometry, lengths)
    finally:
        for name, function in chosen.items():
            setattr(ops, name, function)
    for name, call in calls:
        problem = call.problem(chosen[name], BOUNDS[model.dtype])
        if problem is not None:
            by = ops.chosen[name]
            raise OperatorError(f"the {by} implementation of {name} does not agree with the reference: {problem}")


class Call:
    """What an operator was given, and what it made of that."""

    def __init__(self, reference: Callable[..., Any], arguments: dict[str, Any], weights: Weights) -> None:
        self._weights = weights
        self._given = _cloned(arguments, weights)
        self.result = reference(**arguments)
        self._result, self._after = _cloned(self.result, weights), _cloned(arguments, weights)

    def problem(self, function: Callable[..., Any], bound: float) -> str | None:
        """How `function` differs from the reference in what it returns or leaves in its arguments."""
        given = _cloned(self._given, self._weights)
        result = function(**given)
        for name in POOLS:
            for arguments in (given, self._after):
                if name in arguments:
                    arguments[name] = arguments[name][1:]
        pairs = [
            *zip(_tensors("result", result), _tensors("result", self._result), strict=True),
            *zip(_tensors("", given), _tensors("", self._after), strict=True),
        ]
        for (where, got), (_, expected) in pairs:
            if where.endswith(UNSPECIFIED) or got.data_ptr() in self._weights:
                continue
            error = _difference(got, expected)
            if not error <= bound:
                return f"{where.removeprefix('.')} is off by {error:.1e}, more than {bound:.0e}"
        return None


def _recording(
    name: str, reference: Callable[..., Any], calls: list[tuple[str, Call]], weights: Weights
) -> Callable[..., Any]:
    signature = inspect.signature(reference)

    def record(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = Call(reference, dict(bound.arguments), weights)
        calls.append((name, call))
        return call.result

    return record


@torch.inference_mode()
def _run(model: Qwen35, geometry: CacheGeometry, lengths: tuple[int, int, int]) -> None:
    device, size = model.device, geometry.page_size
    small = replace(geometry, attention_layers=1, linear_layers=1)
    needed = [-(-(length + 2) // size) for length in lengths]
    pages, rows = PagePool(small, sum(needed) + 1, device), StateRows(small, 16, device)
    for tensor in (*pages.k, *pages.v, *rows.conv, *rows.matrix):
        tensor.fill_(torch.nan)
    vocabulary, places = model.config.vocabulary, len(lengths) + 1
    choices = Choices(model.ops, places, vocabulary, None, device)
    channel = StepChannel.empty(places, 2, max(needed), size, choices, model.ops, device)
    executor = Executor(model, pages, rows, channel)
    generator = np.random.default_rng(0)
    admits, table, prefills, first = [], [], [], 1
    for place, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        choice = Choice(
            temperature=(0.0, 1.0, 0.7)[place],
            top_k=(0, 0, 20)[place],
            top_p=(1.0, 1.0, 0.95)[place],
            min_p=0.0,
            seed=place,
            logprobs=(3, None, None)[place],
            penalties=(1.1, 0.5, 0.5) if place == 1 else None,
            bias=((1, 2.0),) if place == 1 else (),
            prompt=b"",
            output=b"",
            forced_from=0,
            forced=b"",
        )
        ids = generator.integers(0, vocabulary, length).astype("<i4").tobytes()
        ring = [1 + 2 * place, 2 + 2 * place]
        stores = [(length // 2, 10 + place)] if length > 1 else []
        admits.append(Admit(place, place, ring, 10**6, [], choice))
        table += [(place, index, first + index) for index in range(count)]
        prefills.append(Prefill(place, place, 0, ids, 0, 0, ring[0], stores, True))
        first += count
    decodes = [(place, place) for place in range(len(lengths))]
    executor.launch(Plan(0, [], admits, table, prefills, [], [])).result()
    executor.launch(Plan(1, [], [], [], [], decodes, [])).result()
    executor.launch(Plan(2, [], [], [], [], decodes[1:], [])).result()


def _cloned(value: Any, weights: Weights) -> Any:
    """A copy, but of the model's weights, which are large and which nobody writes."""
    if isinstance(value, Tensor):
        return value if value.data_ptr() in weights else value.clone()
    if isinstance(value, dict):
        return {name: _cloned(item, weights) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_cloned(item, weights) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{field.name: _cloned(getattr(value, field.name), weights) for field in fields(value)})
    return value


def _tensors(where: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _tensors(f"{where}.{name}", item)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _tensors(f"{where}.{index}", item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(f"{where}.{field.name}", getattr(value, field.name))


def _difference(got: Tensor, expected: Tensor) -> float:
    """Relative, of floating-point tensors, where a NaN equals a NaN; of others the share of differing elements."""
    if got.shape != expected.shape:
        return float("inf")
    if not got.numel():
        return 0.0
    if not expected.is_floating_point():
        return float((got != expected).float().mean())
    got, expected = got.double(), expected.double()
    if not torch.equal(got.isfinite(), expected.isfinite()):
        return float("inf")
    got, expected = got.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0)
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))
