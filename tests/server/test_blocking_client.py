"""The blocking SDK against a real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tokenspeed.client import (
    Client,
    ConnectionFailed,
    FunctionCallItem,
    MessageItem,
    ProtocolError,
    ReasoningItem,
    SessionError,
    StepLimitExceeded,
    tool_output,
)
from tokenspeed.client.protocol.commands import SessionOpen, TurnCancel, TurnCreate
from tokenspeed.client.protocol.events import Reply, TurnRecord
from tokenspeed.client.protocol.items import FunctionCallOutputItem, Item, OutputTextPart, ReasoningTextPart
from tokenspeed.server.connection import Connection


def say(text: str) -> MessageItem:
    return MessageItem("assistant", [OutputTextPart(text)])


@pytest.fixture
def client(server: Any) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def call(number: int, name: str, arguments: str) -> FunctionCallItem:
    return FunctionCallItem(f"call{number}", name, arguments)


def outputs(command: TurnCreate) -> list[tuple[str, str]]:
    if isinstance(command.input, str):
        return []
    return [(item.call_id, item.text) for item in command.input if isinstance(item, FunctionCallOutputItem)]


def test_the_life_of_a_session(client: Client) -> None:
    with client.session(instructions="Be brief.", labels={"a": "b"}, temperature=0, max_tokens=50) as session:
        assert session.head is None
        first = session.turn("one")
        assert (first.text, first.status, first.reason, first.parent) == ("You said: one", "completed", "stop", None)
        assert (first.usage.prompt, first.usage.reused.device, first.usage.reused.total) == (10, 4, 4)
        assert first.steps == (first,)
        second = session.turn([{"role": "user", "content": "two"}])
        assert (second.parent, session.head) == (first.id, second.id)
        branch = session.fork()
        assert (branch.head, branch.turn("branch").parent) == (second.id, second.id)
        session.rewind(second.parent)
        assert session.head == first.id
        session.rewind(first.parent)
        assert (session.head, session.turns()) == (None, [])
        assert [turn.text for turn in branch.turns()] == ["You said: one", "You said: two", "You said: branch"]
        assert branch.turns()[0].input == [MessageItem("user", "one")]
        record = session.get()
        assert (record.instructions, record.labels) == ("Be brief.", {"a": "b"})
        assert (record.sampling.temperature, record.sampling.max_tokens) == (0.0, 50)
        assert branch.usage().turns == 3
        assert {listed.id for listed in client.sessions()} == {session.id, branch.id}
    with pytest.raises(SessionError, match="session_not_found"):
        session.turn("gone")
    assert [listed.id for listed in client.sessions()] == [branch.id]


def test_returning_to_a_session_by_its_id(server: Any, client: Client) -> None:
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    session = client.session(tools=[add])
    first = session.turn("one")
    with Client(server.url) as other:
        again = other.session(id=session.id, tools=[add])
        assert again.head == first.id
        assert again.turn("two").parent == first.id
        server.host.script = lambda command, history: [call(1, "add", '{"a":1,"b":2}')]
        # A stranger without the function gets the call, one with it runs it.
        assert other.session(id=session.id).turn("three").tool_calls[0].name == "add"
        with pytest.raises(StepLimitExceeded):
            again.turn("four", max_steps=2)
        with pytest.raises(TypeError, match="instructions cannot be given with id"):
            other.session(id=session.id, instructions="new")
        with pytest.raises(ValueError, match="the session has no tool 'say'; it has: add"):
            other.session(id=session.id, tools=[say])
        with pytest.raises(SessionError, match="session_not_found"):
            other.session(id="sess_x")


def test_streams_carry_every_channel(server: Any, client: Client) -> None:
    server.host.script = lambda command, history: [
        ReasoningItem([ReasoningTextPart("thinking it over")]),
        say("The answer"),
        call(1, "ask", '{"question":"why?"}'),
    ]
    session = client.session(tools=[{"type": "function", "name": "ask", "parameters": {}}])
    with session.turn("go", stream=True) as stream:
        deltas = list(stream)
    joined: dict[tuple[int, str], str] = {}
    for delta in deltas:
        joined[delta.item, delta.channel] = joined.get((delta.item, delta.channel), "") + delta.text
    assert joined == {
        (0, "reasoning"): "thinking it over",
        (1, "text"): "The answer",
        (2, "arguments"): '{"question":"why?"}',
    }
    named = [delta for delta in deltas if delta.name]
    assert [(delta.name, delta.call_id) for delta in named] == [("ask", "call1")]
    turn = stream.result()
    assert (turn.reasoning, turn.text, turn.reason) == ("thinking it over", "The answer", "tool_calls")
    assert turn.id == stream.id == deltas[0].turn


def test_result_may_be_asked_for_without_reading(client: Client) -> None:
    assert client.session().turn("x", stream=True).result().text == "You said: x"


def test_the_tool_loop(server: Any, client: Client) -> None:
    seen: list[list[tuple[str, str]]] = []

    def script(command: TurnCreate, history: list[TurnRecord]) -> list[Item]:
        seen.append(outputs(command))
        if len(seen) == 1:
            return [call(1, "add", '{"a":17,"b":25}'), call(2, "fail", "{}"), call(3, "nothing", "{}")]
        if len(seen) == 2:
            return [call(4, "add", '{"a":"x","b":1}')]
        return [say("done")]

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def fail() -> None:
        raise ValueError("no luck")

    server.host.script = script
    session = client.session(tools=[add, fail])
    deltas = []
    with session.turn("go", stream=True) as stream:
        deltas = list(stream)
    turn = stream.result()
    assert turn.text == "done"
    assert seen == [
        [],
        [
            ("call1", "42"),
            ("call2", "error: ValueError: no luck"),
            ("call3", "error: NameError: there is no tool 'nothing'; there are: add, fail"),
        ],
        [("call4", "error: ValueError: argument 'a': Expected `int`, got `str`")],
    ]
    assert len(turn.steps) == 3
    assert [step.id for step in turn.steps] == list(dict.fromkeys(delta.turn for delta in deltas))
    assert turn.steps[1].parent == turn.steps[0].id
    opened = next(command for command in server.host.commands if isinstance(command, SessionOpen))
    assert [tool.name for tool in opened.tools] == ["add", "fail"]


def test_the_step_limit_leaves_a_session_that_can_go_on(server: Any, client: Client) -> None:
    server.host.script = lambda command, history: [call(len(history), "tick", "{}")]

    def tick() -> str:
        return "tock"

    session = client.session(tools=[tick])
    with pytest.raises(StepLimitExceeded, match="max_steps=3") as caught:
        session.turn("go", max_steps=3)
    last = caught.value.turn
    assert (len(last.steps), session.head) == (3, last.id)
    server.host.script = lambda command, history: [say(str(outputs(command)))]
    assert session.turn([tool_output(last.tool_calls[0], "late")]).text == "[('call2', 'late')]"


def test_a_tool_that_is_interrupted_leaves_a_session_that_can_go_on(server: Any, client: Client) -> None:
    """What ran before it is kept; the error says what waits, and both ways on work."""
    server.host.script = lambda command, history: (
        [say(str(outputs(command)))] if history else [call(1, "quick", "{}"), call(2, "slow", "{}")]
    )

    def quick() -> str:
        return "done"

    def slow() -> str:
        raise KeyboardInterrupt

    session = client.session(tools=[quick, slow])
    stream = session.turn("go", stream=True)
    with pytest.raises(KeyboardInterrupt) as caught:
        stream.result()
    (note,) = caught.value.__notes__
    assert "quick (ran), slow (did not run)" in note
    assert "session.rewind('start')" in note
    (turn,) = session.turns()
    assert session.head == turn.id
    branch = session.fork()
    answer = session.turn([tool_output(turn.tool_calls[1], "by hand")])
    assert answer.text == "[('call1', 'done'), ('call2', 'by hand')]"
    branch.rewind("start")
    with pytest.raises(KeyboardInterrupt):
        branch.turn("go")


@pytest.mark.parametrize("refused", [True, False])
def test_results_that_are_refused_or_lost_can_be_given_again(server: Any, client: Client, refused: bool) -> None:
    too_long = SessionError("context_length_exceeded", "the prompt is too long")

    def script(command: TurnCreate, history: list[TurnRecord]) -> list[Item]:
        given = dict(outputs(command))
        if not given:
            return [call(1, "short", "{}"), call(2, "long", "{}")]
        if len(given["call2"]) > 9:
            raise too_long
        return [say(str(given))]

    def short() -> str:
        return "fits"

    def long() -> str:
        if refused:
            server.host.failures[TurnCreate] = too_long
        return "x" * 100

    server.host.script = script
    session = client.session(tools=[short, long])
    with pytest.raises(SessionError, match="context_length_exceeded") as caught:
        session.turn("go")
    server.host.failures.clear()
    assert "short (ran), long (ran)" in caught.value.__notes__[0]
    (turn,) = session.turns()
    answer = session.turn([tool_output(turn.tool_calls[1], "cut")])
    assert answer.text == "{'call1': 'fits', 'call2': 'cut'}"
    with pytest.raises(SessionError, match="turn_not_found") as caught:
        session.rewind("resp_x")
    assert not hasattr(caught.value, "__notes__")


def test_functions_and_schemas_mixed_in_one_answer(server: Any, client: Client) -> None:
    """The function's result waits for the caller's, because one input must answer all calls of a turn."""
    server.host.script = lambda command, history: (
        [say(str(outputs(command)))] if history else [call(1, "mine", "{}"), call(2, "yours", "{}")]
    )

    def mine() -> str:
        return "from the function"

    session = client.session(tools=[mine, {"type": "function", "name": "yours"}])
    turn = session.turn("go")
    assert [asked.name for asked in turn.tool_calls] == ["mine", "yours"]
    answer = session.turn([tool_output(turn.tool_calls[1], "from the caller")])
    assert answer.text == "[('call1', 'from the function'), ('call2', 'from the caller')]"


def test_busy_sessions_refuse_and_many_share_a_socket(server: Any, client: Client) -> None:
    server.host.pause_s = 0.01
    sessions = [client.session() for _ in range(8)]
    with sessions[0].turn("slow", stream=True) as stream:
        with pytest.raises(SessionError) as caught:
            sessions[0].turn("second")
        assert (caught.value.code, caught.value.status, caught.value.retry) == ("session_busy", 409, "never")
        assert stream.result().text == "You said: slow"
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda pair: pair[1].turn(f"n{pair[0]}").text, enumerate(sessions)))
    assert texts == [f"You said: n{number}" for number in range(8)]


@pytest.mark.parametrize("leave", ["break", "with", "close"])
def test_leaving_a_stream_cancels_the_turn(server: Any, client: Client, leave: str) -> None:
    server.host.pause_s = 0.01
    session = client.session()
    stream = session.turn("a" * 4000, stream=True)
    if leave == "break":
        for delta in stream:
            assert delta.channel == "text"
            break
    elif leave == "with":
        with stream:
            next(stream)
    else:
        next(stream)
        stream.close()
    turn = stream.result()
    assert (turn.status, turn.reason, session.head) == ("cancelled", "cancelled", turn.id)
    assert 0 < len(turn.text) < 4000
    assert list(stream) == []
    assert session.turn("next").parent == turn.id


def test_cancel_from_another_thread(server: Any, client: Client) -> None:
    server.host.pause_s = 0.01
    session = client.session()
    session.cancel()  # nothing runs: nothing happens
    timer = threading.Timer(0.1, session.cancel)
    timer.start()
    turn = session.turn("a" * 4000)
    timer.join()
    assert turn.status == "cancelled"
    assert sum(isinstance(command, TurnCancel) for command in server.host.commands) == 1


def test_a_raising_reader_cancels_the_turn(server: Any, client: Client) -> None:
    server.host.pause_s = 0.01
    session = client.session()

    def read_and_fail() -> None:
        with session.turn("a" * 4000, stream=True) as stream:
            for _ in stream:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read_and_fail()
    assert [turn.status for turn in session.turns()] == ["cancelled"]


def test_a_failed_turn_raises_its_error(server: Any, client: Client) -> None:
    def full(command: TurnCreate, history: list[TurnRecord]) -> list[Item]:
        raise SessionError("context_length_exceeded", "maximum context length is 10 tokens; there are 11")

    server.host.script = full
    session = client.session()
    with pytest.raises(SessionError, match="maximum context length is 10 tokens") as caught:
        session.turn("x")
    assert caught.value.code == "context_length_exceeded"
    with session.turn("x", stream=True) as stream:
        with pytest.raises(SessionError):
            list(stream)
        with pytest.raises(RuntimeError, match="ended without a turn"):
            stream.result()


def test_a_lost_connection_is_named_and_the_next_call_connects_again(server: Any, client: Client) -> None:
    server.host.pause_s = 0.05
    session = client.session()
    stream = session.turn("a" * 40, stream=True)
    next(stream)
    socket = client._link._socket
    assert socket is not None
    socket.socket.shutdown(2)
    with pytest.raises(ConnectionFailed, match=r"ws://127.0.0.1:\d+/v1/sessions/ws: the connection was lost"):
        for _ in stream:
            pass
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and session.get().head is None:
        time.sleep(0.02)
    assert session.turn("again").parent == session.turns()[0].id


def test_a_server_that_is_not_there(start_server: Callable[..., Any]) -> None:
    server = start_server()
    client = Client(server.url)
    assert client.ready()
    server.stop()
    assert not client.ready()
    with pytest.raises(ConnectionError, match=r"ws://127.0.0.1:\d+/v1/sessions/ws: cannot connect"):
        client.session()


def test_something_else_answers_there() -> None:
    class Other(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *parts: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        with pytest.raises(ConnectionFailed, match=r"no tokenspeed server answers there \(HTTP 404\)"):
            Client(f"http://127.0.0.1:{other.server_port}").session()


def test_a_wrong_key_is_unauthorized(start_server: Callable[..., Any]) -> None:
    server = start_server(keys=("red=right",))
    for key in (None, "wrong"):
        with pytest.raises(SessionError) as caught:
            Client(server.url, api_key=key).session()
        assert caught.value.code == "unauthorized"
    with Client(server.url, api_key="right") as client:
        assert client.session().turn("x").text == "You said: x"


def test_async_functions_are_refused_before_a_session_opens(server: Any, client: Client) -> None:
    async def later() -> None: ...

    with pytest.raises(TypeError, match="use AsyncClient"):
        client.session(tools=[later])
    assert server.host.commands == []


def test_an_event_that_is_missing_is_an_error(server: Any, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    send = Connection._send
    monkeypatch.setattr(
        Connection, "_send", lambda self, message: None if getattr(message, "seq", 0) == 2 else send(self, message)
    )
    with pytest.raises(ProtocolError, match="event 3 arrived, 2 was expected"):
        client.session().turn("x")


def test_replies_without_what_they_must_say_are_errors(server: Any, client: Client) -> None:
    async def empty(tenant: str, command: Any, channel: str) -> Reply:
        return Reply(command.id)

    session = client.session()
    server.host.request = empty
    with pytest.raises(ProtocolError, match="names no turn"):
        session.turn("x")
    with pytest.raises(ProtocolError, match="names no session"):
        client.session()


def test_closing_again_does_nothing_and_hides_no_error(client: Client) -> None:
    with client.session() as session:
        session.close()
        session.close()
    other = client.session(id=client.session().id)
    client.session(id=other.id).close()
    with pytest.raises(ValueError, match="the caller's own"), other:
        raise ValueError("the caller's own")
