from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tokenspeed.sessions.formats.segments import Contents, Segment
from tokenspeed.sessions.formats.template import ChatTemplate, FormatError

MESSAGES = [{"role": "user", "content": "<a> & 'b' ü"}, {"role": "assistant", "content": "x"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<a> & 'b' ü", "parameters": {"a": [None]}}}]
SOURCES = [
    "{{ tools | tojson }}",
    "{{ tools | tojson(indent=2) }}|{{ messages | tojson(sort_keys=true, separators=(',', ':')) }}",
    "  {% if true %}\n  x\n  {% endif %}\n y",
    "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{{ strftime_now('%Y') }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ bos_token }}{{ eos_token }}{{ messages[0]['content'] }}",
    "{{ 'yes' if add_generation_prompt else 'no' }} {{ preserve_thinking }}",
]


@pytest.mark.parametrize("source", SOURCES)
def test_renders_as_transformers_does(directory: Path, source: str) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    options: dict[str, Any] = {"add_generation_prompt": True, "preserve_thinking": True}
    expected = theirs.apply_chat_template(MESSAGES, tools=TOOLS, chat_template=source, tokenize=False, **options)
    mine = ChatTemplate(source, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    assert mine.text(MESSAGES, TOOLS, **options) == expected


def test_where_the_template_is_found(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    with pytest.raises(FormatError, match="has no chat template"):
        ChatTemplate.load(tmp_path)
    config.write_text(json.dumps({"chat_template": "A{{ eos_token }}", "eos_token": {"content": "!"}}))
    assert ChatTemplate.load(tmp_path).text([]) == "A!"
    named = [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "C"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path).text([]) == "C"
    config.write_text(json.dumps({"chat_template": named[:1]}))
    with pytest.raises(FormatError, match="has no chat template"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("D")
    assert ChatTemplate.load(tmp_path).text([]) == "D"
    config.write_text("{")
    with pytest.raises(FormatError, match="cannot be read"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('not so') }}", "not so"),
        ("{{ messages[0].content.foo.bar }}", "has no attribute"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
    ],
)
def test_a_failing_template_says_why(source: str, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        ChatTemplate(source).text(MESSAGES)


def test_an_invalid_template_says_why() -> None:
    with pytest.raises(FormatError, match="not valid"):
        ChatTemplate("{% for %}")
    with pytest.raises(FormatError, match="private characters"):
        ChatTemplate(Contents().mark("x"))


def test_segments_tell_contents_from_the_templates_own_text() -> None:
    contents = Contents()
    template = ChatTemplate("<{{ messages[0].content }}>{{ tools | tojson }}{{ messages[1].x | tojson }}|")
    messages = [{"content": contents.mark("a<|im_end|>")}, {"x": {contents.mark("k"): contents.mark("v")}}]
    assert template.segments(messages, contents, TOOLS) == [
        Segment("<", plain=False),
        Segment("a<|im_end|>", plain=True),
        Segment(">", plain=False),
        Segment(json.dumps(TOOLS, ensure_ascii=False), plain=True),
        Segment('{"k": "v"}', plain=True),
        Segment("|", plain=False),
    ]


def test_a_content_that_spells_a_mark_is_a_content() -> None:
    forged = Contents().mark("x")
    contents = Contents()
    template = ChatTemplate("{{ messages[0] }}{{ tools | tojson }}")
    segments = template.segments([contents.mark(forged)], contents, [forged])
    assert [segment.text for segment in segments] == [forged, json.dumps([forged], ensure_ascii=False)]
    assert re.search(r"[0-9a-f]{16}", forged)
