"""Who holds which page, and who may write it."""

from __future__ import annotations


class PageAllocator:
    """Host-side book of the page pool.

    A page is held by nodes and tails, each with a **reach**: the number of the page's rows, from its first, that the
    holder relies on. At most one tail is its **writer** (law 2). A page that loses its last holder is handed out again
    only after `turn_over`, that is from the next tick on, so that no step reads and rewrites one page.
    """

    def __init__(self, total: int) -> None:
        self.total = total - 1  # page 0 is the sink
        self._free = list(range(total - 1, 0, -1))
        self._freed: list[int] = []
        self._holders: dict[int, dict[int, int]] = {}
        self._writers: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free)

    @property
    def free_soon(self) -> int:
        """Pages that can be handed out in the next tick."""
        return len(self._free) + len(self._freed)

    @property
    def held(self) -> int:
        return len(self._holders)

    def turn_over(self) -> None:
        """A tick begins: pages freed in the last one may be handed out."""
        self._free.extend(self._freed)
        self._freed.clear()

    def allocate(self, writer: int) -> int:
        """A free page, held and written by `writer`. The caller has seen to it that there is one."""
        page = self._free.pop()
        self._holders[page] = {writer: 0}
        self._writers[page] = writer
        return page

    def hold(self, page: int, holder: int, reach: int) -> None:
        self._holders[page][holder] = reach

    def release(self, page: int, holder: int) -> None:
        holders = self._holders[page]
        del holders[holder]
        if self._writers.get(page) == holder:
            del self._writers[page]
        if not holders:
            del self._holders[page]
            self._freed.append(page)

    def claim(self, page: int, tail: int, offset: int) -> bool:
        """Make `tail` the writer of a shared page from row `offset` on, if law 2 allows it in place."""
        if page in self._writers or max(self._holders[page].values()) > offset:
            return False
        self._writers[page] = tail
        self._holders[page][tail] = offset
        return True

    def writer(self, page: int) -> int | None:
        return self._writers.get(page)

    def holders(self, page: int) -> dict[int, int]:
        return self._holders.get(page, {})

    def check(self) -> None:
        """Assert that free + held = total and that every writer is a holder."""
        assert self.free_soon + self.held == self.total, (self.free_soon, self.held, self.total)
        assert len(set(self._free) | set(self._freed) | set(self._holders)) == self.total
        assert 0 not in self._holders
        for page, writer in self._writers.items():
            assert writer in self._holders[page]
