"""The writer: who waits at the same time shares a commit, and after a failure nothing is written."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest

from tokenspeed.sessions.journal.journal import Journal
from tokenspeed.sessions.journal.store import Change, JournalError, Put, Row


class Held:
    """A store whose commits wait until they are let through."""

    place = "held"

    def __init__(self) -> None:
        self.through = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.commits: list[list[str]] = []
        self.failure: Exception | None = None
        self.closed = False

    def rows(self) -> Iterator[Row]:
        return iter(())

    def commit(self, changes: Sequence[Change]) -> None:
        self.begun.release()
        assert self.through.acquire(timeout=10)
        if self.failure is not None:
            raise self.failure
        self.commits.append([change.id for change in changes])

    def close(self) -> None:
        self.closed = True


def put(name: str) -> list[Change]:
    return [Put("turn", name, b"")]


def test_those_who_wait_share_a_commit() -> None:
    store = Held()
    journal = Journal(store)
    done: list[str] = []

    def append(name: str) -> Future[None]:
        future = journal.append([*put(name), *put(name + "'")])
        future.add_done_callback(lambda _: done.append(name))
        return future

    append("a")
    assert store.begun.acquire(timeout=10)
    futures = [append(name) for name in "bcd"]
    cancelled = append("e")
    assert cancelled.cancel()  # who waits for it is gone; it is written all the same
    futures.append(append("f"))
    done.remove("e")
    assert not any(future.done() for future in futures)
    store.through.release(2)
    for future in futures:
        assert future.result(timeout=10) is None
    assert store.commits == [["a", "a'"], [name + mark for name in "bcdef" for mark in ("", "'")]]
    assert done == list("abcdf")
    journal.close()


@pytest.mark.parametrize("failure", [JournalError("the disk is full"), RuntimeError("the disk is full")])
def test_after_a_failure_nothing_is_written(failure: Exception) -> None:
    store = Held()
    journal = Journal(store)
    store.failure = failure
    first = journal.append(put("a"))
    assert store.begun.acquire(timeout=10)
    second = journal.append(put("b"))
    assert journal.failure is None
    store.through.release()
    for future in (first, second, journal.append(put("c"))):
        with pytest.raises(JournalError, match="the disk is full"):
            future.result(timeout=10)
    assert "the disk is full" in str(journal.failure)
    journal.close()
    assert store.commits == []


def test_closing_writes_what_waits() -> None:
    store = Held()
    journal = Journal(store)
    futures = [journal.append(put(name)) for name in "abc"]
    store.through.release(3)
    journal.close()
    journal.close()
    assert store.closed
    assert [name for commit in store.commits for name in commit] == list("abc")
    assert all(future.done() for future in futures)
    with pytest.raises(JournalError, match="held is closed"):
        journal.append(put("d")).result(timeout=10)
