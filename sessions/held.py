"""Bytes held back because a stop string may be coming."""

from __future__ import annotations

from collections.abc import Sequence


class HeldBytes:
    """Lets bytes through as far as no stop string can begin in what follows.

    A string that is complete is held whole: whether it ends the turn is the engine's word, which comes after the ids.
    If the turn goes on, it was none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop.encode() for stop in stops]
        self._held = b""
        self._complete = False

    def feed(self, piece: bytes) -> bytes:
        """What is certain with `piece` to be no part of a stop string."""
        if not self._stops:
            return piece
        passed = self.rest() if self._complete else b""
        self._held += piece
        self._complete = any(stop in self._held for stop in self._stops)
        if self._complete:
            return passed
        start = min(self._beginning(stop) for stop in self._stops)
        through, self._held = self._held[:start], self._held[start:]
        return passed + through

    def rest(self) -> bytes:
        """Everything held: no stop string has ended the turn here."""
        held, self._held, self._complete = self._held, b"", False
        return held

    def before(self, stop: str) -> bytes:
        """What is held before the first `stop`; the rest is dropped."""
        return self.rest().partition(stop.encode())[0]

    def _beginning(self, stop: bytes) -> int:
        """Where the longest ending of what is held begins that `stop` begins with."""
        held = self._held
        start = held.find(stop[0], max(0, len(held) - len(stop) + 1))
        while start >= 0 and not stop.startswith(held[start:]):
            start = held.find(stop[0], start + 1)
        return start if start >= 0 else len(held)
