"""Reads a turn's output as it is sampled: reasoning, text and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenspeed.client.protocol.items import (
    FunctionCallItem,
    Item,
    ItemStatus,
    MessageItem,
    OutputTextPart,
    ReasoningItem,
    ReasoningTextPart,
)
from tokenspeed.sessions.formats.arguments import ParameterTypes
from tokenspeed.sessions.formats.call import CallBody
from tokenspeed.sessions.formats.passage import Passage
from tokenspeed.sessions.formats.qwen import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN, Cut, QwenFormat
from tokenspeed.sessions.tokenizer import ChatTokenizer, Detokenizer


@dataclass
class Delta:
    """Text that joins output item `item`; the first delta of a call carries its name and id."""

    item: int
    channel: Literal["text", "reasoning", "arguments"]
    text: str
    name: str | None = None
    call_id: str | None = None


@dataclass
class Finished:
    """Output item `index` is whole, or will not grow any more."""

    index: int
    item: Item


OutputEvent = Delta | Finished


class OutputParser:
    """One turn's output, token by token; what it yields does not depend on how the ids are chunked.

    The tags of reasoning and calls are known by their token ids, so that the same characters spelled by other tokens
    are text. Newlines that the format puts around its tags belong to no item; text of only blanks makes no item.

    A `</tool_call>` inside a parameter's value is the call's end only where the turn or the next call follows, for a
    whole call closes its parameter first; elsewhere it is part of the value.

    Text that may begin a stop string is withheld until it is known not to; of one that ends the turn nothing is let
    through, in reasoning, text and calls. Strings are looked for in the text as it is sampled, between added tokens.

    Attributes:
        items: the finished items.
        reasoning_tokens: ids spent on reasoning, its closing tag included.
        hidden: runs `[start, end)` of the output's ids that go when the reasoning is dropped.
        cut: inside what the output stopped, set by `finish`.
    """

    def __init__(
        self,
        chat_format: QwenFormat,
        tokenizer: ChatTokenizer,
        types: ParameterTypes,
        stop_ids: frozenset[int],
        new_id: Callable[[str], str],
        stops: Sequence[str] = (),
    ) -> None:
        """`stop_ids`: ids that end the turn and are no text. `new_id`: makes an id of a prefix (`msg`, `rs`, `call`,
        `fc`). `stops`: the stop strings."""
        self.items: list[Item] = []
        self.reasoning_tokens = 0
        self.hidden: list[tuple[int, int]] = []
        self.cut: Cut | None = None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, stops)
        self._types = types
        self._stop_ids = stop_ids
        self._new_id = new_id
        added = tokenizer.added
        # A format that never thinks may do without the tags.
        self._think_open, self._think_close = added.get(THINK_OPEN), added.get(THINK_CLOSE)
        self._call_open, self._call_close = added[CALL_OPEN], added[CALL_CLOSE]
        self._separator = len(chat_format.call_separator)
        self._calls = chat_format.calls
        self._events: list[OutputEvent] = []
        self._position = 0  # ids read
        self._hidden_from: int | None = 0 if chat_format.thinks else None
        self._passage: Passage | None = Passage(trailing=1) if chat_format.thinks else self._message(leading=0)
        self._thinking = chat_format.thinks
        self._body: CallBody | None = None  # a call is being read iff this is set, then `_passage` is None
        self._call_id = ""
        self._named = False
        self._held_close: str | None = None  # a `</tool_call>` inside a value and the blanks after it

    def feed(self, token_ids: Iterable[int]) -> list[OutputEvent]:
        """What these ids add. Deltas are never empty, and neighbours of one item are one."""
        for token_id in token_ids:
            if self._thinking and token_id not in self._stop_ids:
                self.reasoning_tokens += 1
            self._read(token_id)
            self._position += 1
        events, self._events = self._events, []
        return events

    def finish(self, cut: bool, stop: str | None = None) -> list[OutputEvent]:
        """The turn has ended. `cut`: not by the model's own choice, so that what is open is incomplete. `stop`: the
        stop string that the last id has completed."""
        if stop is None:
            self._flush()
        else:
            self._write(self._detokenizer.cut(stop))
        if self._thinking:
            self.cut = "reasoning"
        elif self._body is not None and self._held_close is None:
            self.cut = "call"
        if self._body is not None:
            ending = "the turn ends inside the call" if stop is None else "a stop string ends the call"
            self._finish_call(ending if self.cut else self._calls.unfinished)
        else:
            self._finish_passage("incomplete" if cut else "completed", before_tag=False)
        if self._hidden_from is not None:
            self.hidden.append((self._hidden_from, self._position))
            self._hidden_from = None
        events, self._events = self._events, []
        return events

    def _read(self, token_id: int) -> None:
        if self._body is not None:
            self._read_in_call(token_id)
        elif token_id == self._think_close and self._thinking:
            self._flush()
            self._finish_passage("completed", before_tag=True)
            self._thinking = False
            self._passage = self._message(leading=2)
        elif token_id == self._think_open and not self._thinking:
            self._flush()
            self._end_hidden(self._position)
            self._finish_passage("completed", before_tag=True)
            self._thinking, self._hidden_from = True, self._position
            self._passage = Passage(leading=1, trailing=1)
        elif token_id == self._call_open and not self._thinking:
            self._flush()
            self._end_hidden(self._position)
            self._finish_passage("completed", before_tag=True)
            self._begin_call()
        elif token_id not in self._stop_ids:
            # By its bytes: text may be withheld, and what is hidden must not depend on that.
            written = self._tokenizer.token_bytes(token_id)
            if not self._thinking and (written.strip(b"\n") or not written):
                self._end_hidden(self._position)
            self._write(self._detokenizer.feed(token_id))

    def _read_in_call(self, token_id: int) -> None:
        assert self._body is not None
        if token_id == self._call_close:
            self._flush()
            if self._held_close is not None:
                self._release_close()
            if self._body.in_value:
                self._held_close = CALL_CLOSE
            else:
                self._finish_call(self._calls.unfinished)
                self._passage = self._message(leading=1)
        elif token_id == self._call_open and self._held_close is not None:
            self._flush()
            if self._held_close is None:  # the flush showed an unfinished character after the tag
                self._write(CALL_OPEN)
                return
            self._finish_call(self._calls.unfinished)
            self._begin_call()
        elif token_id not in self._stop_ids:
            self._write(self._detokenizer.feed(token_id))

    def _flush(self) -> None:
        self._write(self._detokenizer.flush())

    def _write(self, text: str) -> None:
        if not text:
            return
        if self._body is None:
            assert self._passage is not None
            self._emit_passage(self._passage.feed(text))
        elif self._held_close is not None and text.isspace():
            self._held_close += text
        else:
            self._release_close()
            self._feed_call(text)

    def _release_close(self) -> None:
        held, self._held_close = self._held_close, None
        if held is not None:
            self._feed_call(held)

    def _message(self, leading: int) -> Passage:
        return Passage(leading=leading, trailing=self._separator)

    def _end_hidden(self, position: int) -> None:
        if self._hidden_from is not None:
            self.hidden.append((self._hidden_from, position))
            self._hidden_from = None

    def _emit_passage(self, text: str) -> None:
        if text:
            self._emit(Delta(len(self.items), "reasoning" if self._thinking else "text", text))

    def _finish_passage(self, status: ItemStatus, before_tag: bool) -> None:
        assert self._passage is not None
        if not before_tag:
            self._emit_passage(self._passage.rest())
        text, self._passage = self._passage.text, None
        if not text:
            return
        if self._thinking:
            content = [ReasoningTextPart(text)]
            self._finish_item(ReasoningItem(content=content, id=self._new_id("rs"), status=status))
        else:
            parts = [OutputTextPart(text)]
            self._finish_item(MessageItem("assistant", list(parts), id=self._new_id("msg"), status=status))

    def _begin_call(self) -> None:
        self._body, self._call_id, self._named = self._calls.body(self._types), self._new_id("call"), False

    def _feed_call(self, text: str) -> None:
        assert self._body is not None
        arguments = self._body.feed(text)
        if arguments and self._named:
            self._emit(Delta(len(self.items), "arguments", arguments))
        elif arguments:
            self._named = True
            self._emit(Delta(len(self.items), "arguments", arguments, self._body.name, self._call_id))

    def _finish_call(self, reason: str) -> None:
        assert self._body is not None
        body, self._body = self._body, None
        self._held_close = None
        if self.cut == "call" or not body.done:
            body.end(reason)
        item = FunctionCallItem(self._call_id, body.name or "", body.arguments, id=self._new_id("fc"))
        if body.error is not None:
            item.arguments, item.status = "{}", "incomplete"
            item.parse_error, item.raw = body.error, body.raw
        self._finish_item(item)

    def _finish_item(self, item: Item) -> None:
        self._emit(Finished(len(self.items), item))
        self.items.append(item)

    def _emit(self, event: OutputEvent) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, Delta) and isinstance(last, Delta) and last.item == event.item:
            last.text += event.text
        else:
            self._events.append(event)
