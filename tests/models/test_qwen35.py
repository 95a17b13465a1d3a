"""What one forward leaves behind: states, hidden vectors, pages, and nothing where it must not write. In float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

EXACT = 1e-9
KINDS = [{}, {"model_type": "qwen3_5_text", "linear_num_value_heads": 6, "tie_word_embeddings": True}]


@pytest.fixture(params=KINDS, ids=["moe", "dense"])
def model(request: pytest.FixtureRequest, make_model: Any) -> Any:
    return make_model(**request.param)


def fresh(make_bench: Any, model: Any, ids: list[int]) -> Tensor:
    """Logits of a prompt prefilled whole, by itself."""
    bench = make_bench(model)
    logits: Tensor = bench.run(bench.line(), ids)
    return logits


@pytest.mark.parametrize("chunks", [[1], [2], [3], [5, 1, 1, 30], [64], [63], [65], [1, 64], [100, 1]])
def test_any_cut_gives_the_same_logits(
    chunks: list[int], model: Any, make_bench: Any, ids: list[int], relative_difference: Any
) -> None:
    bench = make_bench(model)
    cut = bench.run(bench.line(), ids[:133], *chunks)
    assert relative_difference(cut, fresh(make_bench, model, ids[:133])) < EXACT


def test_every_stored_state_can_be_continued(
    model: Any, make_bench: Any, make_work: Any, ids: list[int], relative_difference: Any
) -> None:
    """States kept after every token of a prompt that itself continues another; each is forked and taken further."""
    expected = fresh(make_bench, model, ids)
    bench = make_bench(model, pages=3000)
    base, other = bench.line(), bench.line()
    bench.logits(make_work(base, ids[:6]))
    stores = [(count, bench.row()) for count in range(1, 101)]
    hidden, _ = bench.hidden(make_work(base, ids[6:106], stores), make_work(other, ids[50:77]))
    for count, row in stores:
        assert torch.equal(bench.rows.hidden[row], hidden[count - 1])
        branch = bench.fork(base, 6 + count, row)
        logits = bench.run(branch, ids[6 + count : 6 + count + 5], 1 + count % 5)
        assert relative_difference(logits, expected[6 + count : 6 + count + 5]) < EXACT


def test_a_shared_state_is_continued_by_several_and_stays(
    model: Any, make_bench: Any, make_work: Any, ids: list[int], relative_difference: Any
) -> None:
    bench = make_bench(model)
    base = bench.line()
    bench.logits(make_work(base, ids[:21]))
    sealed = [tensor[base.row].clone() for tensor in (*bench.rows.conv, *bench.rows.matrix)]
    branches = [bench.fork(base, 21, base.row) for _ in range(3)]
    for step in range(3):
        works = [
            make_work(branch, [ids[40 + 20 * number + step]], write_row=bench.row())
            for number, branch in enumerate(branches)
        ]
        for number, logits in enumerate(bench.logits(*works)):
            line = ids[:21] + ids[40 + 20 * number : 41 + 20 * number + step]
            assert relative_difference(logits, fresh(make_bench, model, line)[-1:]) < EXACT
    kept = [tensor[base.row] for tensor in (*bench.rows.conv, *bench.rows.matrix)]
    assert all(torch.equal(before, after) for before, after in zip(sealed, kept, strict=True))


@pytest.mark.parametrize("length", [1, 5])
def test_a_sequence_sent_to_the_sinks_changes_nothing_else(
    length: int, model: Any, make_bench: Any, make_work: Any, ids: list[int], relative_difference: Any
) -> None:
    bench = make_bench(model)
    live, dead = bench.line(), bench.line()
    bench.logits(make_work(live, ids[:9]), make_work(dead, ids[:9]))
    stored = (1, bench.row()) if length > 1 else ()
    tensors = (*bench.pages.k, *bench.pages.v, *bench.rows.conv, *bench.rows.matrix, bench.rows.hidden)
    before = [tensor.clone() for tensor in tensors]
    stores = [stored] if stored else []
    logits, _ = bench.logits(
        make_work(live, ids[9 : 9 + length]), make_work(dead, ids[30 : 30 + length], stores, live=False)
    )
    expected = fresh(make_bench, model, ids[: 9 + length])[9:]
    assert relative_difference(logits, expected) < EXACT
    changed = [
        (~torch.isclose(old, new, rtol=0, atol=0, equal_nan=True)).flatten(1).any(1).nonzero()[:, 0].tolist()
        for old, new in zip(before, tensors, strict=True)
    ]
    for rows in changed[: 2 * len(bench.pages.k)]:
        assert set(rows) <= {0, *live.pages}
    for rows in changed[2 * len(bench.pages.k) :]:
        assert set(rows) <= {0, live.row}
        assert live.row in rows


def test_writing_to_row_0_discards(model: Any, make_bench: Any, make_work: Any, ids: list[int]) -> None:
    bench = make_bench(model)
    line = bench.line()
    bench.logits(make_work(line, ids[:9]))
    rows = (*bench.rows.conv, *bench.rows.matrix, bench.rows.hidden)
    before = [tensor[1:].clone() for tensor in rows]
    bench.logits(make_work(line, ids[9:15], write_row=0))
    assert all(torch.equal(old.nan_to_num(7), new[1:].nan_to_num(7)) for old, new in zip(before, rows, strict=True))


def test_recomputing_reads_the_pages_it_does_not_write(
    model: Any, make_bench: Any, make_work: Any, ids: list[int], relative_difference: Any
) -> None:
    """A prompt's state is lost and its K and V are not: its tokens run again with their writes sent to the sink."""
    bench = make_bench(model)
    line = bench.line()
    bench.run(line, ids[:30])
    kept = [tensor[line.pages].clone() for tensor in (*bench.pages.k, *bench.pages.v)]
    line.length = 0
    work = make_work(line, ids[:30])
    batch = bench.batch([work])
    batch.kv_rows.zero_()
    bench.model.forward(torch.tensor(ids[:30]), batch, bench.pages, bench.rows)
    line.length = 30
    assert all(
        torch.equal(old.nan_to_num(7), tensor[line.pages].nan_to_num(7))
        for old, tensor in zip(kept, (*bench.pages.k, *bench.pages.v), strict=True)
    )
    logits = bench.run(line, ids[30:40])
    assert relative_difference(logits, fresh(make_bench, model, ids[:40])[30:]) < EXACT


def test_hidden_vectors_stand_beside_their_states(model: Any, make_bench: Any, make_work: Any, ids: list[int]) -> None:
    bench = make_bench(model)
    first, second = bench.line(), bench.line()
    outputs = bench.hidden(make_work(first, ids[:7]), make_work(second, ids[:3]))
    for line, hidden in zip((first, second), outputs, strict=True):
        assert torch.equal(bench.rows.hidden[line.row], hidden[-1])
    outputs = bench.hidden(make_work(first, ids[7:8]), make_work(second, ids[3:4]))
    for line, hidden in zip((first, second), outputs, strict=True):
        assert torch.equal(bench.rows.hidden[line.row], hidden[0])


def test_logits_are_of_the_computing_type(make_model: Any, make_bench: Any, ids: list[int]) -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        model = make_model(dtype)
        bench = make_bench(model)
        logits = bench.run(bench.line(), ids[:10], 4, 5, 1)
        assert logits.dtype == expected
        assert logits.isfinite().all()
