from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import count
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tokenspeed.client.protocol.items import FunctionCallItem, FunctionTool, Item, MessageItem, ReasoningItem
from tokenspeed.sessions.formats.arguments import ParameterTypes
from tokenspeed.sessions.formats.output import Delta, OutputEvent, OutputParser
from tokenspeed.sessions.formats.qwen import QwenFormat
from tokenspeed.sessions.tokenizer import ChatTokenizer

TOOL = FunctionTool(
    "f",
    parameters={
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "t": {"type": "string"},
            "i": {"type": "integer"},
            "o": {"type": "object"},
            "n": {"type": ["string", "null"]},
        },
    },
)
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<tool_response>"]
END = "<|im_end|>"


class Reader:
    """Makes parsers and runs them."""

    def __init__(self, chat_format: QwenFormat, tokenizer: ChatTokenizer) -> None:
        self.format = chat_format
        self.tokenizer = tokenizer

    def parser(self) -> OutputParser:
        number = count()
        stops = frozenset({self.tokenizer.added[END]})
        types = ParameterTypes([TOOL])
        return OutputParser(self.format, self.tokenizer, types, stops, lambda kind: f"{kind}{next(number)}")

    def run(self, chunks: Iterable[list[int]], cut: bool = False) -> tuple[OutputParser, list[OutputEvent]]:
        parser = self.parser()
        events = [event for chunk in chunks for event in parser.feed(chunk)]
        return parser, events + parser.finish(cut)

    def read(self, text: str, cut: bool = False) -> OutputParser:
        """Tags in `text` are control tokens."""
        return self.run([list(self.tokenizer.encode_control(text))], cut)[0]

    def ids(self, pieces: list[tuple[str, bool]]) -> list[int]:
        """Ids of pieces of text: `(text, control)`."""
        encode = {True: self.tokenizer.encode_control, False: self.tokenizer.encode_plain}
        return [token for text, control in pieces for token in encode[control](text)]


@pytest.fixture(scope="module")
def reader(chat_format: QwenFormat, tokenizer: ChatTokenizer) -> Reader:
    return Reader(chat_format, tokenizer)


def brief(items: list[Item]) -> list[Any]:
    """Items without their ids."""
    found: list[Any] = []
    for item in items:
        if isinstance(item, FunctionCallItem):
            found.append((item.name, item.arguments) if item.parse_error is None else (item.parse_error, item.raw))
        else:
            assert isinstance(item, MessageItem | ReasoningItem)
            found.append(("r:" if isinstance(item, ReasoningItem) else "") + item.text)
    return found


def call(**values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


READINGS: list[tuple[str, list[Any]]] = [
    ("\n</think>\n\nHi<|im_end|>", ["Hi"]),
    ("why\n</think>\n\nHi\n<|im_end|>", ["r:why", "Hi\n"]),
    ("\nwhy\n\n</think>\n\n\nHi<|im_end|>", ["r:\nwhy\n", "\nHi"]),
    ("why</think>Hi<|im_end|>", ["r:why", "Hi"]),
    ("why\n</think>\n\n \n<|im_end|>", ["r:why"]),
    ("why<|im_end|>", ["r:why"]),
    (f"\n</think>\n\n{call()}<|im_end|>", [("f", "{}")]),
    (f"\n</think>\n\nA\n{call(s='1', i='1')}\n{call(i='x', s='')}<|im_end|>",
     ["A", ("f", '{"s": "1", "i": 1}'), ("f", '{"i": "x", "s": ""}')]),
    (f"\n</think>\n\nA\n\n\n{call()}<|im_end|>", ["A\n\n", ("f", "{}")]),
    (f"\n</think>\n\n{call()}\nB<|im_end|>", [("f", "{}"), "B"]),
    (f"\n</think>\n\n{call(n='null', o='[1]', x='2')}<|im_end|>", [("f", '{"n": null, "o": "[1]", "x": "2"}')]),
    ("\n</think>\n\n<tool_call><function=f><parameter=s>v</parameter></function></tool_call>", [("f", '{"s": "v"}')]),
    ("\n</think>\n\na <think>\nb\n</think>\n\nc<|im_end|>", ["a ", "r:b", "c"]),
    ("a <tool_call> b <think> c\n</think>\n\nd </think> e </tool_call><|im_end|>",
     ["r:a <tool_call> b <think> c", "d </think> e </tool_call>"]),
    ("\n</think>\n\n<tool_call>\nnonsense\n</tool_call>\nB<|im_end|>",
     [("<function= is missing", "\nnonsense\n"), "B"]),
    ("\n</think>\n\n<tool_call>\n<function=f>\nx</tool_call><|im_end|>",
     [("<parameter= or </function> is missing", "\n<function=f>\nx")]),
    ("\n</think>\n\n<tool_call>\n<function=>\n</function>\n</tool_call><|im_end|>",
     [("a function or parameter has no name", "\n<function=>\n</function>\n")]),
    ("\n</think>\n\n<tool_call>\n<function=f>\n</tool_call><|im_end|>",
     [("the call ends before </function>", "\n<function=f>\n")]),
    ("\n</think>\n\n<tool_call>\n<function=f>\n</function>\n<|im_end|>",
     [("the turn ends inside the call", "\n<function=f>\n</function>\n")]),
    ("\n</think>\n\n<tool_call>\n<function=f>\n</function>\nmore\n</tool_call><|im_end|>",
     [("there is text after </function>", "\n<function=f>\n</function>\nmore\n")]),
    ("\n</think>\n\n<tool_call>\n<function=f>\n<parameter=s>\n1\n</parameter>\n<parameter=s>\n2\n</parameter>\n"
     "</function>\n</tool_call><|im_end|>",
     [("parameter 's' is given twice", "\n<function=f>\n<parameter=s>\n1\n</parameter>\n<parameter=s>\n2\n"
       "</parameter>\n</function>\n")]),
    ("\n</think>\n\n<tool_call>\n<function=f>\n<parameter=s>\nv</tool_call>\n" + call() + END,
     [("the call ends before </function>", "\n<function=f>\n<parameter=s>\nv"), ("f", "{}")]),
    ("\n</think>\n\n<tool_call>\n<function=f>\n<parameter=s>\nv</tool_call><|im_end|>",
     [("the call ends before </function>", "\n<function=f>\n<parameter=s>\nv")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), READINGS)
def test_readings(reader: Reader, text: str, expected: list[Any]) -> None:
    parser = reader.read(text)
    assert brief(parser.items) == expected
    assert parser.cut == ("reasoning" if text == "why<|im_end|>" else "call" if "turn ends" in str(expected) else None)


@pytest.mark.parametrize(
    "value",
    ["", "\n", "\n\n", " x ", 'q"\\', "東京 😀", "a\n</parameter>\nb", "</parameter>", "</function>", "<parameter=t>",
     "</parameter", "</tool_call>", "<tool_call>", "</tool_call></tool_call>", "<think>\n</think>", "<|im_start|>",
     "a\n</function>\n</tool_call>\nb", "x</parameter>\n", "\n<function=g>\n", "</tool_call>\n"],
)  # fmt: skip
@pytest.mark.parametrize("control", [True, False])
def test_nasty_values_come_back(reader: Reader, value: str, control: bool) -> None:
    """The format's own tags in a value, spelled by plain tokens and as control tokens."""
    start, end = "<tool_call>\n<function=f>\n<parameter=s>\n", "\n</parameter>\n</function>\n</tool_call>"
    ids = reader.ids([("\n</think>\n\n" + start, True), (value, control), (end, True), (END, True)])
    parser, _ = reader.run([ids])
    assert len(parser.items) == 1
    item = parser.items[0]
    assert isinstance(item, FunctionCallItem)
    assert json.loads(item.arguments) == {"s": value}
    assert (item.status, item.parse_error, item.raw) == ("completed", None, None)


def test_what_the_format_cannot_carry_is_an_error_with_everything_in_it(reader: Reader) -> None:
    value = "a\n</parameter>\n</function>\nb"
    item = reader.read(f"\n</think>\n\n{call(s=value)}<|im_end|>").items[0]
    assert isinstance(item, FunctionCallItem)
    assert (item.status, item.arguments) == ("incomplete", "{}")
    assert item.parse_error == "there is text after </function>"
    assert item.raw == f"\n<function=f>\n<parameter=s>\n{value}\n</parameter>\n</function>\n"


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.lists(
    st.sampled_from(
        ["a", "\n", " ", "東", "😀", '"', "<", ">", *TAGS, "<function=", "</function>", "<parameter=", "</parameter>"]
    ),
    max_size=8,
).map("".join)


def carried(value: str) -> bool:
    return not re.search(r"</parameter>\s*(<parameter=|</function>)", value)


@given(texts, texts, st.lists(st.dictionaries(st.sampled_from("st"), texts, max_size=2), max_size=2), st.data())
def test_what_the_model_says_comes_back_at_any_chunking(
    reader: Reader, thought: str, said: str, calls: list[dict[str, str]], data: st.DataObject
) -> None:
    """The model writes tags inside its texts by plain tokens; reading is byte for byte."""
    assume(all(carried(value) for values in calls for value in values.values()))
    pieces = [(thought, False), ("\n</think>\n\n", True), (said, False)]
    for place, values in enumerate(calls):
        pieces.append((("\n" if said or place else "") + "<tool_call>\n<function=f>\n", True))
        for key, value in values.items():
            pieces += [(f"<parameter={key}>\n", True), (value, False), ("\n</parameter>\n", True)]
        pieces.append(("</function>\n</tool_call>", True))
    ids = reader.ids([*pieces, (END, True)])
    expected: list[Any] = ["r:" + thought] if thought.strip() else []
    expected += [said] if said.strip() else []
    parser, events = reader.run(split(ids, data))
    found = brief(parser.items)
    assert found[: len(expected)] == expected
    assert [json.loads(arguments) for _, arguments in found[len(expected) :]] == calls
    check_stream(parser.items, events)


def split(ids: list[int], data: st.DataObject) -> list[list[int]]:
    places = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=6)))
    return [ids[start:end] for start, end in zip([0, *places], [*places, len(ids)], strict=True)]


def check_stream(items: list[Item], events: list[OutputEvent]) -> None:
    """Deltas concatenate to the finished items, in order; none is empty; only a call's first bears its name."""
    streamed: dict[int, str] = {}
    finished = 0
    for event in events:
        if isinstance(event, Delta):
            assert event.text
            assert event.item == finished
            item = items[event.item]
            if isinstance(item, FunctionCallItem):
                first = event.item not in streamed
                assert (event.name, event.call_id) == ((item.name, item.call_id) if first else (None, None))
            streamed[event.item] = streamed.get(event.item, "") + event.text
        else:
            assert event.index == finished
            assert event.item is items[finished]
            finished += 1
    assert finished == len(items)
    for place, item in enumerate(items):
        if not isinstance(item, FunctionCallItem):
            assert isinstance(item, MessageItem | ReasoningItem)
            assert streamed[place] == item.text
        elif item.parse_error is None:
            assert streamed[place] == item.arguments


wild = st.lists(
    st.sampled_from(
        [
            *TAGS,
            *TAGS,
            "\n",
            "\n\n",
            "a",
            " ",
            "\n<function=f>\n",
            "<parameter=s>\n",
            "<parameter=i>\n5",
            "\n</parameter>\n",
            "</function>\n",
        ]
    )
    | st.integers(0, 3070),
    max_size=30,
)


@given(wild, st.booleans(), st.data())
def test_any_output_reads_the_same_in_one_piece_and_in_many(
    reader: Reader, pieces: list[str | int], cut: bool, data: st.DataObject
) -> None:
    ids: list[int] = []
    for piece in pieces:
        ids += reader.tokenizer.encode_control(piece) if isinstance(piece, str) else [piece]
    whole, whole_events = reader.run([ids], cut)
    parser, events = reader.run(split(ids, data), cut)
    check_stream(parser.items, events)
    check_stream(whole.items, whole_events)
    assert parser.items == whole.items
    assert (parser.hidden, parser.cut, parser.reasoning_tokens) == (whole.hidden, whole.cut, whole.reasoning_tokens)
    for (start, end), (after, _) in zip(parser.hidden, [*parser.hidden[1:], (len(ids), 0)], strict=True):
        assert start < end <= after or start == end == len(ids)


def test_every_prefix_of_a_call_is_honest(reader: Reader) -> None:
    """Cut after each token: whatever was sampled of the call is in its raw text, and it is never called complete."""
    head, body = (
        "\n</think>\n\n<tool_call>",
        call(s='Köln "a"\n</parameter>', i="12", o='{"a": 1}')[len("<tool_call>") :],
    )
    start, ids = reader.ids([(head, True)]), reader.ids([(body, True)])
    for length in range(len(ids)):
        parser, events = reader.run([start + ids[:length]], cut=True)
        item = parser.items[-1]
        assert isinstance(item, FunctionCallItem)
        assert (item.status, item.arguments, parser.cut) == ("incomplete", "{}", "call")
        assert item.raw == reader.tokenizer.decode(ids[:length])
        assert item.parse_error == "the turn ends inside the call"
        check_stream(parser.items, events)
    parser, _ = reader.run([start + ids], cut=True)
    assert parser.items[-1].status == "completed"  # type: ignore[union-attr]
    assert parser.cut is None


def test_a_cut_text_keeps_what_came(reader: Reader) -> None:
    for text, expected in [("th\n", ["r:th\n"]), ("t\n</think>\n\nabc\n", ["r:t", "abc\n"])]:
        parser = reader.read(text, cut=True)
        assert brief(parser.items) == expected
        assert parser.items[-1].status == "incomplete"  # type: ignore[union-attr]


def test_reasoning_is_counted_and_marked(reader: Reader) -> None:
    ids = reader.ids([("why\n</think>\n\nHi", True), (END, True)])
    parser, _ = reader.run([ids])
    thought = reader.ids([("why\n</think>", True)])
    assert parser.reasoning_tokens == len(thought)
    assert parser.hidden == [(0, len(reader.ids([("why\n</think>\n\n", True)])))]


def test_a_long_value_streams_in_linear_time(reader: Reader) -> None:
    """60 KB with tag beginnings everywhere; pieces stay small, so no buffer is scanned again and again."""
    value = "x</param\n<" * 6_000
    ids = reader.ids([("\n</think>\n\n" + call(s=value) + END, True)])
    parser = reader.parser()
    longest = 0
    for token in ids:
        parser.feed([token])
        if parser._body is not None:
            longest = max(longest, len(parser._body._buffer))
    parser.finish(cut=False)
    assert json.loads(parser.items[0].arguments) == {"s": value}  # type: ignore[union-attr]
    assert longest < 40
