"""The prefix cache: laws 1 to 5 of the house, kept on the host.

Nothing here touches a tensor. What must happen on the device (page copies) is returned to the scheduler, which puts
it into the step's plan; the device executes plans in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.cache.lineage import Lineage
from tokenspeed.cache.pages import PageAllocator
from tokenspeed.cache.recency import Recency
from tokenspeed.cache.retention import Retention
from tokenspeed.cache.rows import RowAllocator
from tokenspeed.cache.tree import Found, Node, Tail, page_count
from tokenspeed.cache.trie import Ids, Match, Trie, shared_length

SHARED = ""
"""The operator's tenant: what it has, every tenant reads."""


@dataclass(frozen=True)
class Opening:
    """A tail and what the device must do first: copy page `copy[0]` to page `copy[1]`."""

    tail: Tail
    copy: tuple[int, int] | None


class PrefixCache:
    """The tree of checkpoints over one tier of pages and rows."""

    def __init__(self, pages: int, rows: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = PageAllocator(pages)
        self.rows = RowAllocator(rows)
        self.nodes: set[Node] = set()
        self.tails: set[Tail] = set()
        self._tries: dict[str, Trie[Node]] = {}
        self._page_order: Recency[Node] = Recency()
        self._retention = Retention()
        # What this tick's step will compute cannot be read by the same step: it is found from the next tick on.
        self._fresh_nodes: dict[Node, Ids] = {}
        self._fresh_rows: dict[Node, Ids] = {}
        self._numbers = 0

    def turn_over(self) -> None:
        """A tick begins."""
        self.pages.turn_over()
        self.rows.turn_over()
        for node, ids in self._fresh_nodes.items():
            self._index(node, ids)
        self._fresh_nodes.clear()
        self._fresh_rows.clear()

    # ------------------------------------------------------------------ looking up

    def find(self, tenant: str, ids: Ids) -> Found:
        """What of `ids` can be reused, leaving at least the last token to compute. Marks it as used."""
        matches = self._matches(tenant, ids)
        match = max(matches, key=lambda one: one.length)
        checkpoint = self._checkpoint(matches, len(ids) - 1)
        if match.beyond is not None:
            self._use(match.beyond.holding(match.length))
        if checkpoint is not None:
            self._use(checkpoint)
            self._retention.use(checkpoint)
        kept = tuple(node for one in matches for node in one.passed if node.row)
        return Found(match.length, match.beyond, checkpoint.end if checkpoint else 0, checkpoint, kept)

    def pending(self, tenant: str, ids: Ids) -> int:
        """How many of `ids` have a state that this tick's step computes, to be found from the next tick on."""
        ends = [
            node.end
            for node, known in (*self._fresh_nodes.items(), *self._fresh_rows.items())
            if node.tenant == tenant and node.end < len(ids) and shared_length(known, ids) >= node.end
        ]
        return max(ends, default=0)

    def kept(self, tenant: str, ids: Ids) -> int:
        """How many of `ids` have their state kept. Only looks."""
        checkpoint = self._checkpoint(self._matches(tenant, ids), len(ids))
        return checkpoint.end if checkpoint is not None else 0

    def _checkpoint(self, matches: list[Match[Node]], most: int) -> Node | None:
        """The last state of at most so many tokens."""
        passed = (node for match in matches for node in match.passed)
        usable = (node for node in passed if node.row and node.end <= most and node not in self._fresh_rows)
        return max(usable, key=lambda node: node.end, default=None)

    def _matches(self, tenant: str, ids: Ids) -> list[Match[Node]]:
        """In the tenant's own index, and in the operator's."""
        own = self._match(tenant, ids)
        return [own] if tenant == SHARED or SHARED not in self._tries else [own, self._match(SHARED, ids)]

    def _match(self, tenant: str, ids: Ids) -> Match[Node]:
        trie = self._tries.get(tenant)
        return trie.match(ids) if trie is not None else Match(0, None, [])

    # ------------------------------------------------------------------ tails

    def open(self, tenant: str, found: Found, end: int, ring: int, reserve: int) -> Opening | None:
        """A tail after the cached KV, with pages for positions below `end`, `ring` rows to run and `reserve` rows for
        checkpoints: all or nothing.

        Returns None where pages or rows are short; then room has been made as far as possible, for a later tick.
        """
        size, start = self.page_size, found.kv
        parent = found.beyond.holding(start) if found.beyond is not None else None
        number = self._number()
        shared = 0
        if start % size:
            assert found.beyond is not None
            shared = found.beyond.page_table(size)[start // size]
        in_place = bool(shared) and self.pages.claim(shared, number, start % size)
        wanted = page_count(start, end, size) - in_place
        if wanted > self.pages.free or ring + reserve > self.rows.free:
            if in_place:
                self.pages.release(shared, number)
            self.make_room(wanted, ring + reserve, spare=found.checkpoint)
            return None
        tail = Tail(
            number,
            tenant,
            parent,
            start,
            pages=[shared] if in_place else [],
            ring=[self.rows.allocate() for _ in range(ring)],
            reserve=[self.rows.allocate() for _ in range(reserve)],
        )
        if parent is not None:
            parent.tails.add(tail)
        self.tails.add(tail)
        self.grow(tail, end)
        return Opening(tail, (shared, tail.pages[0]) if shared and not in_place else None)

    def grow(self, tail: Tail, end: int) -> bool:
        """Give `tail` pages for positions below `end`. False, and nothing changed, where pages are short."""
        wanted = page_count(tail.start, end, self.page_size) - len(tail.pages)
        if wanted > self.pages.free:
            return False
        tail.pages += [self.pages.allocate(tail.number) for _ in range(wanted)]
        return True

    def page_table(self, tail: Tail) -> list[int]:
        """Page ids of the tail's lineage, by page index."""
        table = tail.parent.page_table(self.page_size) if tail.parent is not None else []
        del table[tail.start // self.page_size :]
        return table + tail.pages

    def checkpoint(self, tail: Tail, ids: Ids, shared: bool) -> tuple[Node, int | None]:
        """A node after `ids`, and a row of the tail's reserve for the state there, which its sequence is about to
        compute; None if that state is kept already. `shared`: see `Node`."""
        row = tail.reserve[-1]
        node, new = self._keep(tail, ids, row)
        if new:
            node.shared = shared
        if node.row != row:
            return node, None
        tail.reserve.pop()
        if new:
            self._fresh_nodes[node] = ids
        else:
            self._fresh_rows[node] = ids
        return node, row

    def reserve(self, tail: Tail) -> bool:
        """One more row for a checkpoint of the tail, if one is free."""
        if self.rows.free:
            tail.reserve.append(self.rows.allocate())
            return True
        return False

    def settle(self, tail: Tail) -> None:
        """The tail's prompt is through: give back what is left of its reserve."""
        for row in tail.reserve:
            self.rows.release(row)
        tail.reserve.clear()

    def close(self, tail: Tail, ids: Ids, row: int, lineage: Lineage | None) -> None:
        """Keep the state after `ids`, which is in ring row `row`, and give back the rest. `lineage`, if given, stands
        on it."""
        node, new = self._keep(tail, ids, row)
        if new:
            self._index(node, ids)
        if node.row == row:
            tail.ring.remove(row)
        if lineage is not None:
            lineage.cached = node.end
            self._stand_on(lineage, node)
        self.abandon(tail)

    def _keep(self, tail: Tail, ids: Ids, row: int) -> tuple[Node, bool]:
        """A checkpoint after `ids` with the state in `row`, unless one is there: then the node that has it. Also
        whether the node is new and has to be indexed.

        Inside the cached KV the row goes to the node that ends there, or to a new bare checkpoint; beyond it the tail
        is sealed up to there and goes on behind it.
        """
        end = len(ids)
        if end > tail.start:
            return self._seal(tail, ids, row), True
        here = [node for node in self._match(tail.tenant, ids).passed if node.end == end]
        node = next((node for node in here if node.row), here[0] if here else None)
        if node is None:
            assert tail.parent is not None
            table = self.page_table(tail)
            pages = [table[end // self.page_size]] if end % self.page_size else []
            return self._add(tail.tenant, tail.parent.holding(end), end, end, pages, row), True
        if not node.row:
            node.row = row
            self._retention.use(node)
        return node, False

    def abandon(self, tail: Tail) -> None:
        """Give back all that the tail holds."""
        for page in tail.pages:
            self.pages.release(page, tail.number)
        for row in tail.ring + tail.reserve:
            self.rows.release(row)
        self.tails.discard(tail)
        if tail.parent is not None:
            tail.parent.tails.discard(tail)
            self._reap(tail.parent)

    def _seal(self, tail: Tail, ids: Ids, row: int) -> Node:
        """A node from the tail's start to the end of `ids`; the tail goes on behind it."""
        size, end = self.page_size, len(ids)
        owned = page_count(tail.start, end, size)
        node = self._add(tail.tenant, tail.parent, tail.start, end, tail.pages[:owned], row)
        # The page of `end`, if begun, stays the tail's to write: the node relies on the rows before `end` alone.
        kept = end // size - tail.start // size
        for page in tail.pages[:kept]:
            self.pages.release(page, tail.number)
        tail.pages = tail.pages[kept:]
        if tail.parent is not None:
            tail.parent.tails.discard(tail)
        tail.parent, tail.start = node, end
        node.tails.add(tail)
        return node

    def _add(self, tenant: str, parent: Node | None, start: int, end: int, pages: list[int], row: int) -> Node:
        node = Node(self._number(), tenant, parent, start, end, pages, row)
        first = start // self.page_size
        for index, page in enumerate(pages, first):
            self.pages.hold(page, node.number, min(self.page_size, end - index * self.page_size))
        if parent is not None:
            parent.children.add(node)
        self.nodes.add(node)
        self._use(node)
        if row:
            self._retention.use(node)
        return node

    def _index(self, node: Node, ids: Ids) -> None:
        self._tries.setdefault(node.tenant, Trie()).insert(ids, node)

    # ------------------------------------------------------------------ need

    def _stand_on(self, lineage: Lineage, node: Node) -> None:
        """`lineage` ends on `node`: what leads there goes last."""
        lineage.node = node
        self._need(node, 1)

    def leave(self, lineage: Lineage) -> None:
        """`lineage` was released."""
        self.keep(lineage, False)
        if lineage.node is not None and not lineage.node.removed:
            self._need(lineage.node, -1)
        lineage.node = None

    def keep(self, lineage: Lineage, wanted: bool) -> None:
        """Whether a session may go on from `lineage`: then the states at its end and its marks go last."""
        for node in lineage.kept:
            node.wanted -= 1
            self._retention.review(node)
        lineage.kept = lineage.stands() if wanted else []
        for node in lineage.kept:
            node.wanted += 1
            self._retention.review(node)

    def _need(self, node: Node, by: int) -> None:
        for at in reversed(node.path()):
            at.needed += by
            self._page_order.regard(at, at.needed > 0)
            self._retention.review(at)

    def _use(self, node: Node) -> None:
        # A node before its ancestors, so that leaves go first.
        for at in reversed(node.path()):
            self._page_order.touch(at, at.needed > 0)

    # ------------------------------------------------------------------ eviction

    def make_room(self, pages: int, rows: int, spare: Node | None = None) -> None:
        """Evict until `pages` and `rows` will be free in the next tick, or nothing more can go. `spare` goes last."""
        while rows > self.rows.free_soon:
            first = self._retention.next(spare)
            if first is None:
                break
            self._drop_row(first)
        while pages > self.pages.free_soon:
            victims = self._victims(pages - self.pages.free_soon, spare)
            if not victims:
                break
            for node in victims:
                if self._trimmable(node):
                    self._trim(node)

    def _victims(self, pages: int, spare: Node | None) -> list[Node]:
        """The first nodes in the order of eviction that free about so many pages; `spare` only if it is the last."""
        victims: list[Node] = []
        for node in self._page_order:
            if node is not spare and self._trimmable(node):
                victims.append(node)
                pages -= max(1, sum(len(self.pages.holders(page)) == 1 for page in node.pages))
                if pages <= 0:
                    return victims
        return victims or ([spare] if spare is not None and self._trimmable(spare) else [])

    def _kept_pages(self, node: Node) -> int:
        """How many of the node's pages what begins on it needs."""
        begins = [child.start for child in node.children] + [tail.start for tail in node.tails]
        return max(0, max(begins, default=0) // self.page_size - node.start // self.page_size)

    def _trimmable(self, node: Node) -> bool:
        """Whether trimming it would free a page, or free an ancestor to be trimmed."""
        if node.removed:
            return False
        if not node.children and not node.tails:
            return True
        return any(len(self.pages.holders(page)) == 1 for page in node.pages[self._kept_pages(node) :])

    def _trim(self, node: Node) -> None:
        """Drop the end of the node's run that nothing on it needs, or all of it."""
        if not node.husk:
            if self._fresh_nodes.pop(node, None) is None:
                self._tries[node.tenant].remove(node)
            node.husk = True
        if node.row:
            self._drop_row(node)
        kept = self._kept_pages(node)
        for page in node.pages[kept:]:
            self.pages.release(page, node.number)
        del node.pages[kept:]
        begins = [child.start for child in node.children] + [tail.start for tail in node.tails]
        node.end = max(begins, default=node.start)
        self._reap(node)

    def _reap(self, node: Node) -> None:
        """Remove a husk that carries nothing, and then perhaps the one that carried it."""
        if not node.husk or node.children or node.tails:
            return
        for page in node.pages:
            self.pages.release(page, node.number)
        node.removed = True
        self.nodes.discard(node)
        self._page_order.forget(node)
        parent = node.parent
        if parent is not None:
            if node.needed:
                self._need(parent, -node.needed)
            parent.children.discard(node)
            self._reap(parent)

    def _drop_row(self, node: Node) -> None:
        self.rows.release(node.row)
        node.row = 0
        self._retention.forget(node)

    def evict_all(self) -> None:
        """Drop everything that no tail grows from."""
        self.make_room(self.pages.total + 1, self.rows.total + 1)

    # ------------------------------------------------------------------ integrity

    def check(self) -> None:
        """Assert laws 2, 4 and 5 over the whole book."""
        self.pages.check()
        self.rows.check()
        rows = [node.row for node in self.nodes if node.row] + [
            row for tail in self.tails for row in tail.ring + tail.reserve
        ]
        assert sorted(rows) == sorted(self.rows.held), "a row is held twice or by nobody"
        holders: dict[int, dict[int, int]] = {}
        size = self.page_size
        for node in self.nodes:
            assert node.husk or len(node.pages) == page_count(node.start, node.end, size)
            assert node.parent is None or node.parent in self.nodes
            for index, page in enumerate(node.pages, node.start // size):
                holders.setdefault(page, {})[node.number] = min(size, max(0, node.end - index * size))
        for tail in self.tails:
            assert tail.parent is None or (tail.parent in self.nodes and tail in tail.parent.tails)
            for page in tail.pages:
                assert self.pages.writer(page) == tail.number
                holders.setdefault(page, {})[tail.number] = 0
        assert len(holders) == self.pages.held
        for page, expected in holders.items():
            assert self.pages.holders(page).keys() == expected.keys(), "a page is held by somebody unknown"
            writer = self.pages.writer(page)
            for holder, reach in expected.items():
                if holder != writer:
                    assert self.pages.holders(page)[holder] >= reach

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers
