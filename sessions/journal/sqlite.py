"""The journal in a file: SQLite with a write-ahead log."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tokenspeed.sessions.journal.checksum import Tally, checksum
from tokenspeed.sessions.journal.store import Change, JournalError, Moved, Put, Row

APPLICATION_ID = 0x74736A6C
"""In the file's header, so that a file of another program is told apart from a damaged one."""

_DAMAGE = (sqlite3.Error, UnicodeDecodeError)
"""What reading a damaged file raises."""

_BUSY_S = 30.0
"""How long to wait for another program that has the file locked."""

_FULL = 2  # what SQLite answers for synchronous=FULL

_STEPS = (
    (
        "CREATE TABLE journal (version INTEGER NOT NULL)",
        "CREATE TABLE owners (owner TEXT NOT NULL PRIMARY KEY, epoch INTEGER NOT NULL)",
        """CREATE TABLE rows (
            number INTEGER PRIMARY KEY,
            owner TEXT NOT NULL,
            epoch INTEGER NOT NULL,
            kind TEXT NOT NULL,
            id TEXT NOT NULL,
            payload BLOB NOT NULL,
            checksum BLOB NOT NULL,
            UNIQUE (owner, kind, id)
        )""",
        "INSERT INTO journal VALUES (1)",
    ),
    (
        "ALTER TABLE owners ADD COLUMN count INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE owners ADD COLUMN total BLOB NOT NULL DEFAULT x'00000000000000000000000000000000'",
    ),
)
"""What makes each version of the schema out of the one before; the first makes it out of nothing."""

VERSION = len(_STEPS)


class SqliteStore:
    """See `Store`.

    A file is made whole under another name and then moved to its own, so one that is empty or has no tables is damaged.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path, owner: str) -> None:
        self._database = connection
        self._path = path
        self._owner = owner
        self._epoch = 0
        self._tally = Tally()

    @classmethod
    def open(cls, path: Path, owner: str) -> SqliteStore:
        """Open the file, made and upgraded as needed, and claim the owner's rows.

        Raises:
            JournalError: the file cannot be made or opened, is damaged, of another program or of a newer version.
        """
        try:
            if not path.exists():
                _create(path)
            elif path.stat().st_size == 0:
                raise JournalError(f"{path} is damaged: it is empty")
            connection = _connect(path)
        except OSError as error:
            raise JournalError(f"{path} cannot be opened: {error.strerror or error}") from error
        except sqlite3.Error as error:
            raise JournalError(f"{path} cannot be opened: {error}") from error
        store = cls(connection, path, owner)
        try:
            store._check()
            path.chmod(0o600)
            store._claim()
        except _DAMAGE as error:
            connection.close()
            raise store._damaged(str(error)) from error
        except BaseException:
            connection.close()
            raise
        return store

    @property
    def place(self) -> str:
        return str(self._path)

    @property
    def epoch(self) -> int:
        return self._epoch

    def rows(self) -> Iterator[Row]:
        found = Tally()
        try:
            for kind, row_id, payload, stored in self._database.execute(
                "SELECT kind, id, payload, checksum FROM rows WHERE owner = ? ORDER BY number", (self._owner,)
            ):
                self._check_row(self._owner, kind, row_id, payload, stored)
                found.add(stored)
                yield Row(kind, row_id, payload)
        except _DAMAGE as error:
            raise self._damaged(str(error)) from error
        self._check_tally(found, self._tally)

    def commit(self, changes: Sequence[Change]) -> None:
        tally = self._tally.copy()
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                for change in changes:
                    self._carry_out(change, tally)
                claimed = self._database.execute(
                    "UPDATE owners SET count = ?, total = ? WHERE owner = ? AND epoch = ?",
                    (tally.count, tally.total, self._owner, self._epoch),
                )
                if claimed.rowcount != 1:
                    raise Moved(f"another server has claimed the sessions of {self._owner!r} in {self._path}")
                self._database.execute("COMMIT")
            except BaseException:
                self._undo()
                raise
        except sqlite3.Error as error:
            raise JournalError(f"{self._path} cannot be written: {error}") from error
        self._tally = tally

    def close(self) -> None:
        self._database.close()

    # ------------------------------------------------------------------ opening

    def _check(self) -> None:
        """Nothing is written before the file is known to be a journal."""
        if self._value("PRAGMA application_id") != APPLICATION_ID:
            raise JournalError(f"{self._path} is not a journal of tokenspeed")
        found = [str(line) for (line,) in self._database.execute("PRAGMA integrity_check(3)")]
        if found != ["ok"]:
            raise self._damaged("; ".join(found))
        version = self._version()
        if _tables(self._database) != _tables_of(version):
            raise self._damaged("its tables are not those of a journal")
        mode = self._value("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.execute("PRAGMA fullfsync = ON")  # macOS: fsync alone stops at the drive's own cache
        self._database.execute("PRAGMA checkpoint_fullfsync = ON")
        synchronous = self._value("PRAGMA synchronous")
        if mode != "wal" or synchronous != _FULL:
            raise JournalError(f"{self._path}: SQLite says journal_mode {mode}, synchronous {synchronous}")
        self._upgrade(version)

    def _version(self) -> int:
        versions = self._database.execute("SELECT version FROM journal").fetchall()
        if len(versions) != 1 or not isinstance(versions[0][0], int) or versions[0][0] < 1:
            raise self._damaged("it has no version")
        version: int = versions[0][0]
        if version > VERSION:
            raise JournalError(f"{self._path} has version {version}; this tokenspeed reads versions up to {VERSION}")
        return version

    def _upgrade(self, version: int) -> None:
        if version == VERSION:
            return
        self._database.execute("BEGIN IMMEDIATE")
        try:
            for step in _STEPS[version:]:
                for statement in step:
                    self._database.execute(statement)
            if version < 2:
                self._count_rows()
            self._database.execute("UPDATE journal SET version = ?", (VERSION,))
            self._database.execute("COMMIT")
        except BaseException:
            self._undo()
            raise

    def _count_rows(self) -> None:
        tallies = {owner: Tally() for (owner,) in self._database.execute("SELECT owner FROM owners")}
        for owner, kind, row_id, payload, stored in self._database.execute(
            "SELECT owner, kind, id, payload, checksum FROM rows"
        ):
            self._check_row(owner, kind, row_id, payload, stored)
            if owner not in tallies:
                raise self._damaged(f"it has rows of {owner!r}, who is no owner")
            tallies[owner].add(stored)
        for owner, tally in tallies.items():
            self._database.execute(
                "UPDATE owners SET count = ?, total = ? WHERE owner = ?", (tally.count, tally.total, owner)
            )

    def _claim(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            orphans = self._database.execute("SELECT owner FROM rows EXCEPT SELECT owner FROM owners").fetchall()
            if orphans:
                raise self._damaged(f"it has rows of {orphans[0][0]!r}, who is no owner")
            self._database.execute("INSERT OR IGNORE INTO owners (owner, epoch) VALUES (?, 0)", (self._owner,))
            self._database.execute("UPDATE owners SET epoch = epoch + 1 WHERE owner = ?", (self._owner,))
            epoch, count, total = self._database.execute(
                "SELECT epoch, count, total FROM owners WHERE owner = ?", (self._owner,)
            ).fetchone()
            if not (isinstance(epoch, int) and isinstance(count, int) and isinstance(total, bytes)):
                raise self._damaged(f"the row of owner {self._owner!r} cannot be read")
            newer = self._database.execute("SELECT 1 FROM rows WHERE owner = ? AND epoch >= ?", (self._owner, epoch))
            if newer.fetchone() is not None:
                raise self._damaged(f"the epoch of {self._owner!r} is {epoch}, and it has rows of that epoch or later")
            self._database.execute("COMMIT")
        except BaseException:
            self._undo()
            raise
        self._epoch, self._tally = epoch, Tally(count, total)

    # ------------------------------------------------------------------ inside

    def _carry_out(self, change: Change, tally: Tally) -> None:
        key = (self._owner, change.kind, change.id)
        before = self._database.execute(
            "SELECT checksum FROM rows WHERE owner = ? AND kind = ? AND id = ?", key
        ).fetchone()
        if before is not None:
            tally.take(before[0])
        if isinstance(change, Put):
            mine = checksum(*key, change.payload)
            tally.add(mine)
            self._database.execute(
                "INSERT INTO rows (owner, kind, id, epoch, payload, checksum) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (owner, kind, id) DO UPDATE "
                "SET epoch = excluded.epoch, payload = excluded.payload, checksum = excluded.checksum",
                (*key, self._epoch, change.payload, mine),
            )
        else:
            self._database.execute("DELETE FROM rows WHERE owner = ? AND kind = ? AND id = ?", key)

    def _undo(self) -> None:
        """The error that led here is the one to tell of."""
        with suppress(sqlite3.Error):
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")

    def _value(self, pragma: str) -> object:
        row = self._database.execute(pragma).fetchone()
        return row[0] if row else None

    def _check_row(self, owner: object, kind: object, row_id: object, payload: object, stored: object) -> None:
        if not (
            isinstance(owner, str)
            and isinstance(kind, str)
            and isinstance(row_id, str)
            and isinstance(payload, bytes)
            and checksum(owner, kind, row_id, payload) == stored
        ):
            raise self._damaged(f"the checksum of {kind} {row_id} is wrong")

    def _check_tally(self, found: Tally, told: Tally) -> None:
        if found.count != told.count:
            raise self._damaged(f"{self._owner!r} has {found.count} rows in it and should have {told.count}")
        if found.total != told.total:
            raise self._damaged(f"the rows of {self._owner!r} are not those written last")

    def _damaged(self, what: str) -> JournalError:
        return JournalError(f"{self._path} is damaged: {what}")


def _connect(path: Path | str) -> sqlite3.Connection:
    # Transactions are begun and ended here by name; the one writer's thread is not the one that opened the file.
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    # Damaged text is read as other text, whose checksum is wrong, rather than as an error of Python's.
    connection.text_factory = lambda data: data.decode(errors="replace")
    return connection


def _create(path: Path) -> None:
    if path.with_name(path.name + "-wal").exists():
        raise JournalError(f"{path} is missing, but its log {path.name}-wal is there: restore the one or remove both")
    unfinished = path.with_name(path.name + ".new")
    unfinished.unlink(missing_ok=True)
    os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    connection = _connect(unfinished)
    try:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("PRAGMA synchronous = FULL")
        _make_tables(connection, VERSION)
    except sqlite3.Error as error:
        raise JournalError(f"{path} cannot be made: {error}") from error
    finally:
        connection.close()
    unfinished.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _make_tables(connection: sqlite3.Connection, version: int) -> None:
    connection.execute("BEGIN")
    for step in _STEPS[:version]:
        for statement in step:
            connection.execute(statement)
    connection.execute("UPDATE journal SET version = ?", (version,))
    connection.execute("COMMIT")


def _tables(connection: sqlite3.Connection) -> list[tuple[object, ...]]:
    """Of a database, the columns of each table: name, type, whether it may be null, place in the primary key."""
    found: list[tuple[object, ...]] = []
    for kind, name in connection.execute("SELECT type, name FROM sqlite_master ORDER BY type, name").fetchall():
        columns = connection.execute(f'PRAGMA table_info("{name}")').fetchall() if kind == "table" else []
        found.append((kind, name, *((column[1], column[2], column[3], column[5]) for column in columns)))
    return found


def _tables_of(version: int) -> list[tuple[object, ...]]:
    connection = _connect(":memory:")
    try:
        _make_tables(connection, version)
        return _tables(connection)
    finally:
        connection.close()
