"""The exact token ids of turns: the tree that outlives the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenspeed.cache.tree import Node
    from tokenspeed.cache.trie import Ids


@dataclass(eq=False)
class Lineage:
    """A turn's prompt and kept output: the first `keep` ids of `parent`, then `own`.

    `node` is the end of what was cached of it, as long as that is cached; `cached` the length that was; `marks` the
    nodes at its prompt's marks. `heads`: sessions that stand on it. `children`: lineages that build on it; of these,
    `successors` are published and unreleased. `kept`: the nodes whose states
    a session may go on from here, while one may.
    """

    name: str
    tenant: str
    parent: Lineage | None
    keep: int
    own: Ids
    node: Node | None = None
    cached: int = 0
    released: bool = False
    children: int = 0
    successors: int = 0
    heads: int = 0
    kept: list[Node] = field(default_factory=list)
    marks: list[Node] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.keep + len(self.own)

    def stands(self) -> list[Node]:
        """The nodes whose states it goes on from, once each."""
        return list(dict.fromkeys([*self.marks, *([self.node] if self.node is not None else [])]))

    @property
    def leads_on(self) -> bool:
        """Whether a session may go on from here: one stands here, or nothing has followed yet."""
        return not self.released and (self.heads > 0 or self.successors == 0)

    def ids(self) -> Ids:
        """All ids, oldest first."""
        parts, lineage, length = [], self, self.length
        while True:
            parts.append(lineage.own[: max(0, length - lineage.keep)])
            length = min(length, lineage.keep)
            if lineage.parent is None:
                return np.concatenate(parts[::-1])
            lineage = lineage.parent


class LineageBook:
    """Lineages by name. The ids of a released one live on as long as another builds on them."""

    def __init__(self) -> None:
        self._lineages: dict[str, Lineage] = {}

    def draft(self, name: str, tenant: str, parent: Lineage | None, keep: int, own: Ids) -> Lineage:
        """A lineage that is not to be found yet (its turn runs) but holds on to its parent."""
        if parent is not None:
            parent.children += 1
        return Lineage(name, tenant, parent, keep, own)

    def publish(self, lineage: Lineage) -> None:
        """A finished turn's lineage can be found."""
        self._lineages[lineage.name] = lineage
        if lineage.parent is not None:
            lineage.parent.successors += 1

    def find(self, name: str, tenant: str) -> Lineage | None:
        """The lineage of that name; another tenant's is as good as missing."""
        lineage = self._lineages.get(name)
        return lineage if lineage is not None and lineage.tenant == tenant else None

    def release(self, lineage: Lineage) -> None:
        """Forget a published lineage, or a draft."""
        if self._lineages.pop(lineage.name, None) is not None and lineage.parent is not None:
            lineage.parent.successors -= 1
        lineage.released = True
        at: Lineage | None = lineage
        while at is not None and at.released and at.children == 0:
            above, at.parent = at.parent, None
            if above is not None:
                above.children -= 1
            at = above

    def __contains__(self, name: str) -> bool:
        return name in self._lineages

    def named(self, name: str) -> Lineage | None:
        return self._lineages.get(name)
