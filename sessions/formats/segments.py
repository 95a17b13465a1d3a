"""Segments: a rendering's text, told apart by who wrote it."""

from __future__ import annotations

import re
import secrets
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

from tokenspeed.sessions.tokenizer import ChatTokenizer


class Segment(NamedTuple):
    """A run of text. `plain`: written by a person, a tool or the model, as against the format's own."""

    text: str
    plain: bool


class Contents:
    """Stand-ins for the contents of one rendering.

    A template is rendered with a unique mark in place of each content, and its output is split at the marks. So what
    the template wrote itself is known, whatever the contents spell.
    """

    _OPEN, _CLOSE = "\U0010f8a1", "\U0010f8a2"

    def __init__(self) -> None:
        self._texts: list[str] = []
        # Nobody who writes a content can know the marks of its rendering.
        self._nonce = secrets.token_hex(8)
        self._pattern = re.compile(f"{self._OPEN}{self._nonce}:([0-9]+){self._CLOSE}")

    @classmethod
    def occurs_in(cls, text: str) -> bool:
        return cls._OPEN in text or cls._CLOSE in text

    def mark(self, text: str) -> str:
        """A mark for `text`. Blank text goes as it is: templates may ask whether there is any."""
        if not text.strip():
            return text
        self._texts.append(text)
        return f"{self._OPEN}{self._nonce}:{len(self._texts) - 1}{self._CLOSE}"

    def mark_all(self, value: Any) -> Any:
        """`value`, a JSON value, with every text in it marked, keys too."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, list):
            return [self.mark_all(entry) for entry in value]
        if isinstance(value, dict):
            return {self.mark(key): self.mark_all(entry) for key, entry in value.items()}
        return value

    def restore(self, value: Any) -> Any:
        """`value`, a JSON value, with the marks in its texts undone."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._texts[int(match[1])], value)
        if isinstance(value, list):
            return [self.restore(entry) for entry in value]
        if isinstance(value, dict):
            return {self.restore(key): self.restore(entry) for key, entry in value.items()}
        return value

    def split(self, rendered: str) -> list[Segment]:
        pieces = self._pattern.split(rendered)
        segments = [
            Segment(self._texts[int(piece)], plain=True) if place % 2 else Segment(piece, plain=False)
            for place, piece in enumerate(pieces)
        ]
        return [segment for segment in segments if segment.text]


def joined(segments: Iterable[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def cut(segments: list[Segment], offset: int) -> tuple[list[Segment], list[Segment]]:
    """The segments before and after a character offset."""
    before: list[Segment] = []
    for place, segment in enumerate(segments):
        if offset < len(segment.text):
            head, tail = segment.text[:offset], segment.text[offset:]
            before += [Segment(head, segment.plain)] if head else []
            return before, [Segment(tail, segment.plain), *segments[place + 1 :]]
        before.append(segment)
        offset -= len(segment.text)
    return before, []


def encode(segments: Iterable[Segment], tokenizer: ChatTokenizer) -> array[int]:
    """Token ids, each segment encoded by itself: its ids do not depend on its neighbours."""
    ids: array[int] = array("i")
    for segment in segments:
        ids += tokenizer.encode_plain(segment.text) if segment.plain else tokenizer.encode_control(segment.text)
    return ids
