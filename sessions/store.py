"""The turns that sessions can reach."""

from __future__ import annotations

from tokenspeed.sessions.turn import Turn


class TurnStore:
    """Counts who stands on each turn: heads, turns that follow it, and turns being taken.

    A turn that nobody stands on is forgotten, and then perhaps the one before it.
    """

    def __init__(self) -> None:
        self._turns: dict[str, tuple[str, Turn]] = {}
        self._holders: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def find(self, tenant: str, turn_id: str) -> Turn | None:
        owner, turn = self._turns.get(turn_id, ("", None))
        return turn if owner == tenant else None

    def add(self, tenant: str, turn: Turn) -> None:
        """Take in a new turn, which stands on its parent. Somebody must hold it next."""
        self._turns[turn.id] = (tenant, turn)
        self._holders[turn.id] = 0
        self.hold(turn.parent)

    def hold(self, turn: Turn | None) -> None:
        if turn is not None:
            self._holders[turn.id] += 1

    def let_go(self, turn: Turn | None) -> list[str]:
        """Undo a `hold`. Returns the turns that nobody can reach any more."""
        gone: list[str] = []
        while turn is not None:
            self._holders[turn.id] -= 1
            assert self._holders[turn.id] >= 0, f"{turn.id} was let go more often than held"
            if self._holders[turn.id]:
                break
            del self._turns[turn.id], self._holders[turn.id]
            gone.append(turn.id)
            turn = turn.parent
        return gone
