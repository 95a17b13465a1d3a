"""Exactness to 1e-9 means something only if a wrong memory shows: every single part of it must move the logits.

A sequence's next token is computed from its memory as it is, and again with one layer's conv window, one layer's
matrix, or one page of one layer's K or V zeroed, swapped with another sequence's, or one token old. The logits must
move by ten thousand times the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

EXACT = 1e-9
MOVED = 1e4 * EXACT
LENGTH = 40
PAGE = 4


@pytest.mark.parametrize(
    "changes", [{}, {"model_type": "qwen3_5_text", "linear_num_value_heads": 6}], ids=["moe", "dense"]
)
def test_every_part_of_the_memory_moves_the_logits(
    changes: dict[str, Any],
    make_model: Any,
    make_bench: Any,
    make_work: Any,
    ids: list[int],
    relative_difference: Callable[[Tensor, Tensor], float],
) -> None:
    bench = make_bench(make_model(**changes), page_size=PAGE)
    line, other, aged = bench.line(), bench.line(), bench.row()
    bench.logits(make_work(other, ids[100 : 100 + LENGTH]))
    bench.logits(make_work(line, ids[:LENGTH], stores=[(LENGTH - 1, aged)]))
    probe = ids[LENGTH : LENGTH + 1]

    own = line.row

    def logits() -> Tensor:
        output: Tensor = bench.logits(make_work(line, probe, write_row=0))[0]
        line.length, line.row = LENGTH, own
        return output

    expected = logits()
    assert relative_difference(logits(), expected) == 0.0

    def damages() -> list[tuple[str, Tensor, int, Tensor]]:
        """What is damaged, the tensor and its entry, and what stands there instead."""
        listed = []
        for name, states in (("conv", bench.rows.conv), ("matrix", bench.rows.matrix)):
            for layer, state in enumerate(states):
                replacements = {"zeroed": state[own] * 0, "swapped": state[other.row], "aged": state[aged]}
                listed += [(f"{name} {layer} {how}", state, own, new.clone()) for how, new in replacements.items()]
        for name, pools in (("k", bench.pages.k), ("v", bench.pages.v)):
            for layer, pool in enumerate(pools):
                flat = pool.view(-1, *pool.shape[2:])
                for number, (page, swapped) in enumerate(zip(line.pages[: LENGTH // PAGE], other.pages, strict=False)):
                    before = (line.pages[number - 1] + 1) * PAGE - 1 if number else page * PAGE
                    older = torch.cat((flat[before : before + 1], pool[page][:-1]))
                    replacements = {"zeroed": pool[page] * 0, "swapped": pool[swapped], "aged": older}
                    listed += [
                        (f"{name} {layer} page {number} {how}", pool, page, new.clone())
                        for how, new in replacements.items()
                    ]
        return listed

    cases = damages()
    assert len(cases) == 2 * 3 * 3 + 2 * 1 * 3 * (LENGTH // PAGE)
    unmoved = []
    for what, tensor, entry, replacement in cases:
        intact = tensor[entry].clone()
        tensor[entry] = replacement
        moved = relative_difference(logits(), expected)
        tensor[entry] = intact
        if moved < MOVED:
            unmoved.append(f"{what}: {moved:.1e}")
    assert not unmoved
    assert relative_difference(logits(), expected) == 0.0
