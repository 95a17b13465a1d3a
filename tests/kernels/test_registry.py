from __future__ import annotations

import torch

from tokenspeed.kernels import registry
from tokenspeed.kernels.registry import Implementation, Operators, implementations, select


def test_every_operator_is_served_on_a_cpu() -> None:
    ops = select(torch.device("cpu"), torch.float64)
    assert set(ops.chosen) == set(implementations())
    assert {"linear", "gated_delta_prefill", "attention_decode", "mixture", "choose"} <= set(ops.chosen)
    assert set(ops.chosen.values()) == {"reference"}
    assert ops.choose is Operators.choose


def test_the_first_implementation_that_serves_is_chosen(monkeypatch) -> None:
    def only_half(device: torch.device, dtype: torch.dtype) -> bool:
        return dtype == torch.float16

    def doubled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return 2 * x

    listed = implementations()
    listed["linear"].insert(0, Implementation("doubled", doubled, only_half))
    monkeypatch.setattr(registry, "implementations", lambda: listed)
    half, single = (select(torch.device("cpu"), dtype) for dtype in (torch.float16, torch.float32))
    assert half.chosen["linear"] == "doubled"
    assert half.linear is doubled
    assert single.chosen["linear"] == "reference"
    assert single.linear is Operators.linear  # a choice for one model is not another's
