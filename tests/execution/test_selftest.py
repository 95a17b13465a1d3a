from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.execution.selftest import OperatorError, check_operators
from tokenspeed.kernels.registry import Operators, implementations, select
from tokenspeed.models.loading import load_model
from tokenspeed.models.qwen35 import Qwen35, cache_geometry
from tokenspeed.models.random_weights import tiny_checkpoint

CPU = torch.device("cpu")
UNUSED = {"swiglu"}  # by a mixture of experts


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.fixture
def model(directory: Path) -> Qwen35:
    return load_model(directory, select(CPU, torch.float32), torch.float32, CPU, "auto", 0, None)


def check(model: Qwen35) -> None:
    check_operators(model, cache_geometry(model.config, 4, model.dtype))


def damaged(value: Any) -> Any:
    """The first tensor in a result, moved by a little in one element."""
    if isinstance(value, tuple):
        return (damaged(value[0]), *value[1:])
    if is_dataclass(value):
        first = fields(value)[0].name
        return replace(value, **{first: damaged(getattr(value, first))})  # type: ignore[type-var]
    value = value.clone()
    value.view(-1)[0] += 1
    return value


def test_the_reference_passes(model: Qwen35) -> None:
    for name in model.ops.chosen:
        model.ops.chosen[name] = "same"
    check(model)
    assert model.ops.linear is Operators.linear


@pytest.mark.parametrize("name", sorted(set(implementations()) - UNUSED))
def test_a_wrong_result_is_named(name: str, model: Qwen35) -> None:
    right = getattr(Operators, name)
    model.ops.chosen[name] = "odd"
    setattr(model.ops, name, lambda *args, **kwargs: damaged(right(*args, **kwargs)))
    with pytest.raises(OperatorError, match=f"the odd implementation of {name} does not agree"):
        check(model)


@pytest.mark.parametrize(
    ("name", "argument"),
    [("qk_norm_rope_write", "k_pages"), ("gated_delta_prefill", "matrices"), ("delta_net_step", "windows")],
)
def test_a_wrong_write_is_named(name: str, argument: str, model: Qwen35) -> None:
    right = getattr(Operators, name)

    def forgetful(**given: Any) -> Any:
        kept = given[argument].clone()
        result = right(**given)
        given[argument].copy_(kept)
        return result

    model.ops.chosen[name] = "odd"
    setattr(model.ops, name, forgetful)
    with pytest.raises(OperatorError, match=f"{name} does not agree with the reference: {argument}"):
        check(model)
