"""The journal's file: what was committed is there, and what is damaged is refused."""

from __future__ import annotations

import hashlib
import random
import shutil
import sqlite3
import stat
from pathlib import Path

import pytest

from tokenspeed.sessions.journal.sqlite import APPLICATION_ID, VERSION, SqliteStore
from tokenspeed.sessions.journal.store import Change, Delete, JournalError, Moved, Put, Row


def rows(path: Path, owner: str = "a") -> list[Row]:
    store = SqliteStore.open(path, owner)
    try:
        return list(store.rows())
    finally:
        store.close()


def test_rows_are_there_in_the_order_of_their_first_writing(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    store = SqliteStore.open(path, "a")
    assert list(store.rows()) == []
    store.commit([Put("turn", "2", b"two"), Put("session", "1", b"one"), Put("turn", "1", b"")])
    store.commit(
        [Put("turn", "2", b"two again"), Delete("turn", "1"), Delete("turn", "9"), Put("turn", "0", b"\0" * 9999)]
    )
    expected = [Row("turn", "2", b"two again"), Row("session", "1", b"one"), Row("turn", "0", b"\0" * 9999)]
    assert list(store.rows()) == expected
    store.close()
    assert rows(path) == expected
    assert rows(path, "another") == []


def test_it_syncs_each_commit_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    store = SqliteStore.open(path, "a")
    store.commit([Put("turn", "1", b"x")])
    assert store._database.execute("PRAGMA synchronous").fetchone() == (2,)
    assert store._database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    files = list(tmp_path.iterdir())
    assert {file.name for file in files} == {"journal.db", "journal.db-wal", "journal.db-shm"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    store.close()


def test_a_failed_commit_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    store = SqliteStore.open(path, "a")
    store.commit([Put("turn", "1", b"x")])
    (pages,) = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(JournalError, match=r"journal\.db cannot be written: database or disk is full"):
        store.commit([Put("turn", "1", b"y"), Put("turn", "3", bytes(99_999))])
    assert list(store.rows()) == [Row("turn", "1", b"x")]
    store.commit([Put("turn", "2", b"z")])
    store.close()
    assert rows(path) == [Row("turn", "1", b"x"), Row("turn", "2", b"z")]


def test_who_claims_later_wins(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    first = SqliteStore.open(path, "a")
    first.commit([Put("turn", "1", b"first")])
    other = SqliteStore.open(path, "b")
    second = SqliteStore.open(path, "a")
    assert (first.epoch, second.epoch, other.epoch) == (1, 2, 1)
    for changes in ([Put("turn", "2", b"late")], [Put("turn", "1", b"late")], [Delete("turn", "1")], []):
        with pytest.raises(Moved, match="another server has claimed the sessions of 'a'"):
            first.commit(changes)
    second.commit([Put("turn", "2", b"second")])
    other.commit([Put("turn", "1", b"other")])
    assert list(second.rows()) == [Row("turn", "1", b"first"), Row("turn", "2", b"second")]
    for store in (first, second, other):
        store.close()
    assert rows(path, "b") == [Row("turn", "1", b"other")]


def first_version(path: Path) -> None:
    """A file of version 1, written by hand."""

    def check(*parts: bytes) -> bytes:
        return hashlib.blake2b(b"".join(len(p).to_bytes(8, "little") + p for p in parts), digest_size=16).digest()

    database = sqlite3.connect(path)
    database.executescript(
        f"""
        PRAGMA application_id = {APPLICATION_ID};
        CREATE TABLE journal (version INTEGER NOT NULL);
        INSERT INTO journal VALUES (1);
        CREATE TABLE owners (owner TEXT NOT NULL PRIMARY KEY, epoch INTEGER NOT NULL);
        INSERT INTO owners VALUES ('a', 7), ('b', 1);
        CREATE TABLE rows (number INTEGER PRIMARY KEY, owner TEXT NOT NULL, epoch INTEGER NOT NULL, kind TEXT NOT NULL,
            id TEXT NOT NULL, payload BLOB NOT NULL, checksum BLOB NOT NULL, UNIQUE (owner, kind, id));
        """
    )
    for number, owner, row_id, payload in ((5, "a", "x", b"one"), (6, "b", "x", b"else"), (9, "a", "y", b"two")):
        mine = check(owner.encode(), b"turn", row_id.encode(), payload)
        database.execute("INSERT INTO rows VALUES (?, ?, 1, 'turn', ?, ?, ?)", (number, owner, row_id, payload, mine))
    database.commit()
    database.close()


def test_a_file_of_the_first_version_is_upgraded(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    first_version(path)
    assert rows(path) == [Row("turn", "x", b"one"), Row("turn", "y", b"two")]
    assert rows(path, "b") == [Row("turn", "x", b"else")]
    store = SqliteStore.open(path, "a")
    assert store.epoch == 9
    store.commit([Delete("turn", "x")])
    store.close()
    assert rows(path) == [Row("turn", "y", b"two")]
    assert sqlite3.connect(path).execute("SELECT version FROM journal").fetchone() == (VERSION,)


def test_a_damaged_file_is_not_upgraded(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    first_version(path)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE rows SET payload = x'00' WHERE number = 9")
    database.close()
    for _ in range(2):
        with pytest.raises(JournalError, match="the checksum of turn y is wrong"):
            rows(path)


def test_other_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    for content, words in (
        (b"", r"journal\.db is damaged: it is empty"),
        (b"text, and a good deal of it. " * 99, r"journal\.db is damaged: file is not a database"),
    ):
        path.write_bytes(content)
        with pytest.raises(JournalError, match=words):
            rows(path)
        assert path.read_bytes() == content
    path.unlink()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE notes (text)")
    database.close()
    before = path.read_bytes()
    with pytest.raises(JournalError, match=r"journal\.db is not a journal of tokenspeed"):
        rows(path)
    assert path.read_bytes() == before
    path.unlink()
    path.mkdir()
    with pytest.raises(JournalError, match=r"journal\.db"):
        rows(path)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE journal SET version = 9", f"has version 9; this tokenspeed reads versions up to {VERSION}"),
        ("DELETE FROM journal", "it has no version"),
        ("CREATE TABLE more (x)", "its tables are not those of a journal"),
        ("ALTER TABLE rows ADD COLUMN more", "its tables are not those of a journal"),
        ("DELETE FROM rows WHERE id = '3'", "'a' has 9 rows in it and should have 10"),
        ("UPDATE rows SET id = '11' WHERE id = '3'", "the checksum of turn 11 is wrong"),
        ("UPDATE rows SET payload = 7 WHERE id = '3'", "the checksum of turn 3 is wrong"),
        (
            "UPDATE rows SET payload = o.payload, checksum = o.checksum, id = '33' FROM old AS o WHERE rows.id = '3'",
            "not",
        ),
        ("DELETE FROM owners", "it has rows of 'a', who is no owner"),
        ("UPDATE owners SET epoch = 0", "the epoch of 'a' is 1, and it has rows of that epoch or later"),
        ("UPDATE owners SET total = zeroblob(16)", "the rows of 'a' are not those written last"),
        ("UPDATE owners SET count = 'many'", "the row of owner 'a' cannot be read"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path: Path, statement: str, words: str) -> None:
    path = tmp_path / "journal.db"
    store = SqliteStore.open(path, "a")
    store.commit([Put("turn", "33", b"old")])
    with sqlite3.connect(path) as database:
        old = database.execute("SELECT payload, checksum FROM rows").fetchone()
    store.commit([Delete("turn", "33"), *(Put("turn", str(number), b"x" * number) for number in range(10))])
    store.close()
    database.execute("CREATE TEMP TABLE old (payload, checksum)")
    database.execute("INSERT INTO old VALUES (?, ?)", old)
    database.execute(statement)
    database.commit()
    database.close()
    with pytest.raises(JournalError, match=words):
        rows(path)


def test_a_log_without_its_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    store = SqliteStore.open(path, "a")
    store.commit([Put("turn", "1", b"x")])
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(JournalError, match=r"is missing, but its log journal\.db-wal is there"):
        SqliteStore.open(path, "a")
    store.close()


def some_changes(dice: random.Random, number: int) -> list[Change]:
    puts = [
        Put(dice.choice(["turn", "session"]), f"id{dice.randrange(60)}", dice.randbytes(dice.choice([5, 300, 9000])))
        for _ in range(dice.randint(1, 4))
    ]
    return [*puts, *(Delete("turn", f"id{dice.randrange(60)}") for _ in range(number % 3))]


def outcome(path: Path) -> list[Row] | None:
    """None if the file is refused."""
    try:
        return rows(path)
    except JournalError:
        return None


def test_no_damage_to_any_page_gives_other_rows(tmp_path: Path) -> None:
    dice, path = random.Random(1), tmp_path / "journal.db"
    store = SqliteStore.open(path, "a")
    for number in range(60):
        store.commit(some_changes(dice, number))
    store.close()
    whole, expected = path.read_bytes(), rows(path)
    page = 4096
    assert len(whole) % page == 0
    assert len(whole) // page > 40
    refused = read = 0
    for start in range(0, len(whole), page):
        damages = [whole[:start], whole[: start + page // 2], whole[:start] + bytes(page) + whole[start + page :]]
        for count in (1, 1, 1, 8):
            damaged = bytearray(whole)
            for _ in range(count):
                damaged[start + dice.randrange(page)] ^= 1 << dice.randrange(8)
            damages.append(bytes(damaged))
        for damaged in damages:
            path.write_bytes(damaged)
            found = outcome(path)
            assert found is None or found == expected
            refused, read = refused + (found is None), read + (found is not None)
    assert refused > 4 * read > 0  # a bit in a page that nothing uses harms nothing


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    """All rows could be read; but what is written next would not replace the row that it should."""
    path = tmp_path / "journal.db"
    store = SqliteStore.open(path, "a")
    store.commit([Put("turn", "one", b"x"), Put("turn", "two", b"y")])
    (root,) = store._database.execute("SELECT rootpage FROM sqlite_master WHERE tbl_name = 'rows' AND type = 'index'")
    store.close()
    content = bytearray(path.read_bytes())
    place = content.index(b"turntwo", (root[0] - 1) * 4096)
    content[place : place + 7] = b"turnTWO"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=r"journal\.db is damaged: .*row 2 missing from index"):
        rows(path)


def test_a_damaged_log_gives_what_was_committed_before(tmp_path: Path) -> None:
    dice, path = random.Random(2), tmp_path / "journal.db"
    store = SqliteStore.open(path, "a")
    states: list[list[Row]] = [[]]
    for number in range(20):
        store.commit(some_changes(dice, number))
        states.append(list(store.rows()))
    # As a process that is killed leaves it: nothing of the log has reached the file.
    whole, log = path.read_bytes(), (tmp_path / "journal.db-wal").read_bytes()
    store.close()
    frame = 4096 + 24
    assert (len(log) - 32) % frame == 0
    lengths: set[int] = set()
    for start in range(0, len(log), 5 * frame // 2):
        flipped = bytearray(log)
        flipped[min(start + dice.randrange(frame), len(log) - 1)] ^= 1 << dice.randrange(8)
        for damaged in (log[:start], bytes(flipped)):
            home = tmp_path / "copy"
            home.mkdir()
            (home / "journal.db").write_bytes(whole)
            (home / "journal.db-wal").write_bytes(damaged)
            found = outcome(home / "journal.db")
            assert found is None or found in states
            lengths.add(-1 if found is None else states.index(found))
            shutil.rmtree(home)
    assert 0 in lengths
    assert len(lengths) > 10
