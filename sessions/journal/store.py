"""Where the journal's rows are kept: the border between sessions and a database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class JournalError(Exception):
    """The journal cannot be used; the message says what is wrong, and where."""


class Moved(JournalError):
    """Another server has claimed the owner's rows since; what this one wrote last is not there."""


@dataclass(frozen=True)
class Put:
    """Write a row, in place of the one with the same kind and id if there is one."""

    kind: str
    id: str
    payload: bytes


@dataclass(frozen=True)
class Delete:
    """Take a row away, if it is there."""

    kind: str
    id: str


Change = Put | Delete


@dataclass(frozen=True)
class Row:
    kind: str
    id: str
    payload: bytes


class Store(Protocol):
    """The rows of one owner, claimed when the store is opened.

    A claim raises the owner's epoch, and every write is conditional on it: a server whose owner was claimed by another
    writes nothing any more. Calls come from one thread at a time, and may block.
    """

    @property
    def place(self) -> str:
        """What messages call it: a path, or an address without secrets."""
        ...

    def rows(self) -> Iterator[Row]:
        """All rows, in the order in which they were first written.

        Raises:
            JournalError: they are damaged. Then nothing that was read before counts.
        """
        ...

    def commit(self, changes: Sequence[Change]) -> None:
        """Carry out all changes or none. When it returns, they survive a loss of power.

        Raises:
            Moved: another server has claimed the owner.
            JournalError: they could not be written; whether they are there is unknown.
        """
        ...

    def close(self) -> None: ...
