"""The same journal in a real PostgreSQL server, which the tests start for themselves."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.sessions.journal.journal import Journal
from tokenspeed.sessions.journal.postgres import PostgresStore
from tokenspeed.sessions.journal.store import Delete, JournalError, Moved, Put, Row

psycopg = pytest.importorskip("psycopg")

HI = "\n</think>\n\nHi<|im_end|>"


def binaries() -> Path | None:
    """Where Debian's packages, or the path, have the server."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server's database."""
    programs = binaries()
    if programs is None:
        pytest.skip("there is no PostgreSQL server here")
    home = Path(tempfile.mkdtemp(prefix="tokenspeed-pg-"))
    user: dict[str, Any] = {}
    if os.geteuid() == 0:  # which the server refuses to run as
        shutil.chown(home, "postgres")
        user = {"user": "postgres", "cwd": home}

    def run(name: str, *options: str) -> None:
        subprocess.run([programs / name, *options], check=True, stdout=subprocess.DEVNULL, timeout=60, **user)

    data = str(home / "data")
    run("initdb", "-D", data, "-U", "tester", "--auth=trust", "-E", "UTF8")
    settings = f"-k {home} -c listen_addresses=''"
    run("pg_ctl", "-D", data, "-w", "-l", str(home / "log"), "-o", settings, "start")
    yield f"postgresql://tester@/postgres?host={home}"
    run("pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def address(server: str) -> str:
    """Of a database without tables."""
    with psycopg.connect(server, autocommit=True) as database:
        database.execute("DROP SCHEMA IF EXISTS tokenspeed CASCADE")
    return server


def rows(address: str, owner: str = "a") -> list[Row]:
    store = PostgresStore.open(address, owner)
    try:
        return list(store.rows())
    finally:
        store.close()


def test_rows_are_there_in_the_order_of_their_first_writing(address: str) -> None:
    store = PostgresStore.open(address, "a")
    assert list(store.rows()) == []
    store.commit([Put("turn", "2", b"two"), Put("session", "1", b"one"), Put("turn", "1", b"")])
    store.commit([Put("turn", "2", b"again"), Delete("turn", "1"), Delete("turn", "9"), Put("turn", "0", b"\0" * 9999)])
    expected = [Row("turn", "2", b"again"), Row("session", "1", b"one"), Row("turn", "0", b"\0" * 9999)]
    assert list(store.rows()) == expected
    assert store._value("SHOW synchronous_commit") == "on"
    store.close()
    assert rows(address) == expected
    assert rows(address, "another") == []


def test_a_failed_commit_leaves_nothing(address: str) -> None:
    store = PostgresStore.open(address, "a")
    store.commit([Put("turn", "1", b"x")])
    with pytest.raises(JournalError, match="/postgres cannot be written: "):
        store.commit([Put("turn", "1", b"y"), Put("turn", "nul \0", b"")])
    assert list(store.rows()) == [Row("turn", "1", b"x")]
    with psycopg.connect(address, autocommit=True) as database:
        ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname <> ''"
        database.execute(ended)
    with pytest.raises(JournalError, match="cannot be written: "):
        store.commit([Put("turn", "2", b"y")])
    store.close()
    assert rows(address) == [Row("turn", "1", b"x")]


def test_who_claims_later_wins(address: str) -> None:
    first = PostgresStore.open(address, "a")
    first.commit([Put("turn", "1", b"first")])
    other, second = PostgresStore.open(address, "b"), PostgresStore.open(address, "a")
    assert (first.epoch, second.epoch, other.epoch) == (1, 2, 1)
    for changes in ([Put("turn", "2", b"late")], [Put("turn", "1", b"late")], [Delete("turn", "1")], []):
        with pytest.raises(Moved, match="another server has claimed the sessions of 'a'"):
            first.commit(changes)
    second.commit([Put("turn", "2", b"second")])
    other.commit([Put("turn", "1", b"other")])
    assert list(second.rows()) == [Row("turn", "1", b"first"), Row("turn", "2", b"second")]
    for store in (first, second, other):
        store.close()


def test_servers_that_begin_at_once(address: str) -> None:
    epochs: list[int] = []

    def begin() -> None:
        store = PostgresStore.open(address, "a")
        epochs.append(store.epoch)
        store.close()

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(epochs) == list(range(1, 9))


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE journal SET version = 9", "has version 9; this tokenspeed reads version 1"),
        ("DELETE FROM journal", "has version None"),
        ("ALTER TABLE owners RENAME COLUMN total TO sum", "cannot be used: "),
        ("DELETE FROM rows WHERE id = '3'", "is damaged: 'a' has 9 rows and should have 10"),
        ("UPDATE rows SET payload = 'z' WHERE id = '3'", "is damaged: the checksum of turn 3 is wrong"),
        ("UPDATE owners SET total = checksum FROM rows", "is damaged: the rows of 'a' are not those written last"),
    ],
)
def test_what_does_not_fit_together_is_refused(address: str, statement: str, words: str) -> None:
    store = PostgresStore.open(address, "a")
    store.commit([Put("turn", str(number), b"x" * number) for number in range(10)])
    store.close()
    with psycopg.connect(address) as database:
        database.execute("SET search_path = tokenspeed")
        database.execute(statement)
    with pytest.raises(JournalError, match=words):
        rows(address)


def test_a_server_that_cannot_be_reached_is_said_without_the_password() -> None:
    with pytest.raises(JournalError, match="the PostgreSQL server cannot be reached: ") as caught:
        PostgresStore.open("postgresql://me:secret@127.0.0.1:1/none", "a")
    assert "secret" not in str(caught.value)


def test_two_hosts_on_one_database(desk: Callable[..., Any], address: str) -> None:
    """The one that comes later has all sessions; the one before is refused, and no turn is doubled."""

    async def test() -> None:
        journal = Journal(PostgresStore.open(address, "a"))
        d = desk(journal=journal)
        session = await d.open(instructions="Be brief.", labels={"a": "é"})
        first = await d.take(session, "a", HI, token_ids=True)
        later = Journal(PostgresStore.open(address, "a"))
        other = desk(journal=later)
        lost = await d.take(session, "b", HI)
        assert (lost.status, lost.error.code, lost.head) == ("failed", "session_moved", first.turn)
        second = await other.take(session, "b", HI, token_ids=True)
        before = first.prompt_token_ids + first.output_token_ids
        assert second.prompt_token_ids[: len(before)] == before
        assert [turn.id for turn in await other.turns(session)] == [first.turn, second.turn]
        for closing in (journal, later):
            closing.close()
        assert [row.id for row in rows(address) if row.kind == "turn"] == [first.turn, second.turn]

    asyncio.run(asyncio.wait_for(test(), 30))
