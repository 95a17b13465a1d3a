from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tokenspeed.config.sampling import MAX_TOP_LOGPROBS
from tokenspeed.execution.choices import Choices
from tokenspeed.kernels.registry import select
from tokenspeed.kernels.sampling import TOP
from tokenspeed.scheduler.plan import Choice

CPU = torch.device("cpu")
OFF = Choice(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    logprobs=None,
    penalties=None,
    bias=(),
    prompt=b"",
    output=b"",
    forced_from=0,
    forced=b"",
)


def ids(*values: int) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def choice(**how: Any) -> Choice:
    return Choice(**({name: getattr(OFF, name) for name in OFF.__struct_fields__} | how))


def choices(places: int = 2, positions: int | None = 12) -> Choices:
    return Choices(select(CPU, torch.float32), places, 8, positions, CPU)


def token(made: Choices, place: int, position: int, logits: list[float]) -> int:
    chosen = made.choose(
        torch.tensor([logits]), torch.tensor([place]), torch.tensor([position]), torch.ones(1, dtype=torch.bool)
    )
    return int(chosen.tokens)


def test_a_place_starts_over() -> None:
    """Nothing of the turn before is left: penalties, bias, counts, forced ids, what is reported."""
    made = choices()
    flat = [1.0] * 8
    made.admit(
        1, choice(bias=((6, 5.0), (6, 9.0)), penalties=(2.0, 0.5, 0.25), logprobs=3, forced_from=10, forced=ids(2))
    )
    assert made.reported(1) == 3
    assert [token(made, 1, position, flat) for position in (9, 10)] == [6, 2]
    assert made.options.counts[1].tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    made.admit(1, choice(penalties=(2.0, 0.5, 0.25), prompt=ids(0, 0), output=ids(1, 3, 1)))
    assert made.reported(1) is None
    assert made.options.in_prompt[1].tolist() == [True] + [False] * 7
    assert made.options.counts[1].tolist() == [0, 2, 0, 1, 0, 0, 0, 0]
    assert token(made, 1, 10, flat) == 2
    made.admit(1, OFF)
    assert [token(made, 1, 10, flat) for _ in range(2)] == [0, 0]
    assert int(made.options.counts[1].sum()) == 4  # nobody counts where nothing looks


def test_a_mask_holds_until_it_is_lifted_or_the_place_starts_over() -> None:
    made = choices()
    flat = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    made.allow(1, ids(0b00010110))
    assert [token(made, 1, position, flat) for position in (1, 2)] == [4, 4]
    assert token(made, 0, 1, flat) == 7
    made.allow(1, ids(0b00000010))
    assert token(made, 1, 3, flat) == 1
    made.allow(1, b"")
    assert token(made, 1, 4, flat) == 7
    made.allow(1, ids(0b00000010))
    made.admit(1, OFF)
    assert token(made, 1, 4, flat) == 7
    made.allow(1, ids(0))
    assert token(made, 1, 4, flat) == -1, "with nothing allowed there is no valid token"


def test_forced_ids_end_with_the_context() -> None:
    made = choices()
    made.admit(0, choice(forced_from=11, forced=ids(3, 4, 5)))
    assert [token(made, 0, position, [0.0] * 7 + [1.0]) for position in (10, 11, 12)] == [7, 3, 4]


def test_seeds_of_64_bits() -> None:
    made = choices(positions=None)
    made.admit(0, choice(seed=2**64 - 1, temperature=1.0, top_k=5))
    assert made.options.seed.tolist()[0] == -1
    assert made.options.top_k.tolist() == [5, 0]


def test_as_many_can_be_reported_as_can_be_asked_for() -> None:
    assert TOP == MAX_TOP_LOGPROBS
