"""Stop strings: what is let through, how turns that one ends are marked, and the turn after."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.client.protocol.commands import Sampling
from tokenspeed.client.protocol.events import TurnDelta, TurnItem
from tokenspeed.client.protocol.items import FunctionCallItem, FunctionCallOutputItem, FunctionTool
from tokenspeed.sessions.held import HeldBytes
from tokenspeed.sessions.tokenizer import ChatTokenizer, Detokenizer

TOOL = FunctionTool("f", parameters={"properties": {"s": {"type": "string"}}})
CALL = "<tool_call>\n<function=f>\n<parameter=s>\n{}\n</parameter>\n</function>\n</tool_call>"
HI = "\n</think>\n\nHi<|im_end|>"
MakeDesk = Callable[..., Any]

stops = st.lists(st.text("ab€😀", min_size=1, max_size=4), min_size=1, max_size=3)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))  # type: ignore[arg-type]


def first_stop(text: str, strings: list[str]) -> tuple[int, str] | None:
    """Where the first string to be complete begins, and which it is: the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [string for string in strings if text[:end].endswith(string)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


@given(st.text("ab€😀", max_size=20), stops, st.data())
def test_nothing_of_a_stop_string_is_let_through_at_any_chunking(
    text: str, strings: list[str], data: st.DataObject
) -> None:
    found = first_stop(text, strings)
    if found is not None:
        # The engine ends the turn with the piece that completes the string; anything may follow in that piece.
        done = len(text[: found[0]].encode()) + len(found[1].encode())
    whole = text.encode()
    places = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=8)))
    held, through, fed = HeldBytes(strings), b"", 0
    for start, end in zip([0, *places], [*places, len(whole)], strict=True):
        through += held.feed(whole[start:end])
        fed = end
        if found is not None and end >= done:
            break
        # Whatever still may come, what was let through is before every string's beginning.
        assert found is None or len(through) <= len(text[: found[0]].encode())
    if found is None:
        assert through + held.rest() == whole
    else:
        assert len(through) <= len(text[: found[0]].encode())
        assert (through + held.before(found[1])).decode() == text[: found[0]]
    assert fed <= len(whole)


@given(st.text("ab", max_size=20), stops)
def test_no_more_is_held_than_may_be_a_beginning(text: str, strings: list[str]) -> None:
    held, through = HeldBytes(strings), ""
    for place, character in enumerate(text):
        through += held.feed(character.encode()).decode()
        if first_stop(text[: place + 1], strings) is not None:
            return
        rest = text[len(through) : place + 1]
        assert rest == "" or any(string.startswith(rest) for string in strings)


def test_a_turn_that_goes_on_past_a_string_loses_nothing() -> None:
    held = HeldBytes(["ab"])
    assert b"".join([held.feed(b"xab"), held.feed(b"ya"), held.rest()]) == b"xabya"


def test_a_character_before_a_stop_string_that_is_cut(tokenizer: ChatTokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ["!!"])
    emoji, marks = list(tokenizer.encode_plain("😀")), list(tokenizer.encode_plain("!!"))
    assert len(emoji) > 1
    text = "".join(detokenizer.feed(token) for token in [*emoji[:-1], *marks])
    assert text + detokenizer.cut("!!") == "\ufffd"


ENDINGS = [
    ("\n</think>\n\nLooking at STOP here", ["STOP"], "STOP", "completed", "stop", ["Looking at "]),
    ("\n</think>\n\nab€😀c", ["€😀"], "€😀", "completed", "stop", ["ab"]),
    ("\n</think>\n\nabcd", ["abcdx", "bc", "c"], "bc", "completed", "stop", ["a"]),
    ("\n</think>\n\nSTOP", ["STOP"], "STOP", "completed", "stop", []),
    ("a thought, STOP", ["STOP"], "STOP", "completed", "stop", ["a thought, "]),
    ("\n</think>\n\nx\n\nSTOP", ["\n\nSTOP"], "\n\nSTOP", "completed", "stop", ["x"]),
    (f"\n</think>\n\nx\n{CALL.format('value STOP')}", ["STOP"], "STOP", "incomplete", "stop", ["x", None]),
    (f"\n</think>\n\n{CALL.format('v')}\nSTOP", ["STOP"], "STOP", "completed", "tool_calls", ["f"]),
    (f"\n</think>\n\n{CALL.format('v')}<|im_end|>", ["STOP"], None, "completed", "tool_calls", ["f"]),
    ("\n</think>\n\nSTO P ST<|im_end|>", ["STOP"], None, "completed", "stop", ["STO P ST"]),
    ("\n</think>\n\nSTO", ["STOP"], None, "incomplete", "length", ["STO"]),
    ("\n</think>\n\nST<think>OP\n</think>\n\n<|im_end|>", ["STOP"], None, "completed", "stop", ["ST", "OP"]),
]


@pytest.mark.parametrize(("chunk", "rule"), [(1, "keep"), (2, "drop"), (1000, "keep")])
def test_endings(desk: MakeDesk, chunk: int, rule: str) -> None:
    async def test() -> None:
        d = desk(chunk=chunk)
        for output, strings, stop, status, reason, texts in ENDINGS:
            session = await d.open(tools=[TOOL], reasoning=rule)
            ids = list(d.tokenizer.encode_control(output))
            # What would follow is never asked for: the engine ends the turn at the string.
            d.engine.scripts.append([*ids, *d.tokenizer.encode_plain(" never")])
            limit = len(ids) if reason == "length" else None
            ended = await d.take(session, "go", sampling=Sampling(stop=strings, max_tokens=limit))
            assert (ended.stop_string, ended.status, ended.reason) == (stop, status, reason), output
            [record] = await d.turns(session)
            assert record.stop_string == stop
            shown = [
                None if item.status == "incomplete" and isinstance(item, FunctionCallItem) else
                item.name if isinstance(item, FunctionCallItem) else item.text
                for item in record.output
            ]  # fmt: skip
            assert shown == texts
            for place, item in enumerate(record.output):
                deltas = [e.text for e in d.of(ended.turn) if isinstance(e, TurnDelta) and e.item == place]
                assert isinstance(item, FunctionCallItem) or "".join(deltas) == item.text
                assert not any(string in "".join(deltas) for string in strings)
            assert len([e for e in d.of(ended.turn) if isinstance(e, TurnItem)]) == len(record.output)
            kept = d.engine.lineages[ended.turn][1]
            calls = [item for item in record.output if isinstance(item, FunctionCallItem)]
            results = [FunctionCallOutputItem(call.call_id, "ok") for call in calls]
            after = await d.take(session, results if reason == "tool_calls" else "next", HI)
            prompt = d.engine.prompts[after.turn]
            assert rule == "drop" or prompt[: len(kept)] == kept
            messages = d.tokenizer.decode(prompt).split("<|im_start|>")[1:-1]
            assert all(message.endswith("<|im_end|>\n") and message.count("<|im_end|>") == 1 for message in messages)
            assert all(message.count("<think>") == message.count("</think>") for message in messages)

    run(test)


def test_a_call_that_a_stop_string_ends_is_marked(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open(tools=[TOOL], sampling=Sampling(stop=["STOP"]))
        ended = await d.take(session, "go", f"\n</think>\n\n{CALL.format('Köln, S STOP')}")
        assert (ended.status, ended.reason, ended.stop_string) == ("incomplete", "stop", "STOP")
        [call] = (await d.turns(session))[0].output
        assert (call.name, call.arguments, call.status) == ("f", "{}", "incomplete")
        assert call.parse_error == "a stop string ends the call"
        assert call.raw == "\n<function=f>\n<parameter=s>\nKöln, S "
        deltas = [event for event in d.of(ended.turn) if isinstance(event, TurnDelta)]
        assert "".join(delta.text for delta in deltas) == '{"s": "Köln, S '
        assert (await d.take(session, "go on", HI)).status == "completed"

    run(test)


def test_what_a_withheld_newline_hides_does_not_change(desk: MakeDesk) -> None:
    """The blank lines after the reasoning go with it, whether or not a stop string withholds them."""

    async def test() -> None:
        d = desk()
        prompts = []
        for stop in ([], ["\n\nX"]):
            session = await d.open(reasoning="drop")
            await d.take(session, "a", "r" + HI, sampling=Sampling(stop=stop))
            prompts.append(d.engine.prompts[(await d.take(session, "b", HI)).turn])
        assert prompts[0] == prompts[1]

    run(test)
