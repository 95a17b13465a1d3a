"""From a head and new items to the next prompt: ids that stand are never tokenised again."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

from tokenspeed.client.protocol.commands import ReasoningRule
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.items import FunctionCallOutputItem, FunctionTool, InputItem, MessageItem
from tokenspeed.sessions.formats.qwen import QwenFormat
from tokenspeed.sessions.formats.segments import Segment, encode
from tokenspeed.sessions.formats.template import FormatError, Message
from tokenspeed.sessions.preamble import Preamble
from tokenspeed.sessions.tokenizer import ChatTokenizer, Ids
from tokenspeed.sessions.turn import Prompt, Turn, lineage


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
        return Preamble(instructions, templated, self._preamble_ids(instructions, templated))

    def preamble_after(self, preamble: Preamble, head: Turn) -> Preamble:
        """A session's preamble as the next prompt after `head` bears it.

        A conversation that opened with system text of its own keeps it while the session has none.
        """
        before = head.prompt.preamble
        if before.brought is None:
            return preamble
        if preamble.system is not None:
            return replace(preamble, brought=before.brought)
        if (before.system, before.tools) == (before.brought, preamble.tools):
            return before
        ids = self._preamble_ids(before.brought, preamble.tools)
        return Preamble(before.brought, preamble.tools, ids, before.brought)

    def kept(self, preamble: Preamble, head: Turn, drops: bool) -> int:
        """How many ids of `head` the next prompt begins with. `drops`: it will leave reasoning out."""
        if self.preamble_after(preamble, head).ids != head.prompt.preamble.ids:
            return 0
        return _since_user_message(head)[0].prompt.input_end if drops else head.length

    def prompt(
        self, preamble: Preamble, rule: ReasoningRule, head: Turn | None, items: list[InputItem], generate: bool = True
    ) -> Prompt:
        """The prompt of the turn after `head`; for a warm-up (not `generate`) without the generation prompt.

        Under `drop`, an input with a user's message leaves out the reasoning since the last one: the prompt goes back
        to where the first answer since then began, and the visible ids of the answers follow from there.

        Raises:
            SessionError: `bad_request`, if the chat format cannot write the input.
        """
        generation = self._generation if generate else array("i")
        try:
            if head is None:
                return self._first(preamble, items, rule == "keep", generation)
            input_ids = self._next_input(head, items, keep_reasoning=rule == "keep")
        except FormatError as error:
            raise SessionError("bad_request", str(error)) from error
        preamble = self.preamble_after(preamble, head)
        if rule == "drop" and has_user_message(items):
            base, visible = self._without_reasoning(head)
            keep, added = base.prompt.input_end, visible + input_ids
            return self._after(preamble, base, keep, added, input_ids, generation, goes_back=True)
        added = self._closing(head) + input_ids
        return self._after(preamble, head, head.length, added, input_ids, generation)

    def again(self, preamble: Preamble, turn: Turn) -> Prompt:
        """The prompt of another answer to a turn's input."""
        prompt = turn.prompt
        preamble = self.preamble_after(preamble, turn)
        if preamble.ids == prompt.preamble.ids:
            return replace(prompt, fresh=prompt.fresh[: prompt.input_end - prompt.keep] + self._generation)
        return self._after(preamble, turn, prompt.input_end, array("i"), prompt.input_ids, self._generation)

    def _first(self, preamble: Preamble, items: list[InputItem], keep_reasoning: bool, generation: Ids) -> Prompt:
        leading = items[0]
        if preamble.system is None and isinstance(leading, MessageItem) and leading.role in ("system", "developer"):
            # A conversation that brings its own system text opens with it, and it belongs to the preamble.
            ids = self._preamble_ids(leading.text, preamble.tools)
            preamble, items = Preamble(leading.text, preamble.tools, ids, leading.text), items[1:]
        segments = self._format.first_input(preamble.system, preamble.tools, _messages(items), keep_reasoning)
        input_ids = self._encode(segments)
        input_end = len(preamble.ids) + len(input_ids)
        return Prompt(
            base=None,
            keep=0,
            fresh=preamble.ids + input_ids + generation,
            input_ids=input_ids,
            preamble=preamble,
            input_end=input_end,
            marks=_marks(len(preamble.ids), input_end),
        )

    def _next_input(self, head: Turn, items: list[InputItem], keep_reasoning: bool) -> Ids:
        if not items:
            return array("i")
        messages = _messages(_results_first(head, items))
        return self._encode(self._format.next_input(messages, keep_reasoning, after_input=head.warmed))

    def _after(
        self,
        preamble: Preamble,
        base: Turn,
        keep: int,
        added: Ids,
        input_ids: Ids,
        generation: Ids,
        goes_back: bool = False,
    ) -> Prompt:
        """The first `keep` ids of `base`, then `added`; under another preamble than theirs all of it anew."""
        back: tuple[int, ...] = (keep,) if goes_back else ()
        if preamble.ids != base.prompt.preamble.ids:
            moved = len(preamble.ids) - base.prompt.preamble_end
            added = preamble.ids + lineage(base, keep)[base.prompt.preamble_end :] + added
            back = tuple(position + moved for position in back)
            standing, keep = None, 0
        else:
            standing = base
        input_end = keep + len(added)
        return Prompt(
            base=standing,
            keep=keep,
            fresh=added + generation,
            input_ids=input_ids,
            preamble=preamble,
            input_end=input_end,
            marks=_marks(len(preamble.ids), *back, input_end),
        )

    def _without_reasoning(self, head: Turn) -> tuple[Turn, Ids]:
        """The turn that the last user message began, and what follows its input without the reasoning."""
        steps = _since_user_message(head)
        opening = self._tokenizer.encode_control(self._format.visible_opening or "")
        visible: Ids = array("i")
        for step in steps:
            if step is not steps[0]:
                visible += step.prompt.input_ids
            if not step.warmed:
                visible += opening + step.visible_ids() + self._closing(step, visible_only=True)
        return steps[0], visible

    def _closing(self, turn: Turn, visible_only: bool = False) -> Ids:
        """What the answer lacks to be a closed message: nothing if it sampled its end-of-turn token or never began."""
        if turn.warmed:
            return array("i")
        ids = turn.visible_ids() if visible_only else turn.output_ids
        if ids and ids[-1] == self._end_of_turn:
            return array("i")
        return self._tokenizer.encode_control(self._format.closing(turn.cut, visible_only))

    def _preamble_ids(self, system: str | None, tools: list[Any]) -> Ids:
        try:
            return self._encode(self._format.preamble(system, tools))
        except FormatError as error:
            raise SessionError("bad_request", str(error)) from error

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


def _results_first(head: Turn, items: list[InputItem]) -> list[InputItem]:
    """The results in the order of the calls, then the messages: chat formats tell results apart by their order alone,
    and know them right behind the calls only."""
    places = {call.call_id: place for place, call in enumerate(head.calls())}
    results = [item for item in items if isinstance(item, FunctionCallOutputItem)]
    messages = [item for item in items if isinstance(item, MessageItem)]
    return [*sorted(results, key=lambda result: places[result.call_id]), *messages]


def _messages(items: list[InputItem]) -> list[Message]:
    return [_message(item) for item in items]


def _message(item: InputItem) -> Message:
    if isinstance(item, FunctionCallOutputItem):
        return {"role": "tool", "content": item.text}
    return {"role": "system" if item.role == "developer" else item.role, "content": item.text}
