"""From a head and new items to the next prompt: ids that stand are never tokenised again."""

from __future__ import annotations

from array import array
from typing import Any

from tokenspeed.client.protocol.commands import ReasoningRule
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.items import FunctionCallOutputItem, FunctionTool, InputItem, MessageItem
from tokenspeed.sessions.formats.qwen import QwenFormat
from tokenspeed.sessions.formats.segments import Segment, encode
from tokenspeed.sessions.formats.template import FormatError, Message
from tokenspeed.sessions.tokenizer import ChatTokenizer
from tokenspeed.sessions.turn import Ids, Prompt, Turn


class Preamble:
    """System text and tools of a session, with their ids."""

    def __init__(self, system: str | None, tools: list[Any], ids: Ids) -> None:
        self.system = system
        self.tools = tools
        self.ids = ids


class Transcript:
    """Builds prompts in the checkpoint's chat format."""

    def __init__(self, chat_format: QwenFormat, tokenizer: ChatTokenizer) -> None:
        self._format = chat_format
        self._tokenizer = tokenizer
        self._generation: Ids = tokenizer.encode_control(chat_format.generation_prompt)
        self._end_of_turn = tokenizer.added[chat_format.end_of_turn]

    def preamble(self, instructions: str | None, tools: list[FunctionTool]) -> Preamble:
        """Raises: SessionError `bad_request`, if the chat format cannot write it."""
        templated = [_templated(tool) for tool in tools]
        try:
            ids = self._encode(self._format.preamble(instructions, templated))
        except FormatError as error:
            raise SessionError("bad_request", str(error)) from error
        return Preamble(instructions, templated, ids)

    def prompt(self, preamble: Preamble, rule: ReasoningRule, head: Turn | None, items: list[InputItem]) -> Prompt:
        """The prompt of the turn after `head`.

        Under `drop`, an input with a user's message leaves out the reasoning since the last one: the prompt goes back
        to where the first answer since then began, and the visible ids of the answers follow from there.

        Raises:
            SessionError: `bad_request`, if the chat format cannot write the input.
        """
        try:
            if head is None:
                return self._first(preamble, items, keep_reasoning=rule == "keep")
            input_ids = self._encode(self._format.next_input(_messages(items), keep_reasoning=rule == "keep"))
        except FormatError as error:
            raise SessionError("bad_request", str(error)) from error
        if rule == "drop" and has_user_message(items):
            return self._without_reasoning(head, input_ids)
        fresh = self._closing(head) + input_ids
        input_end = head.length + len(fresh)
        return Prompt(
            base=head,
            keep=head.length,
            fresh=fresh + self._generation,
            input_ids=input_ids,
            preamble_end=head.prompt.preamble_end,
            input_end=input_end,
            marks=_marks(head.prompt.preamble_end, input_end),
        )

    def _first(self, preamble: Preamble, items: list[InputItem], keep_reasoning: bool) -> Prompt:
        leading = items[0]
        if preamble.system is None and isinstance(leading, MessageItem) and leading.role in ("system", "developer"):
            # A conversation that brings its own system text opens with it, and it belongs to the preamble.
            ids = self._encode(self._format.preamble(leading.text, preamble.tools))
            preamble, items = Preamble(leading.text, preamble.tools, ids), items[1:]
        segments = self._format.first_input(preamble.system, preamble.tools, _messages(items), keep_reasoning)
        input_ids = self._encode(segments)
        input_end = len(preamble.ids) + len(input_ids)
        return Prompt(
            base=None,
            keep=0,
            fresh=preamble.ids + input_ids + self._generation,
            input_ids=input_ids,
            preamble_end=len(preamble.ids),
            input_end=input_end,
            marks=_marks(len(preamble.ids), input_end),
        )

    def _without_reasoning(self, head: Turn, input_ids: Ids) -> Prompt:
        steps = _since_user_message(head)
        first = steps[0]
        opening = self._tokenizer.encode_control(self._format.visible_opening or "")
        fresh: Ids = array("i")
        for step in steps:
            if step is not first:
                fresh += step.prompt.input_ids
            fresh += opening + step.visible_ids() + self._closing(step, visible_only=True)
        fresh += input_ids
        keep = first.prompt.input_end
        input_end = keep + len(fresh)
        return Prompt(
            base=first,
            keep=keep,
            fresh=fresh + self._generation,
            input_ids=input_ids,
            preamble_end=first.prompt.preamble_end,
            input_end=input_end,
            marks=_marks(first.prompt.preamble_end, keep, input_end),
        )

    def _closing(self, turn: Turn, visible_only: bool = False) -> Ids:
        """What the answer lacks to be a closed message: nothing if it sampled its end-of-turn token."""
        ids = turn.visible_ids() if visible_only else turn.output_ids
        if ids and ids[-1] == self._end_of_turn:
            return array("i")
        return self._tokenizer.encode_control(self._format.closing(turn.cut, visible_only))

    def _encode(self, segments: list[Segment]) -> Ids:
        try:
            return encode(segments, self._tokenizer)
        except UnicodeEncodeError as error:
            message = f"the text is not valid Unicode: a lone surrogate at character {error.start}"
            raise SessionError("bad_request", message) from error


def has_user_message(items: list[InputItem]) -> bool:
    return any(isinstance(item, MessageItem) and item.role == "user" for item in items)


def _since_user_message(head: Turn) -> list[Turn]:
    """The turns whose answers came after the last user message, in order."""
    steps = [head]
    while not has_user_message(steps[-1].input) and steps[-1].parent is not None:
        steps.append(steps[-1].parent)
    return steps[::-1]


def _marks(*positions: int) -> tuple[int, ...]:
    return tuple(sorted({position for position in positions if position > 0}))


def _templated(tool: FunctionTool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    strict = {} if tool.strict is None else {"strict": tool.strict}
    function = {"name": tool.name, **described, "parameters": tool.parameters, **strict}
    return {"type": "function", "function": function}


def _messages(items: list[InputItem]) -> list[Message]:
    return [_message(item) for item in items]


def _message(item: InputItem) -> Message:
    if isinstance(item, FunctionCallOutputItem):
        return {"role": "tool", "content": item.text}
    return {"role": "system" if item.role == "developer" else item.role, "content": item.text}
