"""The start-up check that a derived format writes what its template writes."""

from __future__ import annotations

from itertools import product
from typing import Any

from tokenspeed.sessions.formats.qwen import QwenFormat
from tokenspeed.sessions.formats.segments import Segment, joined
from tokenspeed.sessions.formats.template import ChatTemplate, FormatError, Message

_PROBE = "probe-tool"
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": _PROBE,
            "description": f"{_PROBE} <b>&'\"</b>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Köln", "a\nb"]}}},
        },
    }
]


def self_test(chat_format: QwenFormat, template: ChatTemplate) -> None:
    """Compare pieces and wholes on sample conversations.

    Raises:
        FormatError: the joined pieces differ from the template's own output, or tools are written in a way that
            cannot be told from the format's own text.
    """
    for system, tools in product(("Be brief.\n", None), (_TOOLS, [])):
        _check_tools(chat_format.preamble(system, tools))
        messages = ([{"role": "system", "content": system}] if system else []) + _conversation(chat_format.thinks)
        for keep in (True, False):
            options = {"add_generation_prompt": True, "preserve_thinking": keep}
            expected = template.text(messages, tools, **options)
            _compare(joined(chat_format.whole(messages, tools, **options)), expected)
        if _keeps(template, chat_format):
            expected = template.text(messages, tools, add_generation_prompt=True, preserve_thinking=True)
            _compare(_in_pieces(chat_format, system, tools), expected)


def _conversation(thinks: bool) -> list[Message]:
    def thought(text: str) -> str:
        return text if thinks else ""

    return [
        {"role": "user", "content": "Weather in Köln & Bonn?"},
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning_content": thought("Two calls."),
            "tool_calls": [_call({"city": "Köln", "days": 2}), _call({"city": "Bonn", "list": ["<a>", None, True]})],
        },
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": '{"sun": "<1 h"}'},
        {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": [_call({})]},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "Rain in Köln.", "reasoning_content": thought("Done.\n\nReally.")},
        {"role": "user", "content": "Thanks"},
    ]


def _call(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": _PROBE, "arguments": arguments}}


def _in_pieces(chat_format: QwenFormat, system: str | None, tools: list[Any]) -> str:
    """The sample conversation as a session would come by it, turn after turn."""
    text = joined(chat_format.preamble(system, tools))
    pending: list[Message] = []
    first = True
    for message in _conversation(chat_format.thinks):
        if message["role"] != "assistant":
            pending.append(message)
            continue
        text += _input(chat_format, system, tools, pending, first) + joined(chat_format.answer(message))
        pending, first = [], False
    return text + _input(chat_format, system, tools, pending, first)


def _input(chat_format: QwenFormat, system: str | None, tools: list[Any], messages: list[Message], first: bool) -> str:
    if first:
        segments = chat_format.first_input(system, tools, messages, keep_reasoning=True)
    else:
        segments = chat_format.next_input(messages, keep_reasoning=True)
    return joined(segments) + chat_format.generation_prompt


def _keeps(template: ChatTemplate, chat_format: QwenFormat) -> bool:
    """Whether the template can write a conversation with all its reasoning; an older one cannot, and is then only
    compared as a whole."""
    past = template.text(_conversation(chat_format.thinks), preserve_thinking=True)
    return not chat_format.thinks or "Really." in past


def _check_tools(preamble: list[Segment]) -> None:
    written = [segment for segment in preamble if _PROBE in segment.text]
    if any(not segment.plain for segment in written):
        raise FormatError("the chat template writes tools in another way than as JSON")


def _compare(found: str, expected: str) -> None:
    if found == expected:
        return
    place = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(found))
    raise FormatError(
        "the chat template writes a conversation in another way than its messages one by one: "
        f"{expected[max(0, place - 20) : place + 20]!r} against {found[max(0, place - 20) : place + 20]!r}"
    )
