"""The journal's one writer: what waits at the same time is committed together."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from tokenspeed.sessions.journal.store import Change, JournalError, Row, Store


class Journal:
    """Durable rows. `append` may be called on any thread and never blocks; a thread of the journal's own commits.

    After a commit that failed nothing more is written: what memory holds by then is ahead of the journal.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._failure: JournalError | None = None
        self._waiting: queue.SimpleQueue[tuple[Sequence[Change], Future[None]] | None] = queue.SimpleQueue()
        self._closed = False
        self._writer = threading.Thread(target=self._write, name="tokenspeed-journal", daemon=True)
        self._writer.start()

    @property
    def place(self) -> str:
        return self._store.place

    @property
    def failure(self) -> JournalError | None:
        """Why nothing is written any more."""
        return self._failure

    def rows(self) -> Iterator[Row]:
        """Everything that is there, in the order of first writing; read before anything is appended.

        Raises:
            JournalError: it is damaged.
        """
        return self._store.rows()

    def append(self, changes: Sequence[Change]) -> Future[None]:
        """Write all of `changes` or none, after everything appended before. The future is done once they are durable;
        futures are done in the order of the calls.

        Raises:
            JournalError: from the future.
        """
        future: Future[None] = Future()
        if self._closed:
            future.set_exception(JournalError(f"{self.place} is closed"))
        else:
            self._waiting.put((changes, future))
        return future

    def close(self) -> None:
        """Write what waits, and close the store."""
        if not self._closed:
            self._closed = True
            self._waiting.put(None)
            self._writer.join()
            self._store.close()

    def _write(self) -> None:
        going_on = True
        while going_on:
            group: list[tuple[Sequence[Change], Future[None]]] = []
            entry = self._waiting.get()
            while entry is not None:
                group.append(entry)
                if self._waiting.empty():  # nobody else takes from it
                    break
                entry = self._waiting.get()
            going_on = entry is not None
            if group:
                self._commit(group)

    def _commit(self, group: list[tuple[Sequence[Change], Future[None]]]) -> None:
        if self._failure is None:
            try:
                self._store.commit([change for changes, _ in group for change in changes])
            except JournalError as error:
                self._failure = error
            except Exception as error:
                self._failure = JournalError(f"{self.place} cannot be written: {type(error).__name__}: {error}")
        for _, future in group:
            if not future.set_running_or_notify_cancel():
                continue
            if self._failure is None:
                future.set_result(None)
            else:
                future.set_exception(self._failure)
