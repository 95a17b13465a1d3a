"""Messages and their rendering to segments, equal to `chat_template.jinja` on whole conversations.

A segment is either a control token or text that is encoded by itself, with what the loss should make of it: the same
pieces that a server encodes which renders message by message.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

END, START, CLOSE = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"
RESPONSE, RESPONDED = "<tool_response>", "</tool_response>"
SPECIAL = (END, START, CLOSE)
ADDED = (THINK, THOUGHT, CALL, CALLED, RESPONSE, RESPONDED)
HOW_TO_CALL = (
    "\n</tools>\n\nTo call one, write:\n",
    CALL,
    "\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n",
    CALLED,
)

# Labels of text, which set its weight in the loss.
READ, WRITTEN, NAME, KEY, VALUE, RECALLED, QUOTED, FIRST = [
    "read",
    "written",
    "name",
    "key",
    "value",
    "recalled",
    "quoted",
    "first",
]


class Segment(NamedTuple):
    """A piece of a rendered conversation."""

    text: str
    label: str
    control: bool


class Piece(NamedTuple):
    """A piece of an assistant's text."""

    text: str
    label: str = WRITTEN


@dataclass
class Call:
    """A tool call; arguments have their JSON types."""

    name: str
    arguments: dict[str, Any]


@dataclass
class Message:
    """One message; `aim` tells the evaluator what the assistant's message must do and against what it is scored."""

    role: str
    content: list[Piece] = field(default_factory=list)
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    aim: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.content)


def as_text(value: Any) -> str:
    """An argument's value as a call writes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def plain(messages: list[Message]) -> list[dict[str, Any]]:
    """The conversation as chat-template messages."""
    result: list[dict[str, Any]] = []
    for message in messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.reasoning:
            entry["reasoning_content"] = message.reasoning
        if message.calls:
            entry["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.calls
            ]
        result.append(entry)
    return result


def head(schemas: list[dict[str, Any]], system: str | None) -> list[Segment]:
    """The preamble: tools and system text."""
    if not schemas and system is None:
        return []
    parts = [Segment(START, READ, True), Segment("system\n", READ, False)]
    if schemas:
        parts.append(Segment("# Tools\n\n<tools>", READ, False))
        parts += [Segment("\n" + json.dumps(schema, ensure_ascii=False), READ, False) for schema in schemas]
        parts += [Segment(text, READ, text in ADDED) for text in HOW_TO_CALL]
        if system is not None:
            parts.append(Segment("\n\n", READ, False))
    if system:
        parts.append(Segment(system, READ, False))
    return [*parts, Segment(CLOSE, READ, True), Segment("\n", READ, False)]


def opening() -> list[Segment]:
    """The generation prompt."""
    return [
        Segment(START, READ, True),
        Segment("assistant\n", READ, False),
        Segment(THINK, READ, True),
        Segment("\n", READ, False),
    ]


def answer(message: Message, reasoning: bool) -> list[Segment]:
    """An assistant's message; without `reasoning` the block of thoughts is left out."""
    if reasoning:
        parts = opening()
        if message.reasoning:
            parts.append(Segment(message.reasoning, WRITTEN, False))
        parts += [Segment("\n", WRITTEN, False), Segment(THOUGHT, WRITTEN, True), Segment("\n\n", WRITTEN, False)]
    else:
        parts = opening()[:2]
    content = [piece for piece in message.content if piece.text]
    for number, piece in enumerate(content):
        word, space, rest = piece.text.partition(" ")
        if number == 0 and piece.label == WRITTEN:
            parts += [Segment(word, FIRST, False), Segment(space + rest, WRITTEN, False)]
        else:
            parts.append(Segment(piece.text, piece.label, False))
    for number, call in enumerate(message.calls):
        if number or content:
            parts.append(Segment("\n", WRITTEN, False))
        parts += [
            Segment(CALL, FIRST, True),
            Segment("\n<function=", WRITTEN, False),
            Segment(call.name, NAME, False),
            Segment(">\n", NAME, False),
        ]
        for key, value in call.arguments.items():
            parts += [Segment("<parameter=", WRITTEN, False), Segment(key, KEY, False), Segment(">\n", KEY, False)]
            parts += [Segment(as_text(value), VALUE, False), Segment("\n</parameter>\n", VALUE, False)]
        parts += [Segment("</function>\n", WRITTEN, False), Segment(CALLED, WRITTEN, True)]
    return [*parts, Segment(CLOSE, WRITTEN, True), Segment("\n", READ, False)]


def render(
    schemas: list[dict[str, Any]], system: str | None, messages: list[Message], keep: bool = True
) -> list[Segment]:
    """The whole conversation; `keep` preserves the reasoning of every assistant's message."""
    last_query = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    parts = head(schemas, system)
    for i, message in enumerate(messages):
        if message.role == "user":
            parts += [Segment(START, READ, True), Segment("user\n", READ, False), Segment(message.text, READ, False)]
            parts += [Segment(CLOSE, READ, True), Segment("\n", READ, False)]
        elif message.role == "tool":
            if messages[i - 1].role != "tool":
                parts += [Segment(START, READ, True), Segment("user", READ, False)]
            parts += [Segment("\n", READ, False), Segment(RESPONSE, READ, True), Segment("\n", READ, False)]
            parts += [Segment(message.text, READ, False), Segment("\n", READ, False), Segment(RESPONDED, READ, True)]
            if i + 1 == len(messages) or messages[i + 1].role != "tool":
                parts += [Segment(CLOSE, READ, True), Segment("\n", READ, False)]
        else:
            parts += answer(message, keep or i > last_query)
    return [part for part in parts if part.text]
