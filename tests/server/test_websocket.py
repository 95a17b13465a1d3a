"""The websocket as any client may use it: raw frames, in and out of order, good and bad."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tokenspeed.client.protocol.commands import SessionGet, TurnCreate
from tokenspeed.client.protocol.items import MessageItem
from tokenspeed.server.connection import Limits

JSON = "tokenspeed.v1.json"
MSGPACK = "tokenspeed.v1.msgpack"


@contextmanager
def socket_to(server: Any, **options: Any) -> Iterator[ClientConnection]:
    options.setdefault("subprotocols", [JSON])
    with connect(server.websocket_url, **options) as socket:
        yield socket


def messages(socket: ClientConnection) -> Iterator[dict[str, Any]]:
    while True:
        frame = json.loads(socket.recv(timeout=10))
        yield from frame if isinstance(frame, list) else [frame]


def ask(socket: ClientConnection, **command: Any) -> dict[str, Any]:
    socket.send(json.dumps(command))
    return next(message for message in messages(socket) if message.get("id") == command["id"])


def open_session(socket: ClientConnection) -> str:
    return str(ask(socket, type="session.open", id="open")["session"]["id"])


def refusal(server: Any, **options: Any) -> tuple[int, dict[str, Any]]:
    with socket_to(server, **options) as socket:
        told = json.loads(socket.recv(timeout=10))
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(timeout=10)
        assert caught.value.rcvd is not None
        return caught.value.rcvd.code, told


@pytest.mark.parametrize("reply_delay_s", [0.0, 0.1])
def test_a_turn_answers_then_tells(server: Any, reply_delay_s: float) -> None:
    server.host.reply_delay_s = reply_delay_s
    with socket_to(server) as socket:
        assert socket.subprotocol == JSON
        session = open_session(socket)
        socket.send(json.dumps({"type": "turn.create", "id": "c2", "session": session, "input": "hi"}))
        seen = []
        for message in messages(socket):
            seen.append(message)
            if message["type"] == "turn.ended":
                break
    assert seen[0] == {"type": "reply", "id": "c2", "turn": seen[1]["turn"]}
    assert [message["type"] for message in seen[1:2]] == ["turn.started"]
    assert [message["seq"] for message in seen[1:]] == list(range(len(seen) - 1))
    assert "".join(message["text"] for message in seen if message["type"] == "turn.delta") == "You said: hi"


def test_events_that_are_ready_together_share_a_frame(server: Any) -> None:
    """The scripted host tells a whole turn at once, so it must not take a frame an event."""
    with socket_to(server) as socket:
        session = open_session(socket)
        socket.send(json.dumps({"type": "turn.create", "id": "c2", "session": session, "input": "x" * 100}))
        frames = []
        while not frames or not any(message["type"] == "turn.ended" for message in frames[-1]):
            frame = json.loads(socket.recv(timeout=10))
            frames.append(frame if isinstance(frame, list) else [frame])
    assert sum(map(len, frames)) > 25
    assert len(frames) <= 4


def test_a_slow_command_holds_up_its_session_only(server: Any) -> None:
    server.host.delays[SessionGet] = 0.3
    with socket_to(server) as socket:
        session = open_session(socket)
        for id, type, more in (("slow", "session.get", {}), ("behind", "session.turns", {}), ("other", "", {})):
            command = (
                {"type": type, "id": id, "session": session, **more} if type else {"type": "session.list", "id": id}
            )
            socket.send(json.dumps(command))
        incoming = messages(socket)
        order = [next(incoming)["id"] for _ in range(3)]
    assert order == ["other", "slow", "behind"]


@pytest.mark.parametrize(
    "frame",
    [
        "",
        "nonsense",
        "[" * 1000,
        '{"a":' * 1000,
        '{"type":"unknown","id":"c"}',
        '{"type":"session.get"}',
        b"\x00\x01",
        "7",
    ],
)
def test_a_bad_frame_is_answered_and_the_connection_stays(server: Any, frame: str | bytes) -> None:
    with socket_to(server) as socket:
        socket.send(frame)
        answer = json.loads(socket.recv(timeout=10))
        assert (answer["type"], answer["code"]) == ("error", "bad_request")
        assert open_session(socket)


def test_a_frame_past_the_limit_is_refused_in_words_and_a_huge_one_by_closing(start_server: Callable[..., Any]) -> None:
    server = start_server(limits=Limits(max_frame_bytes=1000))
    command = {"type": "session.open", "id": "c", "instructions": "x" * 2000}
    with socket_to(server) as socket:
        socket.send(json.dumps(command))
        answer = json.loads(socket.recv(timeout=10))
        assert answer["code"] == "payload_too_large"
        assert answer["detail"]["max_bytes"] == 1000
        socket.send(json.dumps({**command, "instructions": "x" * 5000}))
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(timeout=10)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1009


def test_a_key_is_asked_for(start_server: Callable[..., Any]) -> None:
    server = start_server(keys=("red=right",))
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        code, told = refusal(server, additional_headers=headers)
        assert (code, told["code"], told["retry"]) == (4401, "unauthorized", "never")
    with socket_to(server, additional_headers={"Authorization": "Bearer right"}) as socket:
        assert open_session(socket)


def test_tenants_do_not_see_each_other(start_server: Callable[..., Any]) -> None:
    server = start_server(keys=("red=r", "blue=b"))
    with socket_to(server, additional_headers={"Authorization": "Bearer r"}) as socket:
        session = open_session(socket)
    with socket_to(server, additional_headers={"Authorization": "Bearer b"}) as socket:
        assert ask(socket, type="session.list", id="l")["sessions"] == []
        assert ask(socket, type="session.get", id="g", session=session)["code"] == "session_not_found"


def test_pages_of_other_origins_are_refused(start_server: Callable[..., Any]) -> None:
    server = start_server(origins=("https://app.example",))
    code, told = refusal(server, origin="https://evil.example")
    assert (code, told["code"]) == (4401, "unauthorized")
    with socket_to(server, origin="https://app.example") as socket:
        assert open_session(socket)
    with socket_to(server, origin=server.url) as socket:
        assert open_session(socket)


def test_subprotocols(server: Any) -> None:
    code, told = refusal(server, subprotocols=["tokenspeed.v9.xml", "other"])
    assert code == 4400
    assert JSON in told["message"]
    with socket_to(server, subprotocols=[MSGPACK, JSON]) as socket:
        assert socket.subprotocol == MSGPACK
        socket.send(msgspec.msgpack.encode({"type": "session.open", "id": "c1"}))
        assert msgspec.msgpack.decode(socket.recv(timeout=10))["session"]["model"] == "scripted"
    with socket_to(server, subprotocols=["tokenspeed.v9.xml", JSON]) as socket:
        assert socket.subprotocol == JSON
    with socket_to(server, subprotocols=None) as socket:
        assert socket.subprotocol is None
        assert open_session(socket)


def test_a_turn_whose_client_left_is_finished_and_counted(server: Any) -> None:
    server.host.pause_s = 0.02
    with socket_to(server) as socket:
        session = open_session(socket)
        ask(socket, type="turn.create", id="c2", session=session, input="a" * 40)
    assert server.host.closed_channels == []
    with socket_to(server) as socket:
        for attempt in range(200):
            turns = ask(socket, type="session.turns", id=f"t{attempt}", session=session)["turns"]
            if turns:
                break
            time.sleep(0.02)
        assert [turn["status"] for turn in turns] == ["completed"]
    for _ in range(200):
        if 'tokenspeed_turns_total{status="completed"} 1.0' in httpx.get(f"{server.url}/metrics").text:
            break
        time.sleep(0.02)
    else:
        pytest.fail("the turn was not counted")
    assert "ws1" in server.host.closed_channels


def test_a_fault_of_the_server_is_told_without_its_words(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    server.host.failures[TurnCreate] = RuntimeError("secret")
    with socket_to(server) as socket:
        session = open_session(socket)
        answer = ask(socket, type="turn.create", id="c", session=session, input="x")
        assert answer["code"] == "engine_error"
        assert "secret" not in json.dumps(answer)
        assert open_session(socket)
    assert "secret" in caplog.text


def test_a_client_that_does_not_read_leaves_events_with_the_host(start_server: Callable[..., Any]) -> None:
    """Its unread frames fill the sockets' buffers, then the server stops taking events; nothing is lost."""
    server = start_server(limits=Limits(max_unsent=8))
    text = "y" * 30_000_000  # more than the buffers of both ends hold
    server.host.piece_size = 100_000
    server.host.script = lambda command, history: [MessageItem("assistant", text)]
    with socket_to(server, max_size=None, max_queue=1) as socket:
        session = open_session(socket)
        socket.send(json.dumps({"type": "turn.create", "id": "c", "session": session, "input": "x"}))
        time.sleep(0.5)
        assert server.host.waiting("ws1") > 50
        told = ""
        for message in messages(socket):
            told += message["text"] if message["type"] == "turn.delta" else ""
            if message["type"] == "turn.ended":
                break
    assert told == text


def test_a_stopping_server_says_so(start_server: Callable[..., Any]) -> None:
    server = start_server()
    server.host.pause_s = 0.2
    with socket_to(server) as socket:
        session = open_session(socket)
        ask(socket, type="turn.create", id="c", session=session, input="a" * 100)
        begun = time.monotonic()
        server.stop()
        assert time.monotonic() - begun < 4
        with pytest.raises(ConnectionClosed) as caught:
            list(messages(socket))
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1001
