"""Templates that are refused at start, each with its reason; what is derived from the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenspeed.sessions.formats.calls import JSON, XML
from tokenspeed.sessions.formats.qwen import QwenFormat
from tokenspeed.sessions.formats.selftest import self_test
from tokenspeed.sessions.formats.template import ChatTemplate, FormatError
from tokenspeed.sessions.tokenizer import ChatTokenizer

PLAINER = (Path(__file__).parents[1] / "plainer.jinja").read_text()


def start(source: str, tokenizer: ChatTokenizer) -> QwenFormat:
    template = ChatTemplate(source)
    chat_format = QwenFormat(template, tokenizer)
    self_test(chat_format, template)
    return chat_format


def changed(old: str, new: str) -> str:
    assert PLAINER.count(old) == 1
    return PLAINER.replace(old, new)


HERMES = (Path(__file__).parents[1] / "hermes.jinja").read_text()


def hermes(old: str, new: str) -> str:
    assert HERMES.count(old) == 1
    return HERMES.replace(old, new)


UNTHINKING = HERMES.replace("{{- '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' -}}", "").replace(
    "assistant\\n<think>\\n'", "assistant\\n'"
)


def test_what_is_derived(chat_format: QwenFormat, tokenizer: ChatTokenizer) -> None:
    assert chat_format.end_of_turn == "<|im_end|>"
    assert chat_format.generation_prompt == "<|im_start|>assistant\n<think>\n"
    assert chat_format.visible_opening == "<|im_start|>assistant\n"
    assert (chat_format.call_separator, start(PLAINER, tokenizer).call_separator) == ("\n", "\n\n")
    assert (chat_format.calls, start(PLAINER, tokenizer).calls, start(HERMES, tokenizer).calls) == (XML, XML, JSON)


@pytest.mark.parametrize(
    "written",
    [
        "'<tool_call>\\n' ~ call | tojson ~ '\\n</tool_call>'",
        "'<tool_call>' ~ call | tojson(indent=1) ~ '</tool_call>'",
    ],
)
def test_json_calls_are_known_however_they_are_spaced(tokenizer: ChatTokenizer, written: str) -> None:
    old = (
        """'<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' ~ call.arguments | tojson ~ '}\\n</tool_call>'"""
    )
    assert start(hermes(old, written), tokenizer).calls is JSON


def test_a_template_that_knows_no_reasoning_needs_no_tags_of_it(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "think>" not in UNTHINKING.split("generation_prompt")[1]
    for tag in ("<think>", "</think>"):
        monkeypatch.delitem(tokenizer.added, tag)
    chat_format = start(UNTHINKING, tokenizer)
    assert (chat_format.thinks, chat_format.calls, chat_format.generation_prompt) == (
        False,
        JSON,
        "<|im_start|>assistant\n",
    )
    monkeypatch.delitem(tokenizer.added, "<tool_call>")
    with pytest.raises(FormatError, match="no added token <tool_call>"):
        start(UNTHINKING, tokenizer)


REFUSALS = [
    (hermes('"arguments": \'', '"parameters": \''), "does not write calls as"),
    (hermes("call.arguments | tojson", "call.arguments"), "does not write calls as"),
    (hermes("'<tool_call>\\n{", "'<tool_call>\\nCall: {"), "does not write calls as"),
    (hermes("~ call.arguments | tojson ~", "~ call.arguments | tojson | upper ~"), "does not write calls as"),
    ("{% if %}", "not valid"),
    ("{{ messages | tojson }}", "does not write the user text exactly once|changes the user text"),
    (changed("'\\n<tool_response>\\n' ~ content ~", "'\\n<tool_response>\\n' ~ content ~ message.content | length ~"),
     "changes the tool text in an unknown way"),
    ("{{ raise_exception('only on Sundays') }}", "only on Sundays"),
    ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
     "no generation prompt of its own"),
    ("static", "does not write the user text exactly once"),
    (changed("'<|im_start|>user\\n' ~ content ~", "'<|im_start|>user\\n' ~ content | upper ~"), "user text"),
    (changed("'\\n<tool_response>\\n' ~ content ~", "'\\n<tool_response>\\n' ~ content | replace('\\n', ' ') ~"),
     "does not write the tool text exactly once"),
    (changed("'<tool_call>\\n<function=' ~", "'<call>\\n<function=' ~"), "does not write calls as"),
    (changed("'<tool_call>\\n<function=' ~", "'and <tool_call>\\n<function=' ~"), "more than newlines"),
    (changed("tool | tojson(indent=2) ~ '\\n'", "tool.function.name ~ '\\n'"), "another way than as JSON"),
    (changed("{%- if add_generation_prompt -%}", "{%- if false -%}"), "no generation prompt"),
    (changed("{{- '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' -}}", "{{- '<think>' ~ thought ~ '</think>' -}}"),
     "opens past answers in another way"),
    (changed("~ '\\n</think>\\n\\n' -}}", "~ '\\n</think>\\n' -}}"), "does not write reasoning as"),
    (changed("'<|im_start|>user\\n' ~ content ~ '<|im_end|>\\n'",
             "'<|im_start|>user\\n' ~ (loop.index0 if loop.index0 > 3 else '') ~ content ~ '<|im_end|>\\n'"),
     "than its messages one by one"),
    (changed("~ '<|im_end|>\\n' -}}\n    {%- elif message.role == 'assistant'",
             "~ '\\n' -}}\n    {%- elif message.role == 'assistant'"), "control token"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "reason"), REFUSALS)
def test_a_template_of_another_kind_is_refused_with_the_reason(
    source: str, reason: str, tokenizer: ChatTokenizer
) -> None:
    with pytest.raises(FormatError, match=reason):
        start(source, tokenizer)


def test_a_tokenizer_without_the_tags_is_refused(tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(tokenizer.added, "</think>")
    with pytest.raises(FormatError, match="no added token </think>"):
        start(PLAINER, tokenizer)


def test_an_older_template_that_cannot_keep_reasoning_is_served(tokenizer: ChatTokenizer) -> None:
    chat_format = start(changed("preserve_thinking is true or ", ""), tokenizer)
    assert chat_format.visible_opening == "<|im_start|>assistant\n"


def test_a_template_that_keeps_all_reasoning_knows_no_drop(tokenizer: ChatTokenizer) -> None:
    assert (
        start(changed("preserve_thinking is true or loop.index0 > ns.last", "true"), tokenizer).visible_opening is None
    )


def test_a_template_that_does_not_think_by_itself(tokenizer: ChatTokenizer) -> None:
    chat_format = start(
        changed("assistant\\n<think>\\n' -}}\n{%- endif", "assistant\\n<think>\\n\\n</think>\\n\\n' -}}\n{%- endif"),
        tokenizer,
    )
    assert not chat_format.thinks
    assert chat_format.generation_prompt.endswith("<think>\n\n</think>\n\n")
