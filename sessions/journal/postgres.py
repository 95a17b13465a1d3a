"""The journal in a PostgreSQL database, which several servers may share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tokenspeed.sessions.journal.checksum import Tally, checksum
from tokenspeed.sessions.journal.store import Change, JournalError, Moved, Put, Row

if TYPE_CHECKING:
    import psycopg

VERSION = 1
_SCHEMA = "tokenspeed"
_LOCK = 0x74736A6C  # of those who look whether the tables are there
_CONNECT_S = 10
_ROWS_AT_ONCE = 200

_TABLES = (
    f"CREATE SCHEMA IF NOT EXISTS {_SCHEMA}",
    "CREATE TABLE journal (version integer NOT NULL)",
    """CREATE TABLE owners (
        owner text PRIMARY KEY,
        epoch bigint NOT NULL,
        count bigint NOT NULL,
        total bytea NOT NULL
    )""",
    """CREATE TABLE rows (
        number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        owner text NOT NULL REFERENCES owners,
        epoch bigint NOT NULL,
        kind text NOT NULL,
        id text NOT NULL,
        payload bytea NOT NULL,
        checksum bytea NOT NULL,
        UNIQUE (owner, kind, id)
    )""",
    f"INSERT INTO journal VALUES ({VERSION})",
)


class PostgresStore:
    """See `Store`. The tables are in a schema `tokenspeed` of the database."""

    def __init__(self, connection: psycopg.Connection[Any], place: str, owner: str) -> None:
        self._database = connection
        self._place = place
        self._owner = owner
        self._epoch = 0
        self._tally = Tally()

    @classmethod
    def open(cls, address: str, owner: str) -> PostgresStore:
        """Connect, make the tables if there are none, and claim the owner's rows.

        Args:
            address: `postgresql://…`, or libpq's words.

        Raises:
            JournalError: psycopg is not installed, the server cannot be reached or may lose what it has committed, or
                its tables are of another version.
        """
        try:
            import psycopg
        except ImportError as error:
            hint = "pip install 'tokenspeed-sessions[postgresql]'"
            raise JournalError(f"a journal in PostgreSQL needs psycopg ({error}): {hint}") from None
        try:
            connection = psycopg.connect(address, autocommit=True, connect_timeout=_CONNECT_S)
        except psycopg.Error as error:  # whose text has no password
            raise JournalError(f"the PostgreSQL server cannot be reached: {_line(error)}") from None
        info = connection.info
        store = cls(connection, f"postgresql://{info.host}:{info.port}/{info.dbname}", owner)
        try:
            store._check()
            store._claim()
        except psycopg.Error as error:
            connection.close()
            raise JournalError(f"{store.place} cannot be used: {_line(error)}") from error
        except BaseException:
            connection.close()
            raise
        return store

    @property
    def place(self) -> str:
        return self._place

    @property
    def epoch(self) -> int:
        return self._epoch

    def rows(self) -> Iterator[Row]:
        import psycopg

        found = Tally()
        try:
            # Named: the rows come piece by piece.
            with self._database.transaction(), self._database.cursor(name="rows") as cursor:
                cursor.itersize = _ROWS_AT_ONCE
                cursor.execute(
                    "SELECT kind, id, payload, checksum FROM rows WHERE owner = %s ORDER BY number", (self._owner,)
                )
                for kind, row_id, payload, stored in cursor:
                    if checksum(self._owner, kind, row_id, payload) != stored:
                        raise self._damaged(f"the checksum of {kind} {row_id} is wrong")
                    found.add(stored)
                    yield Row(kind, row_id, payload)
        except psycopg.Error as error:
            raise JournalError(f"{self.place} cannot be read: {_line(error)}") from error
        if found.count != self._tally.count:
            raise self._damaged(f"{self._owner!r} has {found.count} rows and should have {self._tally.count}")
        if found.total != self._tally.total:
            raise self._damaged(f"the rows of {self._owner!r} are not those written last")

    def commit(self, changes: Sequence[Change]) -> None:
        import psycopg

        tally = self._tally.copy()
        try:
            with self._database.transaction():
                # First of all, so that who claims the owner waits for this transaction, or this one for the claim.
                held = self._database.execute(
                    "SELECT 1 FROM owners WHERE owner = %s AND epoch = %s FOR UPDATE", (self._owner, self._epoch)
                )
                if held.fetchone() is None:
                    raise Moved(f"another server has claimed the sessions of {self._owner!r} in {self.place}")
                for change in changes:
                    self._carry_out(change, tally)
                self._database.execute(
                    "UPDATE owners SET count = %s, total = %s WHERE owner = %s AND epoch = %s",
                    (tally.count, tally.total, self._owner, self._epoch),
                )
        except psycopg.Error as error:
            raise JournalError(f"{self.place} cannot be written: {_line(error)}") from error
        self._tally = tally

    def close(self) -> None:
        with suppress(Exception):  # a connection that is lost already
            self._database.close()

    # ------------------------------------------------------------------ opening

    def _check(self) -> None:
        self._database.execute(f"SET search_path = {_SCHEMA}")
        self._database.execute("SET synchronous_commit = on")
        for name in ("synchronous_commit", "fsync"):
            if self._value(f"SHOW {name}") != "on":
                raise JournalError(f"{self.place} has {name} off: it may lose what it has committed")
        with self._database.transaction():
            self._database.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
            if self._value(f"SELECT to_regclass('{_SCHEMA}.journal')") is None:
                for statement in _TABLES:
                    self._database.execute(statement)
            version = self._value("SELECT max(version) FROM journal")
        if version != VERSION:
            raise JournalError(f"{self.place} has version {version}; this tokenspeed reads version {VERSION}")

    def _claim(self) -> None:
        epoch, count, total = self._database.execute(
            "INSERT INTO owners VALUES (%s, 1, %s, %s) ON CONFLICT (owner) DO UPDATE SET epoch = owners.epoch + 1 "
            "RETURNING epoch, count, total",
            (self._owner, self._tally.count, self._tally.total),
        ).fetchone() or (0, 0, b"")
        self._epoch, self._tally = epoch, Tally(count, total)

    # ------------------------------------------------------------------ inside

    def _carry_out(self, change: Change, tally: Tally) -> None:
        key = (self._owner, change.kind, change.id)
        before = self._value("SELECT checksum FROM rows WHERE owner = %s AND kind = %s AND id = %s", key)
        if before is not None:
            tally.take(before)
        if isinstance(change, Put):
            mine = checksum(*key, change.payload)
            tally.add(mine)
            self._database.execute(
                "INSERT INTO rows (owner, kind, id, epoch, payload, checksum) VALUES (%s, %s, %s, %s, %s, %s) "
                "ON CONFLICT (owner, kind, id) DO UPDATE "
                "SET epoch = excluded.epoch, payload = excluded.payload, checksum = excluded.checksum",
                (*key, self._epoch, change.payload, mine),
            )
        else:
            self._database.execute("DELETE FROM rows WHERE owner = %s AND kind = %s AND id = %s", key)

    def _value(self, query: str, values: Sequence[Any] = ()) -> Any:
        row = self._database.execute(query, values).fetchone()
        return row[0] if row else None

    def _damaged(self, what: str) -> JournalError:
        return JournalError(f"{self.place} is damaged: {what}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
