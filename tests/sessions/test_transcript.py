"""Prompts built turn by turn are the template's own rendering of the whole conversation."""

from __future__ import annotations

import json
from array import array
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.client.protocol.commands import Sampling
from tokenspeed.client.protocol.events import Timings, Usage
from tokenspeed.client.protocol.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionTool,
    InputItem,
    MessageItem,
)
from tokenspeed.sessions.defaults import Defaults
from tokenspeed.sessions.formats.arguments import ParameterTypes
from tokenspeed.sessions.formats.calls import JSON
from tokenspeed.sessions.formats.output import OutputParser
from tokenspeed.sessions.formats.qwen import QwenFormat
from tokenspeed.sessions.formats.selftest import self_test
from tokenspeed.sessions.formats.template import ChatTemplate
from tokenspeed.sessions.tokenizer import ChatTokenizer
from tokenspeed.sessions.transcript import Transcript
from tokenspeed.sessions.turn import Turn

WEATHER = FunctionTool(
    name="weather",
    description='Weather of a "city" <now> & soon',
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "opts": {"type": "object"}},
        "required": ["city"],
        "$defs": {"nested": {"enum": ["ü", None, 1.5, {"deep": [[]]}]}},
    },
)
TOOLS = {"none": [], "one": [WEATHER], "two": [WEATHER, FunctionTool(name="clock")]}


class Conversation:
    """A session's turns with the model's answers given, beside the messages that the template is asked to render."""

    def __init__(
        self, source: str, tokenizer: ChatTokenizer, system: str | None, tools: list[FunctionTool], rule: str
    ) -> None:
        self.template = ChatTemplate(source)
        self.format = QwenFormat(self.template, tokenizer)
        self.tokenizer = tokenizer
        self.transcript = Transcript(self.format, tokenizer)
        self.preamble = self.transcript.preamble(system, tools)
        self.tools = [
            {
                "type": "function",
                "function": {"name": tool.name}
                | ({"description": tool.description} if tool.description else {})
                | {"parameters": tool.parameters},
            }
            for tool in tools
        ]
        self.types = ParameterTypes(tools)
        self.rule = rule
        self.messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self.head: Turn | None = None
        self.ids = count()

    def take(self, items: list[InputItem], answer: dict[str, Any], text: str | None = None) -> Turn:
        """One turn; `text` is what the model samples where that is not the whole `answer`."""
        for item in items:
            if isinstance(item, FunctionCallOutputItem):
                self.messages.append({"role": "tool", "content": item.text})
            else:
                self.messages.append({"role": item.role, "content": item.text})
        prompt = self.transcript.prompt(self.preamble, self.rule, self.head, items)
        self.check(prompt.ids())
        output = self.tokenizer.encode_control(self.sampled(answer) if text is None else text)
        end = frozenset({self.tokenizer.added["<|im_end|>"]})
        parser = OutputParser(self.format, self.tokenizer, self.types, end, lambda kind: f"{kind}_{next(self.ids)}")
        parser.feed(output)
        parser.finish(cut=text is not None)
        self.messages.append({"role": "assistant"} | answer)
        reason = "tool_calls" if answer.get("tool_calls") else "stop"
        previous, self.head = (
            self.head,
            Turn(
                id=f"turn_{next(self.ids)}",
                parent=self.head,
                prompt=prompt,
                input=items,
                output=parser.items,
                output_ids=output,
                hidden=tuple(parser.hidden),
                cut=parser.cut,
                status="completed",
                reason=reason,
                usage=Usage(),
                timings=Timings(),
                defaults=Defaults(self.preamble.system, [], Sampling(), "keep", {}, self.preamble, self.types),
            ),
        )
        self.check_positions(previous, items)
        return self.head

    def sampled(self, answer: dict[str, Any]) -> str:
        text = answer["reasoning_content"] + "\n</think>\n\n" + answer["content"]
        for place, call in enumerate(answer.get("tool_calls", [])):
            text += ("" if not answer["content"] else self.format.call_separator) if place == 0 else "\n"
            if self.format.calls is JSON:
                text += f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
                continue
            text += f"<tool_call>\n<function={call['function']['name']}>\n"
            for key, value in call["function"]["arguments"].items():
                value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                text += f"<parameter={key}>\n{value}\n</parameter>\n"
            text += "</function>\n</tool_call>"
        return text + "<|im_end|>"

    def check(self, ids: array[int]) -> None:
        options = {"preserve_thinking": True} if self.rule == "keep" else {}
        expected = self.template.text(self.messages, self.tools, add_generation_prompt=True, **options)
        assert self.tokenizer.decode(ids) == expected

    def check_positions(self, previous: Turn | None, items: list[InputItem]) -> None:
        assert self.head is not None
        prompt, ids = self.head.prompt, self.head.ids()
        user = any(isinstance(item, MessageItem) and item.role == "user" for item in items)
        if previous is not None and not (self.rule == "drop" and user):
            assert ids[: previous.length] == previous.ids()
            assert prompt.base is previous
            assert prompt.keep == previous.length
        decode = self.tokenizer.decode
        assert decode(ids[: prompt.input_end]).endswith("<|im_end|>\n")
        assert decode(ids[prompt.input_end : prompt.length]) == "<|im_start|>assistant\n<think>\n"
        assert ids[: prompt.preamble_end] == self.preamble.ids
        expected = {prompt.preamble_end, prompt.input_end} | (
            {prompt.keep} if self.rule == "drop" and previous and user else set()
        )
        assert prompt.marks == tuple(sorted(expected - {0}))

    def outputs(self, *texts: str) -> list[InputItem]:
        assert self.head is not None
        calls = [item for item in self.head.output if isinstance(item, FunctionCallItem)]
        return [FunctionCallOutputItem(call.call_id, text) for call, text in zip(calls, texts, strict=True)]


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": arguments}}


def user(text: str) -> list[InputItem]:
    return [MessageItem("user", text)]


@pytest.fixture(params=["pocket", "plainer", "hermes"])
def source(request: pytest.FixtureRequest, directory: Path) -> str:
    own = Path(__file__).parent / f"{request.param}.jinja"
    return (directory / "chat_template.jinja" if request.param == "pocket" else own).read_text()


@pytest.mark.parametrize("rule", ["keep", "drop"])
@pytest.mark.parametrize("tools", ["none", "one", "two"])
@pytest.mark.parametrize("system", [None, "Be brief.", "  Two\nlines \n"])
def test_a_conversation_turn_by_turn(
    source: str, tokenizer: ChatTokenizer, system: str | None, tools: str, rule: str
) -> None:
    talk = Conversation(source, tokenizer, system, TOOLS[tools], rule)
    self_test(talk.format, talk.template)
    talk.take(
        user("Weather in Köln & <b>Bonn</b>?"),
        {
            "reasoning_content": "Two calls.\n\nIn one go 😀",
            "content": "Looking both up.",
            "tool_calls": [call(city="Köln", days=2, opts={"a": [1, None]}), call(city='Bonn "am\n\nRhein"')],
        },
    )
    talk.take(
        talk.outputs("rain\nand more", '{"sun": "<1 h"}'),
        {
            "reasoning_content": "One more.",
            "content": "",
            "tool_calls": [call()],
        },
    )
    talk.take(talk.outputs("東京"), {"reasoning_content": "", "content": "Rain in Köln.\n\nNone in Bonn."})
    talk.take(user(" Thanks \n"), {"reasoning_content": "Polite.", "content": "You're welcome."})
    talk.take(user("Again?"), {"reasoning_content": "r", "content": "a", "tool_calls": [call(city="x")]})
    talk.take([*talk.outputs("y"), *user("and?")], {"reasoning_content": "q", "content": "done"})
    talk.take(user("end"), {"reasoning_content": "", "content": "bye"})


def test_a_later_input_opens_a_new_block(source: str, tokenizer: ChatTokenizer) -> None:
    talk = Conversation(source, tokenizer, None, [WEATHER], "keep")
    calls = {"reasoning_content": "r", "content": "", "tool_calls": [call(city="a"), call(city="b")]}
    talk.take(user("go"), calls)
    second = talk.take(talk.outputs("1", "2"), calls)
    text = tokenizer.decode(second.prompt.input_ids)
    assert text.count("<|im_start|>user") == 1
    assert text.count("<tool_response>") == 2
    third = talk.take(talk.outputs("3", "4"), calls)
    assert tokenizer.decode(third.ids()).count("<|im_start|>user\n<tool_response>") == 2


def test_messages_brought_along(directory: Path, tokenizer: ChatTokenizer) -> None:
    source = (directory / "chat_template.jinja").read_text()
    talk = Conversation(source, tokenizer, None, [], "keep")
    prompt = talk.transcript.prompt(talk.preamble, "keep", None, [
        MessageItem("developer", "Own system"), MessageItem("user", "q"), MessageItem("assistant", "a"),
        MessageItem("user", "r"),
    ])  # fmt: skip
    assert tokenizer.decode(prompt.ids()) == (
        "<|im_start|>system\nOwn system<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n"
        "</think>\n\na<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert tokenizer.decode(prompt.ids()[: prompt.preamble_end]) == "<|im_start|>system\nOwn system<|im_end|>\n"


def test_dropping_reuses_the_sampled_ids(directory: Path, tokenizer: ChatTokenizer) -> None:
    """The answer was sampled as other ids than its text encodes to; those very ids stay."""
    talk = Conversation((directory / "chat_template.jinja").read_text(), tokenizer, None, [], "drop")
    first = talk.take(user("q"), {"reasoning_content": "r", "content": "hello"})
    letters = [token for letter in "hello" for token in tokenizer.encode_plain(letter)]
    assert letters != list(tokenizer.encode_plain("hello"))
    odd = array("i", [*tokenizer.encode_control("r\n</think>\n\n"), *letters, tokenizer.added["<|im_end|>"]])
    object.__setattr__(first, "output_ids", odd)
    object.__setattr__(first, "hidden", ((0, len(tokenizer.encode_control("r\n</think>\n\n"))),))
    prompt = talk.transcript.prompt(talk.preamble, "drop", first, user("next"))
    assert prompt.base is first
    assert prompt.keep == first.prompt.input_end
    opening = list(tokenizer.encode_control("<|im_start|>assistant\n"))
    assert list(prompt.fresh)[: len(opening) + 6] == [*opening, *letters, tokenizer.added["<|im_end|>"]]


CUTS = [
    ("", "\n</think>\n\n<|im_end|>", "<|im_end|>"),
    ("thinking", "\n</think>\n\n<|im_end|>", "<|im_end|>"),
    ("r\n</think>\n\nhalf a sen", "<|im_end|>", "half a sen<|im_end|>"),
    ("r\n</think>\n\n<tool_call>\n<function=wea", "\n</tool_call><|im_end|>",
     "<tool_call>\n<function=wea\n</tool_call><|im_end|>"),
    ("r\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nKö", "\n</tool_call><|im_end|>",
     "<tool_call>\n<function=weather>\n<parameter=city>\nKö\n</tool_call><|im_end|>"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "closing", "visible"), CUTS)
@pytest.mark.parametrize("rule", ["keep", "drop"])
def test_a_turn_cut_short_is_closed_by_stated_tokens(
    directory: Path, tokenizer: ChatTokenizer, text: str, closing: str, visible: str, rule: str
) -> None:
    talk = Conversation((directory / "chat_template.jinja").read_text(), tokenizer, None, [WEATHER], rule)
    head = talk.take(user("q"), {"reasoning_content": "", "content": ""}, text=text)
    prompt = talk.transcript.prompt(talk.preamble, rule, head, user("next"))
    written = tokenizer.decode(prompt.ids())
    suffix = "\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n<think>\n"
    if rule == "keep":
        assert prompt.ids()[: head.length] == head.ids()
        assert written == tokenizer.decode(head.ids()) + closing + suffix
    else:
        before = tokenizer.decode(head.ids()[: head.prompt.input_end])
        assert written == before + "<|im_start|>assistant\n" + visible + suffix


def test_control_tokens_come_only_from_the_format(source: str, tokenizer: ChatTokenizer) -> None:
    """Every added token in every place that people and tools write to."""

    def controls(word: str) -> list[int]:
        tool = FunctionTool(name=word, description=word, parameters={word: [word], "enum": {"a": word}})
        talk = Conversation(source, tokenizer, word, [tool], "keep")
        answer = {"reasoning_content": "r", "content": "", "tool_calls": [call(city="x")]}
        talk.take(user(f"a {word} b"), answer)
        talk.take([*talk.outputs(word), *user(word + word)], {"reasoning_content": "", "content": "z"})
        assert talk.head is not None
        return [token for token in talk.head.ids() if token in added]

    added = set(tokenizer.added.values())
    expected = controls("harmless")
    for word in tokenizer.added:
        assert controls(word) == expected
