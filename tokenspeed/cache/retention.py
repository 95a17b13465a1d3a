"""Which state row goes first: by rank, then by the tokens it saves and how long ago it was of use."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from tokenspeed.cache.tree import Node


@dataclass(frozen=True)
class Worth:
    """`rank` 2: a session goes on from here; 1: shared by prompts of living sessions; 0: superseded, or needed by none.
    `since`: the clock when it was last of use. `saved`: tokens to compute again if it goes."""

    rank: int
    since: int
    saved: int

    @property
    def key(self) -> tuple[int, int]:
        return self.rank, self.since + self.saved


class Retention:
    """The rows' order of eviction: the greedy-dual rule (Young, 1994) within each rank.

    Rows are of one size, so tokens saved per byte are tokens saved. The clock is what the last evicted row was worth: a
    row that saves n tokens outlives others until they have been worth n more.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._worths: dict[Node, Worth] = {}
        self._heap: list[tuple[tuple[int, int], int, Node]] = []

    def use(self, node: Node) -> None:
        """The node's row was stored, or read, just now."""
        self._set(node, Worth(_rank(node), self._clock, _saved(node)))

    def review(self, node: Node) -> None:
        """Who needs the node has changed."""
        worth = self._worths.get(node)
        if worth is not None and worth.rank != _rank(node):
            self._set(node, Worth(_rank(node), worth.since, worth.saved))

    def forget(self, node: Node) -> None:
        self._worths.pop(node, None)

    def next(self, spare: Node | None) -> Node | None:
        """The node whose row goes first; `spare` only if there is no other."""
        spared: tuple[tuple[int, int], int, Node] | None = None
        while self._heap:
            key, _, node = self._heap[0]
            worth = self._worths.get(node)
            if worth is None or worth.key != key:
                heapq.heappop(self._heap)  # out of date
            elif _saved(node) > worth.saved:
                # A state before it has gone: it saves more than when it was stored.
                heapq.heappop(self._heap)
                self._set(node, Worth(worth.rank, worth.since, _saved(node)))
            elif node is spare:
                spared = heapq.heappop(self._heap)
            else:
                break
        first = self._heap[0][2] if self._heap else None
        if spared is not None:
            heapq.heappush(self._heap, spared)
            first = first or spared[2]
        if first is not None:
            self._clock = max(self._clock, self._worths[first].key[1])
        return first

    def _set(self, node: Node, worth: Worth) -> None:
        self._worths[node] = worth
        heapq.heappush(self._heap, (worth.key, node.number, node))
        if len(self._heap) > 4 * len(self._worths) + 64:
            self._heap = [(worth.key, node.number, node) for node, worth in self._worths.items()]
            heapq.heapify(self._heap)


def _rank(node: Node) -> int:
    if node.wanted:
        return 2
    return 1 if node.shared and node.needed else 0


def _saved(node: Node) -> int:
    """Tokens between the nearest state before the node's and its own."""
    end, at = node.start, node.parent
    while at is not None:
        if at.row and at.end <= end:
            return node.end - at.end
        end, at = at.start, at.parent
    return node.end
