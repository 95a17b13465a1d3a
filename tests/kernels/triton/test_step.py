from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from tokenspeed.kernels import step as reference
from tokenspeed.kernels.triton import step as kernels

PLACES, RING, PAGES, PAGE = 5, 3, 1500, 4


@pytest.fixture
def state(device: torch.device) -> dict[str, Tensor]:
    """Places 0 … 3 run, 3 at a position far into the table; 4 is finished. Stop ids of place 1 hold token 7."""
    integers = {
        "token": torch.tensor([5, 6, 7, 8, 9]),
        "length": torch.tensor([0, 3, 4, 4 * 1300 + 1, 17]),
        "ring": torch.arange(1, 1 + PLACES * RING).view(PLACES, RING),
        "at": torch.tensor([0, 1, 2, 0, 1]),
        "finished": torch.tensor([False, False, False, False, True]),
        "table": torch.randint(1, 10**12, (PLACES, PAGES)),
        "embedded": torch.tensor(3),
        "limit": torch.tensor([100, 100, 7, 10**6, 100]),
        "stop_ids": torch.tensor([[-1, -1, -1], [-1, 7, -1], [-1, -1, -1], [7, 1, -1], [-1, -1, -1]]),
    }
    return {name: value.to(device) for name, value in integers.items()}


def begin(module, state: dict[str, Tensor], places: Tensor) -> reference.StepInputs:
    names = ("token", "length", "ring", "at", "finished", "table", "embedded")
    return module.begin_step(*(state[name] for name in names), places, PAGE, PAGES)


def end(module, state: dict[str, Tensor], places: Tensor, inputs: reference.StepInputs, tokens: Tensor) -> Tensor:
    names = ("token", "length", "at", "finished", "limit", "stop_ids")
    values = (state[name] for name in names)
    return module.end_step(*values, places, tokens, inputs.lengths, inputs.following, inputs.live)


@pytest.mark.parametrize("order", [[0], [3, 1, 0, 2], [2, 4, 3, 4, 4]])
def test_a_step(order: list[int], state: dict[str, Tensor], device: torch.device) -> None:
    places = torch.tensor(order, device=device)
    tokens = torch.tensor([7, 7, 50, -1, 60][: len(order)], device=device)
    ours, theirs = ({name: value.clone() for name, value in state.items()} for _ in range(2))
    got, expected = begin(kernels, ours, places), begin(reference, theirs, places)
    for field in fields(expected):
        one, other = getattr(got, field.name), getattr(expected, field.name)
        if field.name == "page_table":
            used = torch.arange(PAGES, device=device) * PAGE < expected.lengths[:, None]
            one, other = one * used, other * used
        assert torch.equal(one, other), field.name
    told = end(kernels, ours, places, got, tokens)
    assert torch.equal(told, end(reference, theirs, places, expected, tokens))
    assert told.tolist() == [-2 if place == 4 else token for place, token in zip(order, tokens.tolist(), strict=True)]
    for name in state:
        assert torch.equal(ours[name], theirs[name]), name
    assert ours["embedded"] == 3 + sum(place != 4 for place in order)
