"""Stop strings, on the bytes that tokens write."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a turn's output for the first of its stop strings to be complete.

    Strings are found wherever token boundaries fall, in characters of several bytes too. An id that is no text (an
    added token) parts what is before it from what is after.
    """

    def __init__(self, strings: Sequence[str], token_bytes: Sequence[bytes | None]) -> None:
        self._strings = [(text, text.encode()) for text in strings]
        self._token_bytes = token_bytes
        self._reach = max((len(data) for _, data in self._strings), default=0)
        self._tail = b""

    def after(self, token: int) -> str | None:
        """Take the next id. The string that it completes, if any: the one that ends first, the longest of these."""
        if not self._strings:
            return None
        written = self._token_bytes[token] if token < len(self._token_bytes) else None
        if written is None:
            self._tail = b""
            return None
        text = self._tail + written
        found = [(text.find(data) + len(data), -len(data), string) for string, data in self._strings if data in text]
        self._tail = text[-(self._reach - 1) :] if self._reach > 1 else b""
        return min(found)[2] if found else None
