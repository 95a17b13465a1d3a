"""Sessions out of the journal: with the very ids that were written, nothing of them rendered again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from tokenspeed.sessions.defaults import Defaults
from tokenspeed.sessions.journal.records import (
    DefaultsRecord,
    PreambleRecord,
    SessionRow,
    TokensRecord,
    TurnRow,
    defaults_of,
    preamble_of,
    session_of,
    turn_of,
)
from tokenspeed.sessions.journal.store import JournalError, Row
from tokenspeed.sessions.preamble import Preamble
from tokenspeed.sessions.session import Session
from tokenspeed.sessions.turn import Turn


@dataclass
class Restored:
    """What a journal holds.

    Attributes:
        tokens: what its token ids mean; None for a new journal.
        preambles, defaults: by the ids of their rows.
        turns: with their tenants; each behind those that it stands on.
        sessions: in the order of their opening.
    """

    tokens: TokensRecord | None = None
    preambles: dict[str, Preamble] = field(default_factory=dict)
    defaults: dict[str, Defaults] = field(default_factory=dict)
    turns: dict[str, tuple[str, Turn]] = field(default_factory=dict)
    sessions: list[Session] = field(default_factory=list)

    def turn(self, tenant: str, turn_id: str | None) -> Turn | None:
        """Raises: KeyError, if the tenant has no such turn."""
        if turn_id is None:
            return None
        owner, turn = self.turns[turn_id]
        if owner != tenant:
            raise KeyError(turn_id)
        return turn


def restore(rows: Iterable[Row], place: str) -> Restored:
    """`rows` in the order of their first writing, from the journal at `place`.

    Raises:
        JournalError: a row cannot be read, or refers to one that is not there.
    """
    found = Restored()
    # A row that is written again keeps its place, so a session's may come before the turn that it stands on by now.
    sorted_rows = sorted(rows, key=lambda row: _ORDER.get(row.kind, len(_ORDER)))
    for row in sorted_rows:
        with _reading(place, row):
            _take(found, row)
    return found


_ORDER = {"tokens": 0, "preamble": 1, "defaults": 2, "turn": 3, "session": 4}


def _take(found: Restored, row: Row) -> None:
    if row.kind == "tokens":
        found.tokens = msgspec.msgpack.decode(row.payload, type=TokensRecord)
    elif row.kind == "preamble":
        found.preambles[row.id] = preamble_of(msgspec.msgpack.decode(row.payload, type=PreambleRecord))
    elif row.kind == "defaults":
        defaults = msgspec.msgpack.decode(row.payload, type=DefaultsRecord)
        found.defaults[row.id] = defaults_of(defaults, found.preambles[defaults.preamble])
    elif row.kind == "turn":
        turn = msgspec.msgpack.decode(row.payload, type=TurnRow)
        parent, base = found.turn(turn.tenant, turn.parent), found.turn(turn.tenant, turn.prompt.base)
        preamble, shared = found.preambles[turn.prompt.preamble], found.defaults[turn.defaults]
        found.turns[row.id] = (turn.tenant, turn_of(row.id, turn, parent, base, preamble, shared))
    elif row.kind == "session":
        session = msgspec.msgpack.decode(row.payload, type=SessionRow)
        head = found.turn(session.tenant, session.head)
        found.sessions.append(session_of(row.id, session, head, found.defaults[session.defaults]))
    else:
        raise ValueError("there is no such kind of row")


@contextmanager
def _reading(place: str, row: Row) -> Iterator[None]:
    """Raises: JournalError for what goes wrong within, naming the row."""
    try:
        yield
    except KeyError as error:
        message = f"it refers to {error.args[0]}, which is not there"
        raise JournalError(f"{place}: {row.kind} {row.id} cannot be read: {message}") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise JournalError(f"{place}: {row.kind} {row.id} cannot be read: {error}") from error
