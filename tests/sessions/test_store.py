from __future__ import annotations

from array import array

import pytest

from tokenspeed.client.protocol.commands import Sampling
from tokenspeed.client.protocol.events import Timings, Usage
from tokenspeed.sessions.defaults import Defaults
from tokenspeed.sessions.formats.arguments import ParameterTypes
from tokenspeed.sessions.preamble import Preamble
from tokenspeed.sessions.store import TurnStore
from tokenspeed.sessions.turn import Prompt, Turn, lineage, path

BARE = Defaults(None, [], Sampling(), "keep", {}, Preamble(None, [], array("i")), ParameterTypes([]))


def turn(name: str, parent: Turn | None, fresh: list[int], output: list[int], keep: int | None = None) -> Turn:
    keep = keep if keep is not None else parent.length if parent else 0
    ids = array("i", fresh)
    return Turn(
        id=name,
        parent=parent,
        prompt=Prompt(parent, keep, ids, ids, BARE.preamble, 0, ()),
        input=[],
        output=[],
        output_ids=array("i", output),
        hidden=((0, 1),),
        cut=None,
        status="completed",
        reason="stop",
        usage=Usage(),
        timings=Timings(),
        defaults=BARE,
    )


def test_ids_of_a_lineage() -> None:
    first = turn("a", None, [1, 2], [3, 4])
    second = turn("b", first, [5], [6])
    branch = turn("c", second, [7], [8], keep=3)
    assert list(second.ids()) == [1, 2, 3, 4, 5, 6]
    assert list(branch.ids()) == [1, 2, 3, 7, 8]
    assert list(branch.prompt.ids()) == [1, 2, 3, 7]
    for length in range(7):
        assert list(lineage(second, length)) == [1, 2, 3, 4, 5, 6][:length]
    assert (second.depth, path(branch)) == (2, [first, second, branch])
    assert list(first.visible_ids()) == [4]


def test_what_nobody_stands_on_goes() -> None:
    store = TurnStore()
    first = turn("a", None, [1], [2])
    second, other = turn("b", first, [3], [4]), turn("c", first, [5], [6])
    for added in (first, second, other):
        store.add("t", added)
        store.hold(added)
    assert store.let_go(first) == []  # two turns follow it
    assert store.let_go(second) == ["b"]
    assert store.find("t", "b") is None
    assert store.find("t", "a") is first
    assert store.find("u", "a") is None
    assert store.let_go(other) == ["c", "a"]
    assert len(store) == 0
    with pytest.raises(KeyError):
        store.let_go(other)
