"""JSON (Hermes) calls: what they read as at any chunking, and what is refused with the raw text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.client.protocol.items import FunctionCallItem
from tokenspeed.sessions.formats.arguments import ParameterTypes
from tokenspeed.sessions.formats.json_call import JsonCallBody
from tokenspeed.sessions.formats.output import Delta, OutputEvent, OutputParser
from tokenspeed.sessions.formats.qwen import QwenFormat
from tokenspeed.sessions.formats.selftest import self_test
from tokenspeed.sessions.formats.template import ChatTemplate
from tokenspeed.sessions.tokenizer import ChatTokenizer

END = "<|im_end|>"


@pytest.fixture(scope="module")
def hermes(tokenizer: ChatTokenizer) -> QwenFormat:
    template = ChatTemplate((Path(__file__).parents[1] / "hermes.jinja").read_text())
    chat_format = QwenFormat(template, tokenizer)
    self_test(chat_format, template)
    return chat_format


def read(
    hermes: QwenFormat, tokenizer: ChatTokenizer, chunks: Iterable[list[int]], cut: bool = False
) -> tuple[OutputParser, list[OutputEvent]]:
    number = count()
    end = frozenset({tokenizer.added[END]})
    parser = OutputParser(hermes, tokenizer, ParameterTypes([]), end, lambda kind: f"{kind}{next(number)}")
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    return parser, events + parser.finish(cut)


def feed(*pieces: str) -> tuple[JsonCallBody, str]:
    body = JsonCallBody()
    return body, "".join(body.feed(piece) for piece in pieces)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=9)
    | st.sampled_from(["\\", '"', "{", "}]", "</tool_call>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(max_size=5), values, max_size=4),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.data(),
)
def test_arguments_come_back_as_they_were_written(
    arguments: dict[str, Any], ascii_only: bool, name_first: bool, indent: int | None, data: st.DataObject
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    parts = ['"name": "f"', f'"arguments": {written}']
    text = "\n{" + ", ".join(parts if name_first else parts[::-1]) + "}\n"
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    body, streamed = feed(*[text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)])
    assert (body.done, body.error, body.name) == (True, None, "f")
    assert streamed == body.arguments == written
    assert body.raw == text


REFUSED = [
    ("nonsense", "the call is no JSON object"),
    ('{"name": "f", "arguments": {"a": 1}} more', "there is text after the call's object"),
    ('{"name": "f"}', "the arguments is missing"),
    ('{"arguments": {}}', "the name is missing"),
    ('{"name": "f", "arguments": "{}"}', "the arguments are no JSON object"),
    ('{"name": "f", "arguments": {"a": NaN}}', "NaN is not JSON"),
    ('{"name": "f", "arguments": {"a": "x\ny"}}', "the arguments are no JSON"),
    ('{"name": "f", "arguments": {"a": 1]}', "the arguments are no JSON"),
    ('{"name": "f", "name": "g"}', "unexpected key 'name'"),
    ('{"name": "f", "id": 1}', "unexpected key 'id'"),
    ('{"name": 5}', "the name is no text"),
    ('{"name": ""}', "the function has no name"),
    ('{"name": "' + "f" * 2000, "the function has no name"),
    ('{"name" "f"}', "not followed by a colon"),
    ("{name: f}", "the call's object is no JSON"),
    ('{"name": "f" "arguments": {}}', "the call's object is no JSON"),
    ('{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}", "the arguments are no JSON"),
]


@pytest.mark.parametrize(("text", "error"), REFUSED)
def test_what_is_no_call_is_refused_whole_and_in_pieces(text: str, error: str) -> None:
    pieces = [[text], [text[: len(text) // 2], text[len(text) // 2 :]]] + ([list(text)] if len(text) < 5000 else [])
    for chunks in pieces:
        body, streamed = feed(*chunks)
        assert body.error is not None
        assert error in body.error
        assert (body.done, body.raw) == (False, text)
        assert streamed == body.arguments


@pytest.mark.parametrize(
    "value",
    [
        "",
        'q"\\',
        "東京 😀",
        "a\nb",
        "</tool_call>",
        "<tool_call>",
        "</tool_call>\n<tool_call>",
        "<think>",
        "\\",
        "{",
        "}}",
    ],
)
@pytest.mark.parametrize("control", [True, False])
def test_nasty_values_come_back(hermes: QwenFormat, tokenizer: ChatTokenizer, value: str, control: bool) -> None:
    """The format's own tags inside a text, spelled by plain tokens and as control tokens, at every chunking."""
    written = json.dumps({"s": value}, ensure_ascii=False)
    inner = f'\n{{"name": "f", "arguments": {written}}}\n'
    middle = tokenizer.encode_control(inner) if control else tokenizer.encode_plain(inner)
    tags = [tokenizer.encode_control(tag) for tag in ("\n</think>\n\n<tool_call>", "</tool_call>" + END)]
    ids = [*tags[0], *middle, *tags[1]]
    whole, _ = read(hermes, tokenizer, [ids])
    parser, events = read(hermes, tokenizer, [[token] for token in ids])
    assert parser.items == whole.items
    [item] = parser.items
    assert isinstance(item, FunctionCallItem)
    assert (item.name, item.arguments, item.parse_error) == ("f", written, None)
    assert "".join(event.text for event in events if isinstance(event, Delta)) == written


def test_two_calls_beside_text(hermes: QwenFormat, tokenizer: ChatTokenizer) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    ids = list(tokenizer.encode_control(f"\n</think>\n\nLook.\n{call}\n{call}{END}"))
    parser, _ = read(hermes, tokenizer, [ids])
    assert [item.status for item in parser.items] == ["completed"] * 3  # type: ignore[union-attr]
    assert parser.items[0].text == "Look."  # type: ignore[union-attr]


def test_a_call_cut_at_every_token_is_incomplete_and_closed(hermes: QwenFormat, tokenizer: ChatTokenizer) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"city": "Kö\\"ln 😀"}}\n</tool_call>'
    start = list(tokenizer.encode_control("\n</think>\n\n"))
    call = list(tokenizer.encode_control(text))
    for length in range(1, len(call)):
        parser, events = read(hermes, tokenizer, [start + call[:length]], cut=True)
        [item] = parser.items
        assert isinstance(item, FunctionCallItem)
        assert (item.status, item.arguments, parser.cut) == ("incomplete", "{}", "call")
        assert item.parse_error == "the turn ends inside the call"
        streamed = "".join(event.text for event in events if isinstance(event, Delta))
        assert '{"city": "Kö\\"ln 😀"}'.startswith(streamed.replace("\ufffd", ""))
        assert hermes.closing("call") == "\n</tool_call><|im_end|>"
