"""The client's protocol state: any order and cutting of frames gives the same turns."""

from __future__ import annotations

import json
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenspeed.client.core import Core
from tokenspeed.client.errors import ConnectionFailed, ProtocolError
from tokenspeed.client.protocol.codec import JSON, MSGPACK, Codec
from tokenspeed.client.protocol.commands import SessionGet, TurnCreate
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import (
    ErrorEvent,
    Reply,
    Reused,
    Timings,
    TurnDelta,
    TurnEnded,
    TurnItem,
    TurnProgress,
    TurnStarted,
    Usage,
)
from tokenspeed.client.protocol.items import (
    FunctionCallItem,
    MessageItem,
    OutputTextPart,
    ReasoningItem,
    ReasoningTextPart,
)

URL = "ws://test"
encode = JSON.encode

# The other cores of a shared machine slow the first draws down; that is no finding.
unhurried = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
texts = st.text(min_size=1, max_size=12)


@dataclass
class Scenario:
    """A turn as the server tells it, and what the caller must end up with."""

    turn: str
    events: list[object]
    text: str
    reasoning: str
    calls: list[tuple[str, str]]
    streamed: dict[int, str]


@st.composite
def scenarios(draw: st.DrawFn, turn: str) -> Scenario:
    events: list[object] = [TurnStarted("s", turn, 0, None, 9, Reused(device=4), 5)]
    for done in range(draw(st.integers(0, 2))):
        events.append(TurnProgress("s", turn, len(events), "prefill", done, 5))
    spoken, thought, calls, streamed = "", "", [], {}
    for index, kind in enumerate(draw(st.lists(st.sampled_from(["text", "reasoning", "arguments"]), max_size=4))):
        pieces = draw(st.lists(texts, min_size=1, max_size=4))
        whole = "".join(pieces)
        for at, piece in enumerate(pieces):
            first = kind == "arguments" and at == 0
            name, call_id = (f"tool{index}", f"call{index}") if first else (None, None)
            events.append(TurnDelta("s", turn, len(events), index, kind, piece, name, call_id))
        if kind == "text":
            item: object = MessageItem("assistant", [OutputTextPart(whole)])
            spoken += whole
        elif kind == "reasoning":
            item = ReasoningItem([ReasoningTextPart(whole)])
            thought += whole
        else:
            item = FunctionCallItem(f"call{index}", f"tool{index}", whole)
            calls.append((f"tool{index}", whole))
        streamed[index] = whole
        events.append(TurnItem("s", turn, len(events), index, item))
    usage = Usage(9, Reused(device=4), 5, len(events), 0, 100)
    events.append(TurnEnded("s", turn, len(events), "completed", "stop", usage, Timings(), turn))
    return Scenario(turn, events, spoken, thought, calls, streamed)


def frames_of(codec: Codec, messages: list[object], cuts: list[bool]) -> list[str | bytes]:
    frames, batch = [], []
    for message, cut in zip(messages, [*cuts, *[True] * len(messages)], strict=False):
        batch.append(message)
        if cut:
            frames.append(codec.encode(batch if len(batch) > 1 else batch[0]))
            batch = []
    return frames + ([codec.encode(batch)] if batch else [])


@unhurried
@given(data=st.data())
def test_any_interleaving_reassembles_the_same_turns(data: st.DataObject) -> None:
    told = [data.draw(scenarios(f"t{number}")) for number in range(data.draw(st.integers(1, 4)))]
    queues = [list(scenario.events) for scenario in told]
    messages: list[object] = []
    while any(queues):
        queue = data.draw(st.sampled_from([queue for queue in queues if queue]))
        messages.append(queue.pop(0))
        if data.draw(st.integers(0, 9)) == 0:  # a replay of something that came before
            messages.append(data.draw(st.sampled_from(messages)))
    codec = data.draw(st.sampled_from([JSON, MSGPACK]))
    core = Core(URL, codec)
    for frame in frames_of(codec, messages, data.draw(st.lists(st.booleans(), max_size=len(messages)))):
        core.receive(frame)
    for scenario in told:
        assembly = core.turn(scenario.turn)
        turn = assembly.result()
        assert (turn.text, turn.reasoning) == (scenario.text, scenario.reasoning)
        assert [(call.name, call.arguments) for call in turn.tool_calls] == scenario.calls
        assert (turn.status, turn.usage.output) == ("completed", len(scenario.events) - 1)
        streamed: dict[int, str] = {}
        for delta in assembly.deltas:
            streamed[delta.item] = streamed.get(delta.item, "") + delta.text
        assert streamed == scenario.streamed


@unhurried
@given(scenario=scenarios("t"), data=st.data())
def test_a_missing_event_fails_the_turn(scenario: Scenario, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, len(scenario.events) - 2))
    core = Core(URL, JSON)
    for event in scenario.events[:lost] + scenario.events[lost + 1 :]:
        core.receive(encode(event))
    with pytest.raises(ProtocolError, match=f"{lost} was expected"):
        core.turn("t").result()


@unhurried
@given(scenario=scenarios("t"))
def test_a_slow_readers_merged_deltas_are_no_gap(scenario: Scenario) -> None:
    core = Core(URL, JSON)
    merged: list[object] = []
    for event in scenario.events:
        last = merged[-1] if merged else None
        if isinstance(event, TurnDelta) and isinstance(last, TurnDelta) and last.item == event.item:
            last.text += event.text
            last.first = last.seq if last.first is None else last.first
            last.seq = event.seq
        else:
            merged.append(event)
    for event in merged:
        core.receive(encode(event))
    turn = core.turn("t").result()
    assert (turn.text, turn.reasoning) == (scenario.text, scenario.reasoning)


def test_an_item_that_came_without_deltas_is_streamed_when_it_is_finished() -> None:
    core = Core(URL, JSON)
    core.receive(encode(TurnStarted("s", "t", 0, None, 1, Reused(), 1)))
    core.receive(encode(TurnDelta("s", "t", 1, 0, "text", "Hel")))
    core.receive(encode(TurnItem("s", "t", 2, 0, MessageItem("assistant", [OutputTextPart("Hello")]))))
    core.receive(encode(TurnItem("s", "t", 3, 1, FunctionCallItem("c9", "add", '{"a":1}'))))
    told = [(delta.item, delta.channel, delta.text, delta.name) for delta in core.turn("t").deltas]
    assert told == [(0, "text", "Hel", None), (0, "text", "lo", None), (1, "arguments", '{"a":1}', "add")]


def test_a_cancelled_turn_keeps_the_unfinished_item() -> None:
    core = Core(URL, JSON)
    core.receive(encode(TurnStarted("s", "t", 0, "p", 1, Reused(), 1)))
    core.receive(encode(TurnDelta("s", "t", 1, 0, "arguments", '{"a":', "add", "c1")))
    core.receive(encode(TurnEnded("s", "t", 2, "cancelled", "cancelled", Usage(), Timings(), "t")))
    turn = core.turn("t").result()
    (call,) = turn.tool_calls
    assert (call.name, call.arguments, call.status, turn.parent) == ("add", '{"a":', "incomplete", "p")


def test_the_parent_is_the_servers_word_if_there_is_one() -> None:
    core = Core(URL, JSON)
    core.receive(encode(TurnStarted("s", "t", 0, "told", 1, Reused(), 1)))
    core.turn("t").assume_parent("assumed")
    core.turn("queued").assume_parent("assumed")
    core.receive(encode(TurnEnded("s", "queued", 0, "cancelled", "cancelled", Usage(), Timings(), None)))
    assert [core.turn(turn).result().parent for turn in ("t", "queued")] == ["told", "assumed"]


def test_each_command_gets_its_own_answer() -> None:
    core = Core(URL, JSON)
    first, second = SessionGet("", "s1"), SessionGet("", "s2")
    sent = [json.loads(core.submit(command)) for command in (first, second)]
    assert [message["session"] for message in sent] == ["s1", "s2"]
    assert sent[0]["id"] != sent[1]["id"]
    news = core.receive(encode([ErrorEvent("session_not_found", "no s2", "never", id=second.id)]))
    assert news == [second.id]
    assert not core.answered(first.id)
    core.receive(encode(Reply(first.id, head="h")))
    assert core.take(first.id).head == "h"
    with pytest.raises(SessionError, match="session_not_found: no s2"):
        core.take(second.id)


def test_an_error_without_an_id_answers_what_waits() -> None:
    core = Core(URL, JSON)
    command = SessionGet("", "s")
    core.submit(command)
    core.receive(encode(ErrorEvent("bad_request", "no JSON", "never")))
    with pytest.raises(SessionError, match="no JSON"):
        core.take(command.id)


def test_events_that_nobody_wants_any_more_are_dropped() -> None:
    core = Core(URL, JSON)
    command = TurnCreate("", "s", "hi")
    core.submit(command)
    core.abandon(command.id)
    assert core.receive(encode(Reply(command.id, turn="t"))) == []
    assert core.receive(encode(TurnStarted("s", "t", 0, None, 1, Reused(), 1))) == []
    assert core.receive(encode(TurnEnded("s", "t", 1, "completed", "stop", Usage(), Timings(), "t"))) == []


@pytest.mark.parametrize("frame", ["", "nonsense", '{"type":"reply"}', "[1]", '{"no":"type"}', b"\xc1", b"\x91\x01"])
def test_an_unreadable_frame_is_a_protocol_error(frame: str | bytes) -> None:
    with pytest.raises(ProtocolError, match="unreadable frame"):
        Core(URL, MSGPACK if isinstance(frame, bytes) else JSON).receive(frame)


@pytest.mark.parametrize("codec", [JSON, MSGPACK])
def test_messages_of_a_later_version_are_left_out(codec: Codec) -> None:
    core = Core(URL, codec)
    command = SessionGet("", "s")
    core.submit(command)
    later = [{"type": "goaway", "deadline_ms": 5}, {"type": "reply", "id": command.id, "new": 1}]
    core.receive(json.dumps(later) if codec is JSON else msgspec.msgpack.encode(later))
    assert core.take(command.id).id == command.id


def test_a_lost_connection_fails_what_waits_and_what_comes_after() -> None:
    core = Core(URL, JSON)
    command = SessionGet("", "s")
    core.submit(command)
    core.receive(encode(TurnStarted("s", "t", 0, None, 1, Reused(), 1)))
    failure = core.closed(None, "")
    assert set(core.fail(failure)) == {command.id, "t"}
    with pytest.raises(ConnectionFailed, match="ws://test: the connection was lost"):
        core.take(command.id)
    with pytest.raises(ConnectionFailed):
        core.turn("t").result()
    with pytest.raises(ConnectionFailed):
        core.turn("never seen").result()
    with pytest.raises(ConnectionFailed):
        core.submit(SessionGet("", "s"))


@pytest.mark.parametrize(
    ("code", "expected"),
    [(4401, "unauthorized"), (4400, "bad_request"), (4429, "queue_full"), (1009, "payload_too_large")],
)
def test_a_refusal_is_named_by_its_close_code(code: int, expected: str) -> None:
    error = Core(URL, JSON).closed(code, "why")
    assert isinstance(error, SessionError)
    assert (error.code, error.message) == (expected, "why")


def test_an_ordinary_close_is_a_connection_that_failed() -> None:
    assert isinstance(Core(URL, JSON).closed(1001, "the server is ending"), ConnectionFailed)
