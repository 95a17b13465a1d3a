"""The index against a list of everything it holds."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from tokenspeed.cache.trie import Branch, Trie

Ids = tuple[int, ...]


@dataclass(eq=False)
class Held:
    ids: Ids

    @property
    def end(self) -> int:
        return len(self.ids)


def array(ids: Ids) -> np.ndarray:
    return np.asarray(ids, np.int32)


def shared(a: Ids, b: Ids) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def assert_compact(branch: Branch[Held], root: bool = True) -> None:
    assert root or branch.entries or len(branch.below) > 1
    for first, below in branch.below.items():
        assert int(below.label[0]) == first
        assert below.end == branch.end + len(below.label)
        assert below.above is branch
        assert_compact(below, root=False)


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)


@settings(deadline=None)
@given(st.lists(st.tuples(IDS, st.booleans()), max_size=25), st.lists(IDS, min_size=1, max_size=8))
def test_match_is_the_longest_known_prefix(steps: list[tuple[Ids, bool]], prompts: list[Ids]) -> None:
    trie: Trie[Held] = Trie()
    held: list[Held] = []
    for ids, remove in steps:
        if remove and held:
            trie.remove(held.pop(len(ids) % len(held)))
        else:
            held.append(Held(ids))
            trie.insert(array(ids), held[-1])
        assert_compact(trie._root)
        for prompt in prompts:
            match = trie.match(array(prompt))
            assert match.length == max((shared(one.ids, prompt) for one in held), default=0)
            expected = [one for one in held if prompt[: one.end] == one.ids]
            assert sorted(map(id, match.passed)) == sorted(map(id, expected))
            assert [one.end for one in match.passed] == sorted(one.end for one in expected)
            if match.length:
                assert match.beyond is not None
                assert match.beyond.ids[: match.length] == prompt[: match.length]
            else:
                assert match.beyond is None
