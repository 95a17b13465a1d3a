"""The index over token ids: what of a prompt is cached, at the cost of the prompt's length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


class Entry(Protocol):
    """What the trie holds: something that knows the position it ends at."""

    end: int


E = TypeVar("E", bound=Entry)


@dataclass(eq=False)
class Branch(Generic[E]):
    """A run of ids (`label`) that ends at position `end`, where `entries` end too. Every branch has an entry at or
    below it, and one without entries of its own has at least two branches below (the root aside)."""

    label: Ids
    end: int
    above: Branch[E] | None
    below: dict[int, Branch[E]] = field(default_factory=dict)
    entries: list[E] = field(default_factory=list)


@dataclass(frozen=True)
class Match(Generic[E]):
    """`length` ids of the prompt are known. `beyond` is an entry whose ids begin with them (None if length is 0);
    `passed` are the entries that end at or before `length`, shortest first."""

    length: int
    beyond: E | None
    passed: list[E]


class Trie(Generic[E]):
    """A radix trie of one tenant. Splitting a branch copies no ids."""

    def __init__(self) -> None:
        self._root: Branch[E] = Branch(np.empty(0, np.int32), 0, None)
        self._places: dict[int, Branch[E]] = {}

    def match(self, ids: Ids) -> Match[E]:
        """The longest known prefix of `ids`."""
        branch = self._root
        passed: list[E] = []
        while branch.end < len(ids):
            next_branch = branch.below.get(int(ids[branch.end]))
            if next_branch is None:
                break
            shared = shared_length(next_branch.label, ids[branch.end :])
            if shared < len(next_branch.label):
                return Match(branch.end + shared, self._any_entry(next_branch), passed)
            branch = next_branch
            passed.extend(branch.entries)
        return Match(branch.end, self._any_entry(branch) if branch.end else None, passed)

    def insert(self, ids: Ids, entry: E) -> None:
        """Add `entry`, whose ids are `ids` [entry.end]."""
        branch = self._root
        while branch.end < len(ids):
            first = int(ids[branch.end])
            next_branch = branch.below.get(first)
            if next_branch is None:
                next_branch = branch.below[first] = Branch(ids[branch.end :].copy(), len(ids), branch)
            else:
                shared = shared_length(next_branch.label, ids[branch.end :])
                if shared < len(next_branch.label):
                    next_branch = self._split(next_branch, shared)
            branch = next_branch
        branch.entries.append(entry)
        self._places[id(entry)] = branch

    def remove(self, entry: E) -> None:
        branch = self._places.pop(id(entry))
        branch.entries.remove(entry)
        while branch.above is not None and not branch.entries:
            if len(branch.below) > 1:
                return
            above, first = branch.above, int(branch.label[0])
            if branch.below:
                (child,) = branch.below.values()
                child.label = np.concatenate([branch.label, child.label])
                child.above = above
                above.below[first] = child
                return
            del above.below[first]
            branch = above

    def _split(self, branch: Branch[E], shared: int) -> Branch[E]:
        above = branch.above
        assert above is not None
        upper = Branch(branch.label[:shared], above.end + shared, above)
        above.below[int(branch.label[0])] = upper
        branch.label = branch.label[shared:]
        branch.above = upper
        upper.below[int(branch.label[0])] = branch
        return upper

    def _any_entry(self, branch: Branch[E]) -> E:
        while not branch.entries:
            branch = next(iter(branch.below.values()))
        return branch.entries[0]


def shared_length(a: Ids, b: Ids) -> int:
    """How many leading ids two runs share."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n
