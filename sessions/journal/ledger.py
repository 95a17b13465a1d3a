"""What a host changes, on its way into the journal."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.sessions.defaults import Defaults
from tokenspeed.sessions.journal.journal import Journal
from tokenspeed.sessions.journal.records import (
    Kind,
    TokensRecord,
    defaults_record,
    encoded,
    preamble_record,
    put_tokens,
    session_row,
    turn_row,
)
from tokenspeed.sessions.journal.restoring import Restored, restore
from tokenspeed.sessions.journal.store import Change, Delete, JournalError, Moved, Put
from tokenspeed.sessions.preamble import Preamble
from tokenspeed.sessions.session import Session
from tokenspeed.sessions.turn import Turn


class Ledger:
    """Notes what changes in memory; `durable` hands it to the journal, all at once, and waits for the disk.

    What is noted between two waits of the event loop is one batch, so the journal never holds half a command. Without
    a journal nothing is noted, and everything counts as durable.
    """

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self._changes: list[Change] = []
        self._changed: dict[str, Session] = {}
        self._defaults: dict[str, Defaults] = {}  # of each session, as its row has them
        self._turns: dict[str, Turn] = {}
        self._shared = _SharedRows(self._changes)
        self._last: Future[None] | None = None

    def take_over(self, tokens: TokensRecord) -> Restored:
        """What is in the journal already, if its token ids mean what `tokens` says; a new one is told so.

        Raises:
            JournalError: it is damaged, or its sessions are of a model with another tokenizer or chat template.
        """
        if self._journal is None:
            return Restored()
        place = self._journal.place
        found = restore(self._journal.rows(), place)
        if found.tokens is None:
            self._journal.append([put_tokens(tokens)]).result()
        elif found.tokens.fingerprint != tokens.fingerprint:
            raise JournalError(
                f"{place} has sessions of {found.tokens.model}, whose tokenizer or chat template is another than that "
                f"of {tokens.model}"
            )
        for key, preamble in found.preambles.items():
            self._shared.know(preamble, key)
        for key, defaults in found.defaults.items():
            self._shared.know(defaults, key)
        for _, turn in found.turns.values():
            self._hold_turn(turn)
        for session in found.sessions:
            self._shared.hold(session.defaults)
            self._defaults[session.id] = session.defaults
        self._shared.drop_unused()
        return found

    def turn(self, tenant: str, turn: Turn) -> None:
        """A turn is new."""
        if self._journal is not None:
            preamble, defaults = self._hold_turn(turn)
            self._put("turn", turn.id, turn_row(tenant, turn, preamble, defaults))

    def gone(self, turns: Sequence[str]) -> None:
        """Nobody can reach these turns any more."""
        if self._journal is not None:
            for turn_id in turns:
                turn = self._turns.pop(turn_id)
                self._changes.append(Delete("turn", turn_id))
                self._shared.let_go(turn.defaults)
                self._shared.let_go(turn.prompt.preamble)

    def session(self, session: Session) -> None:
        """A session is new, or something of it has changed."""
        if self._journal is not None:
            self._changed[session.id] = session

    def closed(self, session: Session) -> None:
        if self._journal is not None:
            self._changed.pop(session.id, None)
            self._changes.append(Delete("session", session.id))
            defaults = self._defaults.pop(session.id, None)
            if defaults is not None:
                self._shared.let_go(defaults)

    def check(self) -> None:
        """Raises: SessionError `session_moved` or `journal_failed`, if nothing can be written any more."""
        if self._journal is not None and self._journal.failure is not None:
            raise _refusal(self._journal.failure)

    async def durable(self) -> None:
        """Until everything noted so far would survive a loss of power. What is noted is handed over at the call.

        Raises:
            SessionError: `session_moved`, `journal_failed`.
        """
        if self._journal is None:
            return
        for session in self._changed.values():
            self._write(session)
        self._changed.clear()
        if self._changes:
            self._last = self._journal.append(list(self._changes))
            self._changes.clear()
        if self._last is not None:
            try:
                if self._last.done():
                    self._last.result()
                else:
                    # Others wait for it too: a waiter that is cancelled takes nothing back.
                    await asyncio.shield(asyncio.wrap_future(self._last))
            except JournalError as error:
                raise _refusal(error) from None

    def _write(self, session: Session) -> None:
        defaults = session.defaults
        key = self._shared.hold(defaults)
        before = self._defaults.get(session.id)
        self._defaults[session.id] = defaults
        if before is not None:
            self._shared.let_go(before)
        self._put("session", session.id, session_row(session, key))

    def _hold_turn(self, turn: Turn) -> tuple[str, str]:
        self._turns[turn.id] = turn
        return self._shared.hold(turn.prompt.preamble), self._shared.hold(turn.defaults)

    def _put(self, kind: Kind, row_id: str, record: msgspec.Struct) -> None:
        self._changes.append(Put(kind, row_id, encoded(record)))


@dataclass
class _Held:
    """An object in memory. `count`: who holds it; `needs`: what its row refers to."""

    value: Preamble | Defaults
    key: str
    count: int = 0
    needs: Preamble | None = None


class _SharedRows:
    """Preambles and defaults, of which sessions and turns have many alike: one row for all that have the same content.

    A row's id is the hash of its content. It is written when it is first held, and goes with its last holder.
    """

    def __init__(self, changes: list[Change]) -> None:
        self._changes = changes
        self._held: dict[int, _Held] = {}  # by the object's identity
        self._counts: dict[str, int] = {}  # holders of each row

    def know(self, value: Preamble | Defaults, key: str) -> None:
        """The row is there already."""
        self._counts[key] = 0
        self._held[id(value)] = _Held(value, key)

    def drop_unused(self) -> None:
        """Forget what `know` was told of and nobody holds."""
        for held in [held for held in self._held.values() if held.count == 0]:
            del self._held[id(held.value)]
            if self._counts.get(held.key) == 0:
                self._delete(held)

    def hold(self, value: Preamble | Defaults) -> str:
        """Returns the row's id."""
        held = self._held.get(id(value))
        if held is None:
            held = self._held[id(value)] = self._made(value)
        elif held.count == 0 and isinstance(value, Defaults):
            held.needs = value.preamble
            self.hold(value.preamble)
        held.count += 1
        self._counts[held.key] += 1
        return held.key

    def let_go(self, value: Preamble | Defaults) -> None:
        held = self._held[id(value)]
        held.count -= 1
        self._counts[held.key] -= 1
        if self._counts[held.key] == 0:
            self._delete(held)
        if held.count == 0:
            del self._held[id(value)]
            if held.needs is not None:
                self.let_go(held.needs)

    def _made(self, value: Preamble | Defaults) -> _Held:
        if isinstance(value, Preamble):
            payload, needs = encoded(preamble_record(value)), None
        else:
            payload, needs = encoded(defaults_record(value, self.hold(value.preamble))), value.preamble
        key = hashlib.blake2b(payload, digest_size=16).hexdigest()
        if key not in self._counts:
            self._counts[key] = 0
            self._changes.append(Put(_kind(value), key, payload))
        return _Held(value, key, needs=needs)

    def _delete(self, held: _Held) -> None:
        del self._counts[held.key]
        self._changes.append(Delete(_kind(held.value), held.key))


def _kind(value: Preamble | Defaults) -> Kind:
    return "preamble" if isinstance(value, Preamble) else "defaults"


def _refusal(error: JournalError) -> SessionError:
    return SessionError("session_moved" if isinstance(error, Moved) else "journal_failed", str(error))
