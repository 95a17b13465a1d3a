"""The body of one tool call, `{"name": …, "arguments": {…}}`, read as it comes."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from tokenspeed.sessions.formats.call import CallBody

_BLANK = " \t\r\n"
_MARK = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
_MOST_CHARACTERS = 1024
"""Of a key or a name. What is longer is none, and is not looked through again and again."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


class _State(Enum):
    START = auto()
    KEY = auto()
    COLON = auto()
    NAME = auto()
    ARGUMENTS = auto()
    INSIDE = auto()
    AFTER = auto()
    DONE = auto()
    BROKEN = auto()


class JsonCallBody(CallBody):
    """Passes the arguments on as the model wrote them.

    The object has a name and arguments, in either order, and nothing else. Arguments that come first are withheld
    until the name is known.
    """

    def __init__(self) -> None:
        super().__init__()
        self._state = _State.START
        self._key = ""
        self._seen: set[str] = set()
        self._depth = 0
        self._quoted = False  # inside a string of the arguments
        self._object: list[str] = []

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    @property
    def in_value(self) -> bool:
        return self._quoted

    def _step(self) -> bool:
        if self._state is _State.INSIDE:
            return self._step_inside()
        self._buffer = self._buffer.lstrip(_BLANK)
        if not self._buffer:
            return False
        first = self._buffer[0]
        if self._state is _State.START:
            return self._pass(_State.KEY) if first == "{" else self._break("the call is no JSON object")
        if self._state is _State.KEY:
            return self._step_key()
        if self._state is _State.COLON:
            after = _State.NAME if self._key == "name" else _State.ARGUMENTS
            return self._pass(after) if first == ":" else self._break(f"{self._key!r} is not followed by a colon")
        if self._state is _State.NAME:
            return self._step_name()
        if self._state is _State.ARGUMENTS:
            if first != "{":
                return self._break("the arguments are no JSON object")
            self._state = _State.INSIDE
            return True
        if self._state is _State.AFTER:
            return self._step_after(first)
        return self._break("there is text after the call's object")

    def _step_key(self) -> bool:
        if self._buffer[0] != '"':
            return self._break("the call's object is no JSON")
        key = self._take_string()
        if key is None:
            return False
        if key not in ("name", "arguments") or key in self._seen:
            return self._break(f"the call's object has an unexpected key {key[:100]!r}")
        self._seen.add(key)
        self._key, self._state = key, _State.COLON
        return True

    def _step_name(self) -> bool:
        if self._buffer[0] != '"':
            return self._break("the name is no text")
        name = self._take_string()
        if name is None:
            return False
        if not name:
            return self._break("the function has no name")
        self.name, self._state = name, _State.AFTER
        self._arguments += self._object
        return True

    def _step_inside(self) -> bool:
        """Look through the arguments for their end; what is before it is theirs."""
        for match in _MARK.finditer(self._buffer):
            mark = match[0]
            if mark == '"':
                self._quoted = not self._quoted
            elif mark[0] != "\\" and not self._quoted:
                self._depth += 1 if mark in "{[" else -1
                if self._depth == 0:
                    self._add(match.end())
                    return self._finish()
        # Of a backslash it is not known yet what it escapes.
        backslashes = len(self._buffer) - len(self._buffer.rstrip("\\"))
        self._add(len(self._buffer) - backslashes % 2)
        return False

    def _add(self, length: int) -> None:
        piece, self._buffer = self._buffer[:length], self._buffer[length:]
        self._object.append(piece)
        if self.name is not None:
            self._arguments.append(piece)

    def _finish(self) -> bool:
        try:
            json.loads("".join(self._object), parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            return self._break(f"the arguments are no JSON: {error}")
        self._state = _State.AFTER
        return True

    def _step_after(self, first: str) -> bool:
        if first == ",":
            return self._pass(_State.KEY)
        if first != "}":
            return self._break("the call's object is no JSON")
        missing = {"name", "arguments"} - self._seen
        return self._break(f"the {missing.pop()} is missing") if missing else self._pass(_State.DONE)

    def _take_string(self) -> str | None:
        """The string that the buffer begins with, once it is whole; an empty one for what is none."""
        match = _STRING.match(self._buffer)
        if len(match[0] if match else self._buffer) > _MOST_CHARACTERS:
            return ""
        if match is None:
            return None
        self._buffer = self._buffer[match.end() :]
        try:
            text: str = json.loads(match[0])
        except ValueError:
            return ""
        return text

    def _pass(self, state: _State) -> bool:
        self._buffer, self._state = self._buffer[1:], state
        return True

    def _break(self, error: str) -> bool:
        self.error, self._state, self._quoted = error, _State.BROKEN, False
        return False


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
