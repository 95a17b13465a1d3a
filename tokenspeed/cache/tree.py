"""Nodes and tails: the tree of checkpoints, without any storage policy.

    positions   0 ........ start ............ end
                |  ancestors  |     node       |
    pages       [ 0 … start // page_size - 1 ][ start // page_size … ]
                   the ancestors' pages          the node's own

A node may begin in the middle of its parent (a branch) and in the middle of a page. Its own pages always cover the
page of `start`, shared with the parent or copied from it; so of its ancestors it needs whole pages only.
"""

from __future__ import annotations

from dataclasses import dataclass, field


def page_count(start: int, end: int, page_size: int) -> int:
    """Pages that a run of positions from `start` to `end` owns, the page of `start` included if it is begun."""
    return -(-end // page_size) - start // page_size


@dataclass(eq=False)
class Node:
    """An immutable run of tokens whose end has, or had, a checkpoint.

    Attributes:
        number: names the node as a holder of pages.
        start, end: positions; `end == start` is a bare checkpoint inside its parent.
        pages: page ids for the page indices from `start // page_size` on.
        row: the state at `end`; 0 if it was dropped.
        children, tails: what begins on this node; it keeps its pages up to where they begin.
        needed: unreleased lineages that end at or below it.
        wanted: lineages that a session stands on and would go on from this very state.
        shared: the state stands where prompts part, or inside a long one, rather than at a turn's end or mark.
        husk: its end was trimmed; it only carries its children.
    """

    number: int
    tenant: str
    parent: Node | None
    start: int
    end: int
    pages: list[int]
    row: int = 0
    children: set[Node] = field(default_factory=set)
    tails: set[Tail] = field(default_factory=set)
    needed: int = 0
    wanted: int = 0
    shared: bool = False
    husk: bool = False
    removed: bool = False

    def path(self) -> list[Node]:
        """From the root's child to this node."""
        nodes: list[Node] = []
        at: Node | None = self
        while at is not None:
            nodes.append(at)
            at = at.parent
        return nodes[::-1]

    def page_table(self, page_size: int) -> list[int]:
        """Page ids of the path, by page index."""
        table: list[int] = []
        for node in self.path():
            del table[node.start // page_size :]
            table.extend(node.pages)
        return table

    def holding(self, position: int) -> Node:
        """The node of the path whose own run contains the `position`-th token, for 0 < position <= end."""
        at = self
        while at.start >= position and at.parent is not None:
            at = at.parent
        return at


@dataclass(eq=False)
class Tail:
    """The open, growing end of a lineage: the only writer of its pages.

    Attributes:
        parent: the node it grows from, None at a root.
        start: the first position it writes.
        pages: page ids for the page indices from `start // page_size` on.
        ring: rows that the sequence's states go through, in turn.
        reserve: rows for checkpoints inside the prompt.
    """

    number: int
    tenant: str
    parent: Node | None
    start: int
    pages: list[int]
    ring: list[int]
    reserve: list[int]


@dataclass(frozen=True)
class Found:
    """What of a prompt is cached: KV for `kv` tokens, on the path of `beyond`; a state for `state` tokens, in the row
    of `checkpoint` (None: start from nothing). `passed`: all nodes on the way whose state is kept, shortest first."""

    kv: int
    beyond: Node | None
    state: int
    checkpoint: Node | None
    passed: tuple[Node, ...] = ()


NOTHING = Found(kv=0, beyond=None, state=0, checkpoint=None)
