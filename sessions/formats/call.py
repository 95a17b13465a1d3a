"""The body of one tool call, between its tags."""

from __future__ import annotations

from abc import ABC, abstractmethod


class CallBody(ABC):
    """Turns the text between a call's tags into a name and JSON arguments, as it comes.

    Attributes:
        name: the function's, once it is known; before that no arguments are let through.
        error: why the body cannot be read as a call; None so far.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.error: str | None = None
        self._buffer = ""  # text not yet understood
        self._raw: list[str] = []
        self._arguments: list[str] = []

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    @property
    def arguments(self) -> str:
        return "".join(self._arguments)

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the call is whole."""

    @property
    @abstractmethod
    def in_value(self) -> bool:
        """Whether what follows may be text of a value, whatever it spells."""

    def feed(self, text: str) -> str:
        """The JSON that `text` adds to the arguments."""
        self._raw.append(text)
        start = len(self._arguments)
        if self.error is None:
            self._buffer += text
            while self._step():
                pass
        return "".join(self._arguments[start:])

    def end(self, reason: str) -> None:
        """Nothing more comes, and what is here is no whole call: `reason` says so, unless an error came first."""
        if self.error is None:
            self._break(reason)

    @abstractmethod
    def _step(self) -> bool:
        """Understand a piece of the buffer. False: it takes more text, or none will do."""

    @abstractmethod
    def _break(self, error: str) -> bool:
        """The body is no call: set `error`, stand still. Returns False."""
