"""Least-recently-used order, what no lineage needs first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Recency(Generic[T]):
    """An order of eviction: items that no lineage needs, then needed ones, each from the least recently used."""

    def __init__(self) -> None:
        self._idle: OrderedDict[int, T] = OrderedDict()
        self._needed: OrderedDict[int, T] = OrderedDict()

    def touch(self, item: T, needed: bool) -> None:
        """`item` was used just now, or came to be (un)needed."""
        self.forget(item)
        (self._needed if needed else self._idle)[id(item)] = item

    def regard(self, item: T, needed: bool) -> None:
        """`item`'s need changed; as one just used if it really did."""
        if id(item) in (self._idle if needed else self._needed):
            self.touch(item, needed)

    def forget(self, item: T) -> None:
        self._idle.pop(id(item), None)
        self._needed.pop(id(item), None)

    def __iter__(self) -> Iterator[T]:
        """A snapshot, first to go first."""
        yield from list(self._idle.values())
        yield from list(self._needed.values())
