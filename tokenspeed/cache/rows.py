"""Which state rows are free."""

from __future__ import annotations


class RowAllocator:
    """Host-side book of the state rows. Like pages, a row freed in a tick is handed out from the next one on."""

    def __init__(self, total: int) -> None:
        self.total = total - 1  # row 0 is the sink
        self._free = list(range(total - 1, 0, -1))
        self._freed: list[int] = []
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def free_soon(self) -> int:
        return len(self._free) + len(self._freed)

    def turn_over(self) -> None:
        self._free.extend(self._freed)
        self._freed.clear()

    def allocate(self) -> int:
        row = self._free.pop()
        self._held.add(row)
        return row

    def release(self, row: int) -> None:
        self._held.remove(row)
        self._freed.append(row)

    @property
    def held(self) -> frozenset[int]:
        return frozenset(self._held)

    def check(self) -> None:
        assert self.free_soon + len(self._held) == self.total
        assert len(set(self._free) | set(self._freed) | self._held) == self.total
        assert 0 not in self._held
