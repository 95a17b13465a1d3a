"""Conversation items: the Responses API's item schema, the only taxonomy of turn contents in the project."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Role = Literal["system", "developer", "user", "assistant"]
ItemStatus = Literal["completed", "incomplete"]


class TextPart(msgspec.Struct, tag_field="type", tag="text", omit_defaults=True):
    text: str


class InputTextPart(msgspec.Struct, tag_field="type", tag="input_text", omit_defaults=True):
    text: str


class OutputTextPart(msgspec.Struct, tag_field="type", tag="output_text", omit_defaults=True):
    text: str


class ReasoningTextPart(msgspec.Struct, tag_field="type", tag="reasoning_text", omit_defaults=True):
    text: str


ContentPart = TextPart | InputTextPart | OutputTextPart


class MessageItem(msgspec.Struct, tag_field="type", tag="message", omit_defaults=True):
    role: Role
    content: str | list[ContentPart]
    id: str | None = None
    status: ItemStatus = "completed"

    @property
    def text(self) -> str:
        """The message's text, its parts joined."""
        return joined_text(self.content)


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", omit_defaults=True):
    content: list[ReasoningTextPart]
    id: str | None = None
    status: ItemStatus = "completed"

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", omit_defaults=True):
    """A call of a tool by the model.

    `arguments` is a JSON object as text. `parse_error` is set where the model's call could not be read as one
    (then `arguments` is `{}`, `status` is `incomplete` and `raw` is the text between the call's tags, unchanged).
    """

    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: ItemStatus = "completed"
    parse_error: str | None = None
    raw: str | None = None


class FunctionCallOutputItem(msgspec.Struct, tag_field="type", tag="function_call_output", omit_defaults=True):
    call_id: str
    output: str | list[ContentPart]
    id: str | None = None

    @property
    def text(self) -> str:
        return joined_text(self.output)


Item = MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem
InputItem = MessageItem | FunctionCallOutputItem


class FunctionTool(msgspec.Struct, tag_field="type", tag="function", omit_defaults=True):
    """A tool as the Responses API has it: `parameters` is a JSON Schema object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: bool | None = None


def joined_text(content: str | list[ContentPart]) -> str:
    """`content` as one string."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
