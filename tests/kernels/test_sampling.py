from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tokenspeed.kernels.sampling import (
    TOP,
    SamplingOptions,
    adjust_logits,
    choose,
    gumbel_noise,
    pack_scalars,
    sample,
    token_logprobs,
)

MASK = 0xFFFFFFFF


def draw(logits: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """`sample` with defaults, and the tokens' log-probabilities; an option is one number for all rows or a list."""
    rows = logits.shape[0]
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0, "positions": 0}
    given = {}
    for name, default in defaults.items():
        value = options.get(name, default)
        dtype = torch.float32 if isinstance(default, float) else torch.int64
        given[name] = torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)
    tokens = sample(logits, **given)
    return tokens, token_logprobs(logits, tokens, 0)[0]


def noise_by_integers(seed: int, position: int, token: int) -> float:
    """The rule in Python's integers."""
    c = [token, position & MASK, position >> 32, 0]
    k = [seed & MASK, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second & MASK, first >> 32 ^ c[3] ^ k[1], first & MASK]
        k = [k[0] + 0x9E3779B9 & MASK, k[1] + 0xBB67AE85 & MASK]
    u = ((c[0] >> 8) + 0.5) / 2**24
    return -math.log(-math.log(u))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 17, 2**31 + 5, 2**33 + 1])
def test_noise_is_the_stated_function(seed: int, position: int) -> None:
    bits = seed - 2**64 if seed >= 2**63 else seed
    ids = torch.tensor([0, 1, 248_319])
    noise = gumbel_noise(torch.tensor(bits), torch.tensor(position), ids)
    torch.testing.assert_close(
        noise.tolist(), [noise_by_integers(seed, position, token) for token in ids.tolist()], rtol=1e-12, atol=0
    )


def test_draws_follow_the_distribution() -> None:
    """χ² of 40,000 draws, over positions and over seeds, at 11 degrees of freedom: 31.26 is passed by 1 in 1,000."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    rows = 20_000
    expected = (logits.double() / 0.7).softmax(0) * rows
    counters = list(range(rows))
    for options in ({"positions": counters, "seeds": 99}, {"seeds": counters, "positions": 1234}):
        tokens, _ = draw(logits.expand(rows, -1), temperature=0.7, **options)
        counts = tokens.bincount(minlength=12).double()
        assert float(((counts - expected).square() / expected).sum()) < 31.26


def kept_by_rule(row: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    order = order[: top_k or len(row)]
    weights = [math.exp((row[token] - row[order[0]]) / temperature) for token in order]
    weights = [weight / sum(weights) for weight in weights]
    kept, reached = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if reached >= top_p and top_p < 1:
            break
        kept.append(token)
        reached += weight
    return {token for token, weight in zip(kept, weights, strict=False) if weight >= min_p * weights[0]}


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (4, 1.0, 0.0),
        (0, 0.6, 0.0),
        (0, 1.0, 0.3),
        (6, 0.8, 0.2),
        (3, 0.05, 0.9),
        (99, 0.9, 0.0),
    ],
)
def test_options_keep_what_the_rule_keeps(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2
    rows = 600
    seen: list[set[int]] = []
    for row in logits:
        tokens, _ = draw(
            row.expand(rows, -1),
            temperature=3.0,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            positions=list(range(rows)),
        )
        seen.append(set(tokens.tolist()))
    # At this temperature every token that is kept has a share above 2%: 600 draws miss one with 1 in 100,000.
    assert seen == [kept_by_rule(row, 3.0, top_k, top_p, min_p) for row in logits.tolist()]


def test_a_draw_is_the_argmax_of_noisy_logits_over_the_kept() -> None:
    logits = torch.randn(8, 50, dtype=torch.float64)
    tokens, _ = draw(logits, temperature=0.8, top_k=5, seeds=list(range(8)), positions=list(range(100, 108)))
    for row in range(8):
        values = logits[row].tolist()
        kept = kept_by_rule(values, 0.8, 5, 1.0, 0.0)
        scores = {token: values[token] / 0.8 + noise_by_integers(row, 100 + row, token) for token in kept}
        assert int(tokens[row]) == max(scores, key=lambda token: scores[token])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(5, 30)
    options = {
        "temperature": [0.0, 1.0, 0.5, 2.0, 1.0],
        "top_k": [0, 3, 0, 0, 7],
        "top_p": [1.0, 1.0, 0.5, 1.0, 0.9],
        "min_p": [0.0, 0.0, 0.0, 0.1, 0.0],
        "seeds": [1, 2, 3, 4, 5],
        "positions": [9, 8, 7, 6, 5],
    }
    together, logprobs = draw(logits, **options)
    for row in range(5):
        alone, logprob = draw(
            logits[row : row + 1], **{name: values[row : row + 1] for name, values in options.items()}
        )
        assert int(alone) == int(together[row])
        assert float(logprob) == float(logprobs[row])


def test_greedy_takes_the_lowest_of_equals_whatever_the_options() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    tokens, _ = draw(logits, temperature=0.0, top_k=1, top_p=0.1, min_p=1.0, seeds=[7, 8])
    assert tokens.tolist() == [1, 0]


def test_equal_logits_rank_by_id() -> None:
    logits = torch.zeros(300, 8)
    tokens, _ = draw(logits, top_k=3, positions=list(range(300)))
    assert set(tokens.tolist()) == {0, 1, 2}


def test_a_very_small_temperature_is_greedy_and_finite() -> None:
    tokens, _ = draw(torch.tensor([[1e4, 2e4, -3e4]]).expand(50, -1), temperature=2e-38, positions=list(range(50)))
    assert tokens.tolist() == [1] * 50


def test_logprob_is_of_the_unmodified_distribution() -> None:
    logits = torch.randn(20, 9, dtype=torch.float64) * 2
    tokens, logprobs = draw(logits, temperature=1.7, top_k=4, top_p=0.9, positions=list(range(20)))
    for row, token, logprob in zip(logits.tolist(), tokens.tolist(), logprobs.tolist(), strict=True):
        total = math.log(sum(math.exp(value) for value in row))
        assert logprob == pytest.approx(row[token] - total, rel=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_yields_minus_one(temperature: float) -> None:
    logits = torch.zeros(5, 6)
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    logits[3, 0] = torch.inf
    logits[4, 1:] = -torch.inf
    tokens, logprobs = draw(logits, temperature=temperature)
    assert [int(token) == -1 for token in tokens] == [False, True, True, True, False]
    assert int(tokens[4]) == 0
    assert logprobs.isnan().tolist() == [False, True, True, True, False]


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    _, logprobs = draw(torch.randn(2, 6).bfloat16())
    assert logprobs.dtype == torch.float32


def test_the_most_likely_are_named_in_order() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0, 2.0], [0.0, float("nan"), 1.0, 2.0, 3.0]], dtype=torch.float64)
    chosen, ids, logprobs = token_logprobs(logits, torch.tensor([3, -1]), 3)
    expected = [math.log(math.exp(value) / sum(map(math.exp, [1, 3, 3, -2, 2]))) for value in (3, 3, 2, -2)]
    assert ids[0].tolist() == [1, 2, 4]
    assert logprobs[0].tolist() == pytest.approx(expected[:3])
    assert chosen[0].item() == pytest.approx(expected[3])
    assert chosen[1].isnan()
    assert token_logprobs(logits, torch.tensor([3, -1]), 0)[1].shape == (2, 0)


def test_penalties_and_bias_are_the_stated_functions() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 6, dtype=torch.float64)
    in_prompt = torch.rand(3, 6) < 0.4
    counts = torch.randint(0, 3, (3, 6), dtype=torch.int32)
    repetition, presence, frequency = [1.0, 1.7, 0.5], [0.0, 0.3, -0.4], [0.0, 0.2, 1.1]
    bias = torch.randn(3, 6)
    got = adjust_logits(
        logits, in_prompt, counts, torch.tensor(repetition), torch.tensor(presence), torch.tensor(frequency), bias
    )
    for row in range(3):
        for token in range(6):
            value, count = logits[row, token].item(), int(counts[row, token])
            if in_prompt[row, token] or count:
                value = value / repetition[row] if value > 0 else value * repetition[row]
            value -= presence[row] * (count > 0) + frequency[row] * count
            assert got[row, token].item() == pytest.approx(value + bias[row, token].item(), rel=1e-6)


def test_penalties_that_are_off_change_nothing() -> None:
    logits = torch.randn(2, 5)
    off = adjust_logits(
        logits,
        torch.ones(2, 5, dtype=torch.bool),
        torch.ones(2, 5, dtype=torch.int32),
        torch.ones(2),
        torch.zeros(2),
        torch.zeros(2),
        torch.zeros(2, 5),
    )
    assert torch.equal(off, logits)


def options_of(vocabulary: int, *rows: dict[str, object], positions: int | None = None) -> SamplingOptions:
    options = SamplingOptions.empty(len(rows), vocabulary, positions, torch.device("cpu"))
    for place, row in enumerate(rows):
        options.scalars[place] = pack_scalars(**row)  # type: ignore[arg-type]
    return options


def test_packed_scalars_are_read_back() -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition": 1.5,
        "presence": -0.5,
        "frequency": 2.0,
        "top_k": 2**31 - 1,
        "reported": 20,
        "adjusted": True,
        "masked": True,
    }
    options = options_of(5, {}, given | {"seed": 2**64 - 3})
    assert {name: getattr(options, name)[1].item() for name in given} == given
    assert options.seed.tolist() == [0, -3]
    assert options.reported[0] == -1
    assert options_of(5, {}).temperature.tolist() == [1.0]
    assert SamplingOptions.empty(3, 5, None, torch.device("cpu")).temperature.tolist() == [0.0] * 3


def test_choosing_is_adjusting_masking_and_drawing() -> None:
    """Each place by its own options; arrays of those that are off are not looked at."""
    penalized = {"adjusted": True, "repetition": 1.4, "presence": 0.3, "frequency": 0.2}
    rows = [{"temperature": 0.0}, penalized, {"masked": True, "top_k": 5}, penalized | {"masked": True, "top_p": 0.8}]
    options = options_of(40, *({"seed": 90 + place} | row for place, row in enumerate(rows)))
    options.counts.copy_(torch.randint(0, 3, (4, 40)))
    options.in_prompt.copy_(torch.rand(4, 40) < 0.3)
    options.bias.normal_()
    options.bias[0], options.bias[2] = torch.nan, torch.nan
    options.allowed.copy_(torch.tensor([[0, 0], [0, 0], [0x0F0F0F0F, 0xF0], [0x7F00FF00, 0x0F]]))
    counts = options.counts.clone()
    places, positions = torch.tensor([3, 0, 2, 1]), torch.tensor([5, 6, 7, 8])
    logits = torch.randn(4, 40, dtype=torch.float64) * 2
    chosen = choose(logits, options, places, positions, torch.tensor([True, True, True, False]))
    for row, place in enumerate(places.tolist()[:3]):
        scores = logits[row].clone()
        if "adjusted" in rows[place]:
            arrays = options.in_prompt[[place]], counts[[place]]
            floats = (getattr(options, name)[[place]] for name in ("repetition", "presence", "frequency"))
            scores = adjust_logits(scores[None], *arrays, *floats, options.bias[[place]])[0]
        if "masked" in rows[place]:
            bits = sum((word & 0xFFFFFFFF) << 32 * index for index, word in enumerate(options.allowed[place].tolist()))
            scores[[token for token in range(40) if not bits >> token & 1]] = -torch.inf
        how = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | rows[place]
        how = {name: how[name] for name in ("temperature", "top_k", "top_p")}
        alone, _ = draw(scores[None], **how, seeds=90 + place, positions=int(positions[row]))
        assert int(alone) == int(chosen.tokens[row])
    assert chosen.tokens[3] == -1
    counts[3, chosen.tokens[0]] += 1
    assert torch.equal(options.counts, counts)


def test_forced_ids_and_rows_that_are_not_finite() -> None:
    options = options_of(6, {"temperature": 0.0}, {"temperature": 0.0, "masked": True}, positions=9)
    assert options.forced is not None
    options.forced[:, 9] = 4
    logits = torch.tensor([[0.0, 1, 2, 3, 0, 0]] * 2)
    logits[1, 5] = torch.nan
    options.allowed[1] = 1  # hides the NaN, which counts all the same
    for position, expected in ((9, [4, -1]), (8, [3, -1])):
        places, live = torch.arange(2), torch.ones(2, dtype=torch.bool)
        assert choose(logits, options, places, torch.full((2,), position), live).tokens.tolist() == expected


def test_what_is_reported_is_of_the_raw_logits() -> None:
    options = options_of(30, {"reported": 3, "adjusted": True}, {})
    options.bias[0, 7] = 100.0
    logits = torch.randn(2, 30, dtype=torch.float64)
    chosen = choose(
        logits, options, torch.arange(2), torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    )
    expected = logits.log_softmax(-1)
    assert chosen.tokens[0] == 7
    assert chosen.logprobs[0] == expected[0, 7]
    assert chosen.top_ids.shape == chosen.top_logprobs.shape == (2, TOP)
    ranked = expected[0].sort(descending=True)
    assert torch.equal(chosen.top_ids[0], ranked.indices[:TOP])
    assert torch.equal(chosen.top_logprobs[0], ranked.values[:TOP])
