"""The ChatML kind of chat format that Qwen models use, its literals derived from the checkpoint's template.

    preamble | input | generation prompt | answer (sampled) | input | generation prompt | answer | …

The preamble is the system text and the tools; an input begins right after the end-of-turn token of the answer before
it. Nothing rendered once is ever rendered again: a rendering depends only on its own messages.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import repeat
from typing import Any, Literal

from tokenspeed.sessions.formats.calls import CALL_FORMATS, CallFormat
from tokenspeed.sessions.formats.probing import Trim, find_trim
from tokenspeed.sessions.formats.segments import Contents, Segment, cut, joined
from tokenspeed.sessions.formats.template import ChatTemplate, FormatError, Message
from tokenspeed.sessions.tokenizer import ChatTokenizer

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"

CLOSE_REASONING = "\n</think>\n\n"
"""Closes a turn cut inside its reasoning: what the template itself writes after reasoning."""

CLOSE_CALL = "\n</tool_call>"
"""Closes a turn cut inside a call. The parameter and the function stay open, so that the model reads a call that was
cut and not a finished call with a shortened value."""

Cut = Literal["reasoning", "call"]
"""Inside what a turn's output stopped."""

_TEXTS = ("user", "tool", "system", "assistant")


class QwenFormat:
    """Renders preambles, inputs and closings to segments.

    Attributes:
        end_of_turn: the control token that ends every message.
        generation_prompt: what opens an answer; `thinks` says whether it leaves a reasoning block open.
        visible_opening: what opens an answer of the past without its reasoning, or None where the template keeps all
            reasoning and so knows no `drop`.
        calls: how calls are written.
        call_separator: what stands between an answer's text and its first call, before `<tool_call>`.
    """

    def __init__(self, template: ChatTemplate, tokenizer: ChatTokenizer) -> None:
        """Raises: FormatError, with the reason, for a template of another kind."""
        self._template = template
        self._trims: dict[str, Trim] = {}
        for name in _TEXTS:
            self._trims[name] = find_trim(partial(_probe, template, name), name)
        if _THOUGHT in _probe(template, "reasoning", _THOUGHT):
            self._trims["reasoning"] = find_trim(partial(_probe, template, "reasoning"), "reasoning")
        else:
            self._trims["reasoning"] = lambda text: ""
        self._derive(tokenizer)
        tags = (THINK_OPEN, THINK_CLOSE) if self.thinks else ()
        for tag in (*tags, CALL_OPEN, CALL_CLOSE):
            if tag not in tokenizer.added:
                raise FormatError(f"the tokenizer has no added token {tag}, which the chat format needs")

    @property
    def thinks(self) -> bool:
        return self.generation_prompt.rstrip("\n").endswith(THINK_OPEN)

    def preamble(self, system: str | None, tools: list[Any]) -> list[Segment]:
        """System text and tools, as they stand before every first message."""
        contents = Contents()
        messages = self._marked(_system(system), contents)
        rendered = self._template.segments([*messages, self._stand_in(contents)], contents, tools)
        opening = self._user_opening + _STAND_IN + self._user_closing
        text = joined(rendered)
        if not text.endswith(opening):
            raise FormatError("the chat template does not write the first message as it writes the others")
        return cut(rendered, len(text) - len(opening))[0]

    def first_input(
        self, system: str | None, tools: list[Any], messages: list[Message], keep_reasoning: bool
    ) -> list[Segment]:
        """A conversation's first messages, from the preamble's end to the generation prompt."""
        contents = Contents()
        marked = self._marked([*_system(system), *messages], contents)
        rendered = self._template.segments(
            marked, contents, tools, add_generation_prompt=True, preserve_thinking=keep_reasoning
        )
        preamble = joined(self.preamble(system, tools))
        if not joined(rendered).startswith(preamble):
            raise FormatError("the chat template writes another preamble for these messages")
        return self._without_generation_prompt(cut(rendered, len(preamble))[1])

    def next_input(self, messages: list[Message], keep_reasoning: bool, after_input: bool = False) -> list[Segment]:
        """Messages after an answer, from its end-of-turn token to the generation prompt; `after_input`: after an input
        that stands whole, without what closes an answer."""
        contents = Contents()
        calls = messages[0]["role"] == "tool"
        opening = self._stand_in_answer(contents, calls)
        marked = [*opening, *self._marked(messages, contents)]
        rendered = self._template.segments(
            marked, contents, add_generation_prompt=True, preserve_thinking=keep_reasoning
        )
        plain = [place for place, segment in enumerate(rendered) if segment.plain]
        last = plain[self._answer_contents[calls] - 1]
        start = len(joined(rendered[: last + 1]))
        start += rendered[last + 1].text.index(self.end_of_turn) + len(self.end_of_turn)
        rest = self._user_closing.removeprefix(self.end_of_turn) if after_input else ""
        if not joined(rendered)[start:].startswith(rest):
            raise FormatError("the chat template closes an answer in another way than a user's message")
        start += len(rest)
        return self._without_generation_prompt(cut(rendered, start)[1])

    def answer(self, message: Message) -> list[Segment]:
        """An answer as the model would write it, from the generation prompt to its end-of-turn token."""
        contents = Contents()
        marked = [self._stand_in(contents), *self._marked([message], contents)]
        rendered = self._template.segments(marked, contents, preserve_thinking=True)
        opening = self._user_opening + _STAND_IN + self._user_closing + self.generation_prompt
        text = joined(rendered)
        start, end = text.find(opening) + len(opening), text.rfind(self.end_of_turn) + len(self.end_of_turn)
        if start < len(opening):
            raise FormatError("the chat template opens past answers in another way than new ones")
        return cut(cut(rendered, end)[0], start)[1]

    def closing(self, last: Cut | None, visible_only: bool = False) -> str:
        """What ends an answer whose end-of-turn token was not sampled. `visible_only`: its reasoning was left out."""
        if last == "reasoning" and not visible_only:
            return CLOSE_REASONING + self.end_of_turn
        return (CLOSE_CALL if last == "call" else "") + self.end_of_turn

    def whole(self, messages: list[Message], tools: list[Any], **options: Any) -> list[Segment]:
        """A whole conversation in one rendering."""
        contents = Contents()
        return self._template.segments(self._marked(messages, contents), contents, tools, **options)

    def _derive(self, tokenizer: ChatTokenizer) -> None:
        text, user = self._template.text, _message("user", _ONE)
        self._user_closing = _after(text([user]), _ONE)
        self._user_opening = _between(text([user, _message("user", _TWO)]), _ONE + self._user_closing, _TWO)
        prompted = _after(text([user], add_generation_prompt=True), _ONE)
        self.generation_prompt = prompted.removeprefix(self._user_closing)
        if not self.generation_prompt or prompted == self.generation_prompt:
            raise FormatError("the chat template has no generation prompt of its own")
        self.end_of_turn = _first_token(self._user_closing, tokenizer)

        answer = _message("assistant", _REPLY) | {"reasoning_content": _THOUGHT if self.thinks else ""}
        past = text([user, answer, _message("user", _TWO)])
        between = _between(past, _ONE + self._user_closing, _REPLY)
        self.visible_opening = None if _THOUGHT in between else between
        self._check_calls(answer)

    def _check_calls(self, answer: Message) -> None:
        arguments = {"key": "value"}
        calls = [_call("name", arguments), _call("other", arguments)]
        rendered = joined(self.answer(answer | {"tool_calls": calls}))
        bodies = re.findall(f"{CALL_OPEN}(.*?){CALL_CLOSE}", rendered, re.DOTALL)
        self.calls = _way_of(bodies, ["name", "other"], arguments)
        self._answer_contents = {called: self._count_contents(called) for called in (True, False)}
        self.call_separator = _between(rendered, _REPLY, CALL_OPEN)
        if self.thinks and not rendered.startswith(_THOUGHT + CLOSE_REASONING + _REPLY):
            raise FormatError("the chat template does not write reasoning as <think>…</think> before the answer")
        if self.call_separator.strip("\n") or _between(rendered, CALL_CLOSE, CALL_OPEN).strip("\n"):
            raise FormatError("the chat template separates calls by more than newlines")

    def _marked(self, messages: list[Message], contents: Contents) -> list[Message]:
        """`messages` with marks in place of what people, tools and the model wrote, cut as the template cuts it."""
        marked: list[Message] = []
        for message in messages:
            entry = message | {"content": contents.mark(self._trims[message["role"]](message["content"]))}
            if message["role"] == "assistant":
                # An absent reasoning would let the template look for one inside the content.
                entry["reasoning_content"] = contents.mark(
                    self._trims["reasoning"](message.get("reasoning_content") or "")
                )
            if message.get("tool_calls"):
                calls = [call["function"] for call in message["tool_calls"]]
                entry["tool_calls"] = [
                    _call(contents.mark(call["name"]), contents.mark_all(call["arguments"])) for call in calls
                ]
            marked.append(entry)
        return marked

    def _stand_in_answer(self, contents: Contents, calls: bool) -> list[Message]:
        """A user's message and an answer to it, which ends in a call if `calls`."""
        answer: Message = {"role": "assistant", "content": contents.mark(_STAND_IN), "reasoning_content": ""}
        if calls:
            answer["tool_calls"] = [_call(contents.mark("f"), {contents.mark("k"): contents.mark(_STAND_IN)})]
        return [self._stand_in(contents), answer]

    def _count_contents(self, calls: bool) -> int:
        """Runs of contents that the template writes of them."""
        contents = Contents()
        rendered = self._template.segments(self._stand_in_answer(contents, calls), contents)
        return sum(segment.plain for segment in rendered)

    def _stand_in(self, contents: Contents) -> Message:
        return _message("user", contents.mark(_STAND_IN))

    def _without_generation_prompt(self, segments: list[Segment]) -> list[Segment]:
        length = len(joined(segments)) - len(self.generation_prompt)
        kept, prompt = cut(segments, length)
        if joined(prompt) != self.generation_prompt:
            raise FormatError("the chat template writes another generation prompt after these messages")
        return kept


_STAND_IN = "-"
_ONE, _TWO, _REPLY, _THOUGHT = "probe-one", "probe-two", "probe-reply", "probe-thought"


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _system(text: str | None) -> list[Message]:
    return [] if text is None else [_message("system", text)]


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _way_of(bodies: list[str], names: list[str], arguments: dict[str, str]) -> CallFormat:
    """The format in which these bodies are calls of these functions."""
    for way in CALL_FORMATS:
        if len(bodies) == len(names) and all(map(way.reads, bodies, names, repeat(arguments))):
            return way
    shapes = " or as ".join(way.shape for way in CALL_FORMATS)
    raise FormatError(f"the chat template does not write calls as {shapes}")


def _probe(template: ChatTemplate, name: str, text: str) -> str:
    """A rendering in which `text` is what `name` says, and is shown."""
    user, answer = _message("user", _ONE), _message("assistant", _REPLY) | {"reasoning_content": ""}
    if name == "system":
        return template.text([_message("system", text), user])
    if name == "user":
        return template.text([_message("user", text)])
    if name == "assistant":
        return template.text([user, answer | {"content": text}])
    if name == "reasoning":
        return template.text([user, answer | {"reasoning_content": text}])
    calling = answer | {"tool_calls": [_call("name", {"key": "value"})]}
    return template.text([user, calling, _message("tool", text)])


def _after(text: str, mark: str) -> str:
    if mark not in text:
        raise FormatError("the chat template leaves out a user message")
    return text.rpartition(mark)[2]


def _between(text: str, left: str, right: str) -> str:
    start = text.find(left)
    end = text.find(right, start + len(left))
    if start < 0 or end < 0:
        raise FormatError("the chat template writes a message differently after other messages")
    return text[start + len(left) : end]


def _first_token(text: str, tokenizer: ChatTokenizer) -> str:
    for name in tokenizer.added:
        if text.startswith(name):
            return name
    raise FormatError(f"messages end in {text!r}, which does not begin with a control token")
