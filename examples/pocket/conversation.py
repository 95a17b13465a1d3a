"""A conversation in the making: its messages, and the saying of things."""

from __future__ import annotations

from typing import Any

from render import Call, Message, Piece
from values import Values


class Conversation:
    """What memory and errands write into; `thoughtful` conversations reason before every answer."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.messages: list[Message] = []
        self.thoughtful = False

    def user(self, text: str) -> None:
        """The user says something."""
        self.messages.append(Message("user", [Piece(text)]))

    def say(self, *pieces: Piece | str, reasoning: str = "", aim: dict[str, Any] | None = None) -> None:
        """The assistant says something; `aim` tells the evaluator how to score it."""
        content = [Piece(piece) if isinstance(piece, str) else piece for piece in pieces]
        self.messages.append(Message("assistant", content, reasoning, aim=aim or {}))

    def call(self, calls: list[Call], reasoning: str, group: str) -> None:
        """The assistant calls tools; `group` is the kind of case that the evaluator counts it under."""
        message = Message("assistant", reasoning=reasoning, calls=calls)
        message.aim = {"kind": "call", "group": group}
        self.messages.append(message)

    def tool(self, text: str) -> None:
        """A tool returns something."""
        self.messages.append(Message("tool", [Piece(text)]))
