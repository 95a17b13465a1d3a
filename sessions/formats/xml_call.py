"""The body of one tool call, `<function=NAME>` to `</function>`, read as it comes."""

from __future__ import annotations

from enum import Enum, auto

from tokenspeed.sessions.formats.arguments import ParameterTypes, json_text, quoted
from tokenspeed.sessions.formats.call import CallBody

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class _State(Enum):
    BEFORE = auto()
    NAME = auto()
    BETWEEN = auto()
    KEY = auto()
    VALUE_START = auto()
    VALUE = auto()
    DONE = auto()
    BROKEN = auto()


class XmlCallBody(CallBody):
    """Turns the text between a call's tags into JSON arguments.

    A value runs from the newline after `<parameter=KEY>` to a `</parameter>` (and the newline before it) that is
    followed by the next parameter or the function's end; any other `</parameter>` belongs to the value.
    """

    def __init__(self, types: ParameterTypes) -> None:
        super().__init__()
        self._types = types
        self._state = _State.BEFORE
        self._key = ""
        self._allowed: frozenset[str] = frozenset()
        self._keys: set[str] = set()
        self._value: list[str] = []  # pieces of a value that is not a string

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    @property
    def in_value(self) -> bool:
        return self._state in (_State.VALUE_START, _State.VALUE)

    def _step(self) -> bool:
        if self._state is _State.VALUE:
            return self._step_value()
        if self._state is _State.VALUE_START:
            return self._start_value()
        if self._state in (_State.NAME, _State.KEY):
            return self._step_word()
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        if self._state is _State.BEFORE:
            return self._take({_FUNCTION: _State.NAME})
        if self._state is _State.BETWEEN:
            return self._take({_PARAMETER: _State.KEY, _FUNCTION_END: _State.DONE})
        return self._break("there is text after </function>")

    def _take(self, tags: dict[str, _State]) -> bool:
        for tag, state in tags.items():
            if self._buffer.startswith(tag):
                self._buffer = self._buffer[len(tag) :]
                self._state = state
                if state is _State.DONE:
                    self._arguments.append("}")
                return True
        if any(tag.startswith(self._buffer) for tag in tags):
            return False
        return self._break(f"{' or '.join(tags)} is missing")

    def _step_word(self) -> bool:
        word, end, rest = self._buffer.partition(">")
        if "\n" in word or "<" in word or (end and not word):
            return self._break("a function or parameter has no name")
        if not end:
            return False
        self._buffer = rest
        if self._state is _State.NAME:
            self.name = word
            self._arguments.append("{")
            self._state = _State.BETWEEN
            return True
        if word in self._keys:
            return self._break(f"parameter {word!r} is given twice")
        self._key, self._state = word, _State.VALUE_START
        return True

    def _start_value(self) -> bool:
        if not self._buffer:
            return False
        self._buffer = self._buffer.removeprefix("\n")
        self._allowed = self._types.of(self.name or "", self._key)
        self._arguments.append((", " if self._keys else "") + quoted(self._key) + ": ")
        if self._streams:
            self._arguments.append('"')
        self._keys.add(self._key)
        self._state = _State.VALUE
        return True

    @property
    def _streams(self) -> bool:
        # A value that may also be null or a number is known only at its end.
        return self._allowed == {"string"}

    def _step_value(self) -> bool:
        end = self._buffer.find(_PARAMETER_END)
        if end < 0:
            self._add_value(self._held_from())
            return False
        after = self._buffer[end + len(_PARAMETER_END) :]
        follower = after.lstrip()
        if follower.startswith((_PARAMETER, _FUNCTION_END)):
            self._add_value(end - (end > 0 and self._buffer[end - 1] == "\n"))
            self._finish_value()
            self._buffer = follower
            return True
        if _PARAMETER.startswith(follower) or _FUNCTION_END.startswith(follower):
            self._add_value(end - (end > 0 and self._buffer[end - 1] == "\n"))
            return False
        self._add_value(end + len(_PARAMETER_END))
        return True

    def _held_from(self) -> int:
        """Where the buffer's longest ending begins that may grow into a newline and `</parameter>`."""
        whole = "\n" + _PARAMETER_END
        for tag in (whole, _PARAMETER_END):
            for length in range(min(len(tag) - 1, len(self._buffer)), 0, -1):
                if self._buffer.endswith(tag[:length]):
                    return len(self._buffer) - length
        return len(self._buffer)

    def _add_value(self, length: int) -> None:
        piece, self._buffer = self._buffer[:length], self._buffer[length:]
        if piece and self._streams:
            self._arguments.append(quoted(piece)[1:-1])
        elif piece:
            self._value.append(piece)

    def _finish_value(self) -> None:
        self._arguments.append('"' if self._streams else json_text("".join(self._value), self._allowed))
        self._value.clear()
        self._state = _State.BETWEEN

    def _break(self, error: str) -> bool:
        self.error, self._state = error, _State.BROKEN
        return False
