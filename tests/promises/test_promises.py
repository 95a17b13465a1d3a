"""What the product promises, through the websocket and the SDK. The numbers are the promises'."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed import SessionError
from tokenspeed.client import Session, Turn, tool_output

Open = Callable[..., Session]

MESSAGES = [
    "Hello!",
    "My name is Ines and my door code is 7319.",
    "My favourite colour is green. " * 12,
    "What is my name?",
    "x",
    "Tell me the door code, please.",
    "Größe: 5 µm, 価格 🙂",
    "What is my favourite colour?",
    "Thank you!",
    "\n\n",
    "Is there anything that I have not told you?",
    "Bye!",
]


def say(session: Session, text: Any, **options: Any) -> Turn:
    return session.turn(text, token_ids=True, **options)


def all_ids(turn: Turn | None) -> list[int]:
    if turn is None:
        return []
    assert turn.prompt_token_ids is not None
    assert turn.output_token_ids is not None
    return turn.prompt_token_ids + turn.output_token_ids


def assert_cost(turn: Turn, before: Turn | None) -> None:
    """Promise 3: computed ≤ new + 1; and 18: prompt = reused + computed."""
    usage = turn.usage
    new = usage.prompt - len(all_ids(before))
    assert usage.computed <= new + (before is not None)
    assert usage.prompt == usage.reused.total + usage.computed == len(turn.prompt_token_ids or [])
    assert usage.output == len(turn.output_token_ids or [])


@pytest.mark.parametrize("seeded", [False, True])
def test_1_3_4_a_dozen_turns(
    world: Any, open_session: Open, recompute: Callable[[Turn], list[int]], seeded: bool
) -> None:
    """Reuse never changes the answer; a turn costs its new tokens; ids are append-only; the engine's counters agree."""
    before = world.counters()
    session = open_session(instructions="You are a helpful assistant.", **({"temperature": 0.7} if seeded else {}))
    turns: list[Turn] = []
    for number, message in enumerate(MESSAGES):
        turn = say(session, message, **({"seed": number} if seeded else {}))
        last = turns[-1] if turns else None
        assert all_ids(turn)[: len(all_ids(last))] == all_ids(last)
        if last is not None and turn.reason == "stop":
            assert turn.output_token_ids is not None
            assert turn.output_token_ids[-1] == world.id_of("<|im_end|>")
        assert_cost(turn, last)
        turns.append(turn)
    after = world.counters()
    assert after.prefilled - before.prefilled == sum(turn.usage.computed for turn in turns)
    assert after.model_tokens - before.model_tokens == (
        after.prefilled - before.prefilled + after.decoded - before.decoded
    )
    assert after.decoded - before.decoded >= sum(turn.usage.output - 1 for turn in turns)
    if not seeded:
        for turn in turns:
            assert recompute(turn) == turn.output_token_ids
    listed = session.turns(token_ids=True)
    assert [all_ids(turn) for turn in listed] == [all_ids(turn) for turn in turns]


def test_1_6_forks_and_rewinds(world: Any, open_session: Open, recompute: Callable[[Turn], list[int]]) -> None:
    """Forks and rewinds cost at most one token at a kept checkpoint, and disturb nobody."""
    session = open_session()
    first = say(session, "My name is Ines.")
    second = say(session, "My door code is 7319.")
    with session.fork() as branch, session.fork(at=first) as early:
        on_branch = say(branch, "What is the door code?")
        on_early = say(early, "What is the door code?")
        third = say(session, "What is my name?")
        again = say(branch, "And my name?")
    for turn, before in ((on_branch, second), (on_early, first), (third, second), (again, on_branch)):
        assert_cost(turn, before)
        assert recompute(turn) == turn.output_token_ids
    assert [turn.id for turn in session.turns()] == [first.id, second.id, third.id]
    session.rewind(first)
    assert session.head == first.id
    other = say(session, "What is my name?")
    assert_cost(other, first)
    assert recompute(other) == other.output_token_ids
    session.rewind("start")
    assert session.head is None
    fresh = say(session, "My name is Ines.")
    assert all_ids(fresh) == all_ids(first)
    assert fresh.usage.computed < first.usage.prompt, "nothing of the first turn was reused"


def test_6_many_forks_share_one_prefill(world: Any, open_session: Open) -> None:
    session = open_session()
    parent = say(session, "My favourite colour is green. " * 20)
    before = world.counters()
    forks = [session.fork() for _ in range(5)]
    turns = [say(fork, f"Number {number}?", max_tokens=3) for number, fork in enumerate(forks)]
    for fork, turn in zip(forks, turns, strict=True):
        assert_cost(turn, parent)
        fork.close()
    assert world.counters().prefilled - before.prefilled == sum(turn.usage.computed for turn in turns) < 200


@pytest.mark.parametrize("keep", ["partial", "nothing"])
def test_8_a_cancel_leaves_a_defined_point(
    world: Any, open_session: Open, recompute: Callable[[Turn], list[int]], keep: Any
) -> None:
    session = open_session()
    first = say(session, "My name is Ines.")
    forced = world.ids("\n</think>\n\n" + "one two three " * 150)
    with session.turn("Count!", stream=True, token_ids=True, forced_token_ids=forced, max_tokens=400) as stream:
        for seen, _ in enumerate(stream):
            if seen == 4:
                threading.Thread(target=session.cancel, args=(keep,)).start()
        cut = stream.result()
    assert cut.status == "cancelled"
    for _ in range(100):
        if session.get().state == "idle":
            break
        time.sleep(0.05)
    if keep == "nothing":
        assert session.head == first.id
        last = first
    else:
        assert session.head == cut.id
        assert 5 <= cut.usage.output < 400
        assert (cut.output_token_ids or []) == forced[: cut.usage.output]
        last = cut
    following = say(session, "What is my name?")
    assert all_ids(following)[: len(all_ids(last))] == all_ids(last)
    assert_cost(following, last)
    assert recompute(following) == following.output_token_ids


TOOL = {
    "type": "function",
    "name": "note",
    "description": "Write a note.",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["text"],
    },
}
NASTY = [
    "plain",
    "quotes \" and ' and \\ and \\n",
    "lines\n\nand\ttabs\n",
    "  blanks around  ",
    "汉字 かな 한글",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈",
    "</think> <think> <tool_call> <|im_end|>",
    "<parameter=text> </parameter x> <function=note>",
    '{"json": [1, 2, {"a": null}]}',
    "",
    "0123456789" * 60,
]


def call_text(value: str, rest: str = "") -> str:
    return f"<tool_call>\n<function=note>\n<parameter=text>\n{value}\n</parameter>\n{rest}</function>\n</tool_call>"


def forced_call(world: Any, value: str, rest: str = "") -> list[int]:
    """Ids of a call whose value is plain text, as the model would write it."""
    head, tail = call_text("\0", rest).split("\0")
    bare = type(world.tokenizer).from_str(json.dumps(json.loads(world.tokenizer.to_str()) | {"added_tokens": []}))
    return [
        *world.ids("\n</think>\n\n" + head),
        *bare.encode(value, add_special_tokens=False).ids,
        *world.ids(tail + "<|im_end|>"),
    ]


@pytest.mark.parametrize("value", NASTY)
def test_11_arguments_round_trip(world: Any, open_session: Open, value: str) -> None:
    session = open_session(tools=[TOOL], max_tokens=1000)
    forced = forced_call(world, value, "<parameter=count>\n3\n</parameter>\n")
    whole = say(session, "Write it down.", forced_token_ids=forced)
    (call,) = whole.tool_calls
    assert json.loads(call.arguments) == {"text": value, "count": 3}
    assert (whole.status, whole.reason) == ("completed", "tool_calls")
    session.rewind("start")
    pieces = ""
    with session.turn("Write it down.", stream=True, forced_token_ids=forced) as stream:
        for delta in stream:
            if delta.channel == "arguments":
                pieces += delta.text
        streamed = stream.result()
    assert pieces == call.arguments == streamed.tool_calls[0].arguments
    answered = say(session, [tool_output(streamed.tool_calls[0], "done")], max_tokens=5)
    assert answered.usage.computed <= answered.usage.prompt - streamed.usage.prompt - streamed.usage.output + 1


def test_10_endings_are_honest_at_every_length(world: Any, open_session: Open) -> None:
    """`length` wins over `tool_calls`, an incomplete call is marked, and a session can always take one more turn."""
    forced = forced_call(world, "some text", "<parameter=count>\n3\n</parameter>\n")
    session = open_session(tools=[TOOL], instructions="Help.")
    for cut in range(1, len(forced) + 1):
        turn = say(session, "Write it down.", forced_token_ids=forced, max_tokens=cut)
        assert turn.output_token_ids == forced[:cut]
        if cut < len(forced):
            assert (turn.status, turn.reason) == ("incomplete", "length")
        else:
            assert (turn.status, turn.reason) == ("completed", "tool_calls")
        for call in turn.tool_calls:
            whole = call.status == "completed"
            assert whole == (call.parse_error is None)
            assert not whole or json.loads(call.arguments) == {"text": "some text", "count": 3}
        with (
            session.turn("Never mind.", stream=True, max_tokens=2, token_ids=True)
            if turn.reason == "length"
            else (
                session.turn([tool_output(turn.tool_calls[0], "ok")], stream=True, max_tokens=2, token_ids=True)
            ) as stream
        ):
            following = stream.result()
        assert all_ids(following)[: len(all_ids(turn))] == all_ids(turn)
        assert_cost(following, turn)
        session.rewind("start")


def test_12_text_is_text(world: Any, open_session: Open) -> None:
    """Every added token that a user types, or a tool returns, stays text."""
    added = json.loads(world.tokenizer.to_str())["added_tokens"]
    assert len(added) >= 9
    typed = " ".join(token["content"] for token in added)
    session = open_session(tools=[TOOL], max_tokens=1000)

    def controls(ids: list[int] | None) -> list[int]:
        return [identity for identity in ids or [] if identity in {token["id"] for token in added}]

    harmless = say(session, "harmless", forced_token_ids=forced_call(world, "x"))
    session.rewind("start")
    turn = say(session, typed, forced_token_ids=forced_call(world, typed))
    assert controls(turn.prompt_token_ids) == controls(harmless.prompt_token_ids)
    assert json.loads(turn.tool_calls[0].arguments) == {"text": typed}
    assert typed in world.tokenizer.decode(turn.prompt_token_ids, skip_special_tokens=False)
    result = say(session, [tool_output(turn.tool_calls[0], typed)], max_tokens=1)
    new = (result.prompt_token_ids or [])[len(all_ids(turn)) :]
    assert typed in world.tokenizer.decode(new, skip_special_tokens=False)
    names = ["<|im_start|>", "<tool_response>", "</tool_response>", "<|im_end|>", "<|im_start|>", "<think>"]
    assert controls(new) == [world.id_of(name) for name in names]


def test_14_a_full_context_is_a_clear_error(world: Any, open_session: Open) -> None:
    session = open_session()
    turn = say(session, "Hello!")
    limit = turn.usage.remaining + turn.usage.prompt + turn.usage.output
    with pytest.raises(SessionError, match=f"maximum context length is {limit} tokens") as full:
        session.turn("word " * (limit + 10))
    assert full.value.code == "context_length_exceeded"
    assert full.value.detail["prompt"] > limit
    assert session.head == turn.id
    assert_cost(say(session, "Hello again!"), turn)
