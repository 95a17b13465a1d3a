"""`tokenspeed serve` and the directory in which it keeps sessions."""

from __future__ import annotations

import re
import resource
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.client import Client, SessionError

Command = Callable[..., str]
Start = Callable[..., Any]


def test_sessions_go_on_after_a_restart(start: Start, tmp_path: Path) -> None:
    home = tmp_path / "kept here"
    options = ("--data-dir", str(home), "--api-key", "red=right", "--api-key", "blue=left")
    server = start(*options)
    assert server.ready.endswith(f"; 0 sessions in {home}\n")
    with Client(server.url, "right") as client:
        session = client.session(instructions="Be brief.", labels={"a": "b"}, temperature=0, max_tokens=8)
        first = session.turn("My name is Ines.", token_ids=True)
        used = session.usage()
    assert server.end(signal.SIGTERM) == (0, "loading tokenspeed-pocket\n")
    assert {stat.S_IMODE(file.stat().st_mode) for file in home.iterdir()} == {0o600}
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    server = start(*options)
    assert server.ready.endswith(f"; 1 session in {home}\n")
    with Client(server.url, "right") as client:
        assert [(record.id, record.labels) for record in client.sessions()] == [(session.id, {"a": "b"})]
        session = client.session(id=session.id)
        (found,) = session.turns(token_ids=True)
        for name in ("id", "items", "status", "usage", "timings", "prompt_token_ids", "output_token_ids"):
            assert getattr(found, name) == getattr(first, name), name
        assert session.usage() == used
        second = session.turn("What is my name?", token_ids=True)
        before = first.prompt_token_ids + first.output_token_ids
        assert second.prompt_token_ids[: len(before)] == before
        assert (second.usage.reused.total, second.miss_reason) == (0, "cold")
        third = session.turn("And again?")
        assert third.usage.computed <= third.usage.prompt - second.usage.prompt - second.usage.output + 1
    with Client(server.url, "left") as other:
        assert other.sessions() == []
        with pytest.raises(SessionError, match="session_not_found"):
            other.session(id=session.id)


def test_one_server_a_directory(served: Any, command: Command) -> None:
    home = re.search(r"0 sessions in (.*)\n", served.ready)[1]
    assert re.fullmatch(r".*/tokenspeed/sessions/pocket-[0-9a-f]{12}", home)
    said = command("serve", "--port", "0", "--data-dir", home)
    expected = f"{home} is in use by the server with pid {served.process.pid}; give another --data-dir, or --no-journal"
    assert said == f"error: {expected}"


def test_without_a_journal_there_are_no_files(start: Start, tmp_path: Path) -> None:
    server = start("--no-journal")
    assert server.ready.endswith(" s)\n")
    with Client(server.url) as client:
        client.session()
        assert len(client.sessions()) == 1
    server.end(signal.SIGTERM)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


@pytest.mark.parametrize(
    "options",
    [
        ("--no-journal", "--data-dir", "."),
        ("--no-journal", "--journal", "postgresql://"),
        ("--data-dir", ".", "--journal", "postgresql://"),
        ("--journal", "mysql://"),
    ],
)
def test_options_that_contradict_each_other(command: Command, options: tuple[str, ...]) -> None:
    command("serve", "--port", "0", *options, code=2)


def test_a_database_that_cannot_be_reached(command: Command) -> None:
    pytest.importorskip("psycopg")
    said = command("serve", "--port", "0", "--journal", "postgresql://me:secret@127.0.0.1:1/none")
    assert said.startswith("error: the PostgreSQL server cannot be reached: ")
    assert "secret" not in said
    assert "\n" not in said


def test_without_psycopg_there_is_a_hint(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    said = command("serve", "--port", "0", "--journal", "postgresql://none")
    assert said.endswith("pip install 'tokenspeed-sessions[postgresql]'")


def test_a_damaged_journal_is_refused(command: Command, tmp_path: Path) -> None:
    (tmp_path / "journal.db").write_bytes(b"")
    assert command("serve", "--port", "0", "--data-dir", str(tmp_path)) == (
        f"error: {tmp_path}/journal.db is damaged: it is empty"
    )
    (tmp_path / "file").write_bytes(b"")
    said = command("serve", "--port", "0", "--data-dir", str(tmp_path / "file"))
    assert said.startswith(f"error: {tmp_path}/file cannot hold sessions: ")


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files of processes that the test starts may not become large."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more_ends_the_server_and_loses_nothing(
    start: Start, tmp_path: Path, small_files: None
) -> None:
    home = tmp_path / "kept"
    server = start("--data-dir", str(home))
    told: list[str] = []

    def fill(client: Client) -> None:
        for number in range(1000):
            told.append(client.session(instructions=f"{number} " + "word " * 300).id)

    with Client(server.url) as client, pytest.raises((SessionError, ConnectionError)) as caught:
        fill(client)
    assert isinstance(caught.value, ConnectionError) or caught.value.code == "journal_failed"
    assert server.process.wait(timeout=30) == 1
    errors = server.process.communicate()[1]
    assert errors.splitlines()[-1].startswith(f"error: {home}/journal.db cannot be written: ")
    assert len(told) > 10
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with Client(start("--data-dir", str(home)).url) as client:
        assert [record.id for record in client.sessions()][: len(told)] == told
