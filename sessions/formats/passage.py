"""A stretch of running text between two tags."""

from __future__ import annotations


class Passage:
    """Text without the newlines that the format puts at its edges.

    Up to `leading` newlines are skipped at its start. Up to `trailing` newlines at its end are withheld, for they go
    if a tag follows. Blanks alone are withheld too: they make no item.

    Attributes:
        text: what has been let through.
    """

    def __init__(self, leading: int = 0, trailing: int = 0) -> None:
        self._leading = leading
        self._trailing = trailing
        self._held = ""
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def feed(self, text: str) -> str:
        """What `text` lets through."""
        while self._leading and text.startswith("\n"):
            text = text[1:]
            self._leading -= 1
        if not text:
            return ""
        self._leading = 0
        text = self._held + text
        if not self._pieces and text.isspace():
            self._held = text
            return ""
        end = len(text)
        while end > len(text) - self._trailing and text[end - 1 : end] == "\n":
            end -= 1
        self._held = text[end:]
        return self._let(text[:end])

    def rest(self) -> str:
        """What was withheld, when no tag follows; blanks alone stay withheld."""
        held, self._held = self._held, ""
        return self._let(held) if self._pieces else ""

    def _let(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text
