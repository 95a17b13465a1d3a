from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed.kernels import sampling as reference
from tokenspeed.kernels.sampling import TOP, Chosen, SamplingOptions, pack_scalars
from tokenspeed.kernels.triton import sampling as kernels
from tokenspeed.kernels.triton.launch import INTERPRETED

VOCABULARY, PLACES = 700, 40
TRUNCATIONS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 20, "top_p": 0.95},
    {"top_k": 20, "top_p": 0.5},
    {"top_k": 200},
    {"top_k": 250, "top_p": 0.9, "min_p": 0.001},
    {"top_k": VOCABULARY + 5, "top_p": 0.9},
    {"top_p": 0.8},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"top_p": 0.995},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "min_p": 0.1},
    {"top_p": 0.9, "min_p": 0.02},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5},
    {"top_k": 3, "temperature": 2e-38},
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many parts and candidates, for this vocabulary, as the constants give for a real one."""
    sizes = {
        "PART": 32,
        "SURVEYED_PARTS": 16,
        "CAPACITY": 512,
        "PROBE": 12,
        "GROUP": 8,
        "PAIRS": 64,
        "OTHERS": 64,
        "SEARCH_BLOCK": 1024,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(kernels, name, value)


def options_of(
    rows: list[dict[str, Any]], vocabulary: int = VOCABULARY, positions: int | None = None
) -> SamplingOptions:
    """Options of the first places. Arrays that do not count where an option is off hold what would show."""
    options = SamplingOptions.empty(PLACES, vocabulary, positions, torch.device("cpu"))
    for place, row in enumerate(rows):
        options.scalars[place] = pack_scalars(**row)
    options.bias.fill_(torch.nan)
    options.counts.fill_(3)
    options.in_prompt.fill_(True)
    options.allowed.zero_()
    return options


def both(
    device: torch.device, logits: Tensor, options: SamplingOptions, places: Tensor, positions: Tensor, live: Tensor
) -> tuple[Chosen, Chosen]:
    """What the reference and the kernels choose. Both must leave the same options behind."""
    arrays = {name: value for name, value in vars(options).items() if value is not None}
    theirs = replace(options, **{name: value.to(device, copy=True) for name, value in arrays.items()})
    on_device = logits
    if device.type != "cpu":
        on_device = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=device).copy_(logits)
    got = kernels.choose(on_device, theirs, places.to(device), positions.to(device), live.to(device))
    expected = reference.choose(logits, options, places, positions, live)
    for name, value in arrays.items():
        torch.testing.assert_close(getattr(theirs, name).cpu(), value, rtol=0, atol=0, equal_nan=True)
    return expected, Chosen(**{name: value.cpu() for name, value in vars(got).items()})


def logits_of(rows: int, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def positions_of(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 2**40, (rows,), generator=torch.Generator().manual_seed(seed))


def alive(rows: int) -> Tensor:
    return torch.ones(rows, dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_all_sorts_of_options(device: torch.device, dtype: torch.dtype) -> None:
    """Strided logits, fewer rows than places, places in any order."""
    rows = [{"temperature": 0.0, "top_k": 3}, {"seed": 2**64 - 1}, {"temperature": 0.3, "seed": 2**63}, *TRUNCATIONS]
    rows = rows[:: 1 if dtype == torch.float32 else 2]
    options = options_of([{"seed": 11 * place} | row for place, row in enumerate(rows)])
    places = torch.randperm(len(rows))[: len(rows) - 1]
    wide = torch.full((len(places), VOCABULARY + 36), torch.nan, dtype=dtype)
    logits = wide[:, 4 : 4 + VOCABULARY].copy_(logits_of(len(places)))
    expected, got = both(device, logits, options, places, positions_of(len(places)), alive(len(places)))
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert len(set(got.tokens.tolist())) > 6


@pytest.mark.parametrize("capacity", [512, 16])
def test_ties_are_kept_by_id(device: torch.device, monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    """Few different logits, so that what is kept ends among equals; with few candidates, by the long search."""
    monkeypatch.setattr(kernels, "CAPACITY", capacity)
    monkeypatch.setattr(kernels, "PAIRS", min(capacity, 64))
    monkeypatch.setattr(kernels, "SEARCH_BLOCK", 512)
    rows, ones = [{"top_k": 3}, {"top_k": 50, "top_p": 0.77}, {"top_p": 0.21, "min_p": 0.1}], [{"top_k": 1}] * 4
    options = options_of([{"seed": place, "temperature": 3.0} | row for place, row in enumerate([*rows, *rows, *ones])])
    logits = (logits_of(10) / 3).round()
    logits[3:] = 1.25
    expected, got = both(device, logits, options, torch.arange(10), positions_of(10), alive(10))
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert int(got.tokens[3]) < 3


def test_the_long_search_keeps_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CAPACITY", 16)
    monkeypatch.setattr(kernels, "PAIRS", 16)
    rows = TRUNCATIONS[2:9]
    options = options_of([{"seed": 7 + place, "temperature": 2.0} | row for place, row in enumerate(rows)])
    count = len(rows)
    expected, got = both(device, logits_of(count, 5), options, torch.arange(count), positions_of(count), alive(count))
    assert got.tokens.tolist() == expected.tokens.tolist()


def test_rows_that_are_not_finite_or_not_live(device: torch.device) -> None:
    rows = [{"temperature": 0.0}, {}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.2, "reported": 3}]
    options = options_of(rows * 5)
    logits, live = logits_of(25), alive(25)
    logits[5:10, 650] = torch.nan
    logits[10:15] = -torch.inf
    logits[15:20, 40] = torch.inf
    logits[20:25] = torch.nan
    live[20:25] = False
    options.counts[24], options.scalars[24] = 0, pack_scalars(adjusted=True)
    expected, got = both(device, logits, options, torch.arange(25), positions_of(25), live)
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert [token >= 0 for token in got.tokens.tolist()] == [True] * 5 + [False] * 20
    assert got.logprobs[[9, 14, 19]].isnan().all()


def test_logits_of_minus_infinity_are_never_drawn(device: torch.device) -> None:
    """Among them whole parts, and more of them than top-k asks for."""
    rows = [
        {"temperature": 0.0},
        {},
        {"top_k": 4},
        {"top_k": 300},
        {"top_p": 0.9},
        {"min_p": 1e-9},
        {"top_k": 9, "top_p": 0.9},
    ]
    options = options_of([{"temperature": 5.0} | row for row in rows])
    logits = torch.full((7, VOCABULARY), -torch.inf)
    logits[:, [3, 100, 101, 333, 699]] = logits_of(7)[:, :5]
    expected, got = both(device, logits, options, torch.arange(7), positions_of(7), alive(7))
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert set(got.tokens.tolist()) <= {3, 100, 101, 333, 699}


def test_penalties_bias_and_mask(device: torch.device) -> None:
    """Only of live places that have them; the token is counted there."""
    penalties = {"adjusted": True, "repetition": 1.3, "presence": 0.4, "frequency": 0.2}
    kinds = [{"temperature": 0.0}, {}, {"top_k": 20, "top_p": 0.9}, {"top_p": 0.9}]
    extras = [penalties, {"masked": True}, penalties | {"masked": True}, {}]
    rows = [kind | extra for extra in extras for kind in kinds]
    options = options_of(rows)
    generator = torch.Generator().manual_seed(2)
    for place, row in enumerate(rows):
        if "adjusted" in row:
            options.counts[place] = torch.randint(0, 3, (VOCABULARY,), generator=generator)
            options.in_prompt[place] = torch.rand(VOCABULARY, generator=generator) < 0.3
            options.bias[place] = torch.randn(VOCABULARY, generator=generator)
        if "masked" in row:
            options.allowed[place] = torch.randint(-(2**31), 2**31 - 1, (22,), generator=generator)
    logits, live = logits_of(16), alive(16)
    live[[1, 9]] = False
    counts = options.counts.clone()
    places = torch.randperm(16)
    expected, got = both(device, logits, options, places, positions_of(16), live)
    assert got.tokens.tolist() == expected.tokens.tolist()
    counted = [place for place, running in zip(places.tolist(), live.tolist(), strict=True) if running]
    assert int((options.counts - counts).sum()) == sum("adjusted" in rows[place] for place in counted) > 4


def test_a_mask_that_allows_one_or_none(device: torch.device) -> None:
    options = options_of([{"masked": True, "temperature": 0.7}] * 3 + [{"masked": True, "top_k": 5}])
    options.allowed[[0, 3], 3] = 1 << 31 - 1
    options.allowed[2, 0] = 1
    logits = logits_of(4)
    logits[2, 50] = torch.nan  # counts although it is not allowed
    expected, got = both(device, logits, options, torch.arange(4), positions_of(4), alive(4))
    assert got.tokens.tolist() == expected.tokens.tolist() == [126, -1, -1, 126]


def test_forced_ids_replace_what_could_be_drawn(device: torch.device) -> None:
    options = options_of([{"adjusted": True}, {"temperature": 0.0, "reported": 0}, {}, {"top_k": 2}], positions=20)
    options.bias.zero_()
    assert options.forced is not None
    options.forced[0, 7], options.forced[1, 20], options.forced[2, 3] = 5, 699, 8
    logits = logits_of(4)
    logits[2, 9] = torch.nan
    expected, got = both(device, logits, options, torch.arange(4), torch.tensor([7, 20, 3, 7]), alive(4))
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert got.tokens.tolist()[:3] == [5, 699, -1]
    torch.testing.assert_close(got.logprobs[1], expected.logprobs[1])


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 12])
def test_reported_logprobs(device: torch.device, vocabulary: int) -> None:
    """Of the raw logits, whatever the options; equal ones by id."""
    rows = [{"reported": 0}, {"reported": 20, "top_k": 3, "masked": True}, {"reported": 7, "temperature": 0.0}]
    rows += [{"reported": 20}, {"reported": 20, "adjusted": True}, {}]
    options = options_of(rows, vocabulary)
    options.bias[4] = 3.0
    options.allowed[1] = -1
    logits = logits_of(6, 3, vocabulary)
    logits[3] = (logits[3] / 3).round()
    logits[4] = 0.5
    expected, got = both(device, logits, options, torch.arange(6), positions_of(6), alive(6))
    assert got.tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(got.logprobs[:5], expected.logprobs[:5], rtol=2e-6, atol=2e-6)
    for row, wanted in enumerate([0, 20, 7, 20, 20]):
        assert got.top_ids[row, :wanted].tolist() == expected.top_ids[row, :wanted].tolist()
        top = got.top_logprobs[row, :wanted], expected.top_logprobs[row, :wanted]
        torch.testing.assert_close(*top, rtol=2e-6, atol=2e-6)
    assert got.top_ids.shape == (6, min(TOP, vocabulary))


def test_no_rows(device: torch.device) -> None:
    none = torch.empty(0, dtype=torch.int64)
    expected, got = both(device, torch.empty(0, VOCABULARY), options_of([]), none, none, alive(0))
    assert [value.shape for value in vars(got).values()] == [value.shape for value in vars(expected).values()]


@pytest.mark.skipif(INTERPRETED, reason="too many programs for the interpreter")
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_a_real_vocabulary(device: torch.device, monkeypatch: pytest.MonkeyPatch, spread: float) -> None:
    """With the constants as they are. A narrow spread leaves more than there is room for."""
    monkeypatch.undo()
    kinds = [{"temperature": 0.0}, {}, {"top_k": 20, "top_p": 0.95}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}]
    options = options_of([{"seed": place} | kinds[place % 6] for place in range(36)], 248_320)
    logits = logits_of(36, 1, 248_320) * spread / 3
    expected, got = both(device, logits, options, torch.arange(36), positions_of(36), alive(36))
    assert got.tokens.tolist() == expected.tokens.tolist()
