"""The sessions of a host, and the turns that they can reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.engine.client import EngineClient
from tokenspeed.sessions.defaults import Defaults
from tokenspeed.sessions.journal.ledger import Ledger
from tokenspeed.sessions.journal.restoring import Restored
from tokenspeed.sessions.session import Session
from tokenspeed.sessions.store import TurnStore
from tokenspeed.sessions.turn import Turn


class SessionBook:
    """Finds sessions and turns, moves heads, and tells the engine where sessions stand and what nobody can reach.
    Notes in the ledger what changes.

    A tenant finds only its own: what belongs to another is answered like what does not exist.
    """

    def __init__(self, engine: EngineClient, ledger: Ledger, new_id: Callable[[str], str]) -> None:
        """`new_id`: makes an id of a prefix."""
        self._engine = engine
        self._ledger = ledger
        self._new_id = new_id
        self._sessions: dict[str, Session] = {}
        self._turns = TurnStore()
        self._latest: dict[str, Session] = {}  # each session's newest turn, running or ended

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def __len__(self) -> int:
        return len(self._sessions)

    def take_over(self, restored: Restored) -> None:
        """Hold what was journalled. The engine is told nothing: it knows none of these turns, as after its restart."""
        for tenant, turn in restored.turns.values():
            self._turns.add(tenant, turn)
        for session in restored.sessions:
            self._sessions[session.id] = session
            self._turns.hold(session.head)
            if session.latest is not None:
                self._latest[session.latest] = session
        # A host that was killed may have left turns that nobody could reach any more.
        for tenant, turn in reversed(list(restored.turns.values())):
            if self._turns.find(tenant, turn.id) is not None:
                self._turns.hold(turn)
                self._ledger.gone(self._turns.let_go(turn))

    def find(self, tenant: str, session_id: str) -> Session:
        """Raises: SessionError `session_not_found`."""
        session = self._sessions.get(session_id)
        if session is None or session.tenant != tenant:
            raise SessionError("session_not_found", f"there is no session {session_id}")
        return session

    def find_turn(self, tenant: str, turn_id: str) -> Turn:
        """A turn that has ended. Raises: SessionError `turn_not_found`; `session_busy`, if it is still running."""
        turn = self._turns.find(tenant, turn_id)
        if turn is not None:
            return turn
        session = self.with_latest(tenant, turn_id)
        if session is not None and session.running is not None:
            raise SessionError("session_busy", f"turn {turn_id} has not ended yet")
        raise SessionError("turn_not_found", f"there is no turn {turn_id}")

    def with_latest(self, tenant: str, turn_id: str) -> Session | None:
        """The session whose newest turn, running or ended, is this one."""
        session = self._latest.get(turn_id)
        return session if session is not None and session.tenant == tenant else None

    def page(self, tenant: str, labels: dict[str, str], limit: int, after: str | None) -> tuple[list[Session], bool]:
        """Sessions with these labels in the order of their opening, and whether there are more.

        Raises:
            SessionError: `session_not_found`, if `after` is no session (any more).
        """
        first = self.find(tenant, after) if after is not None else None
        found: list[Session] = []
        for session in self._sessions.values():
            if first is not None:
                first = None if session is first else first
            elif session.tenant == tenant and labels.items() <= session.defaults.labels.items():
                if len(found) == limit:
                    return found, True
                found.append(session)
        return found, False

    def add(self, tenant: str, defaults: Defaults, head: Turn | None) -> Session:
        session = Session(self._new_id("sess"), tenant, defaults)
        self._sessions[session.id] = session
        self.move(session, head)
        return session

    def remove(self, session: Session) -> None:
        if self._sessions.pop(session.id, None) is not None:
            self.move(session, None)
            self._ledger.closed(session)
            if session.latest is not None:
                self._latest.pop(session.latest, None)

    def change(self, session: Session, defaults: Defaults) -> None:
        """Give the session other defaults."""
        if defaults is not session.defaults:
            session.defaults = defaults
            self._ledger.session(session)

    def begin(self, session: Session, turn_id: str) -> None:
        """A turn has begun in the session."""
        if session.latest is not None:
            self._latest.pop(session.latest, None)
        session.latest = turn_id
        self._latest[turn_id] = session

    def stand_on(self, session: Session, turn: Turn) -> None:
        """Put the head on a new turn."""
        self._turns.add(session.tenant, turn)
        self._ledger.turn(session.tenant, turn)
        self.move(session, turn)

    def move(self, session: Session, head: Turn | None) -> None:
        """Put the head on another turn; what nobody can reach then is released."""
        before, session.head = session.head, head
        self._ledger.session(session)
        if head is not before:
            self._engine.stand(head.id if head else None, before.id if before else None)
        self._turns.hold(head)
        self._let_go(before)

    @contextmanager
    def holding(self, turn: Turn | None) -> Iterator[None]:
        """Within, the turn stays, whatever sessions do."""
        self._turns.hold(turn)
        try:
            yield
        finally:
            self._let_go(turn)

    def _let_go(self, turn: Turn | None) -> None:
        gone = self._turns.let_go(turn)
        if gone:
            self._ledger.gone(gone)
            self._engine.release(gone)
