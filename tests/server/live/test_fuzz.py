"""A websocket that is sent anything, and left at any time: the server lives, and the neighbour's answer is the same."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tokenspeed.client import Client, Session, Turn

ENCODINGS = ["json", "msgpack"]
patient = settings(deadline=None, suppress_health_check=list(HealthCheck))


def engines() -> list[str]:
    """The processes that this one has started, the engine's among them."""
    return sorted(
        child
        for task in Path(f"/proc/{os.getpid()}/task").iterdir()
        for child in (task / "children").read_text().split()
    )


class Neighbour:
    """A session that is asked the same question again and again, from a connection of its own."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._expected = self._answer()
        self._engines = engines()

    def check(self) -> None:
        assert self._answer() == self._expected
        assert engines() == self._engines

    def _answer(self) -> list[int]:
        with self._session.fork() as fork:
            turn = fork.turn("What is the door code?", token_ids=True)
            assert turn.output_token_ids is not None
            return turn.output_token_ids


@pytest.fixture(scope="module")
def neighbour(client: Client) -> Iterator[Neighbour]:
    with client.session(temperature=0, max_tokens=12) as session:
        session.turn("The door code is 7319.")
        yield Neighbour(session)


SOCKET_BUFFER = 1 << 16


class Wire:
    """A websocket and its form."""

    def __init__(self, live: Any, encoding: str) -> None:
        self.encoding = encoding
        self._live = live
        self._socket: ClientConnection | None = None
        self._count = 0

    @property
    def socket(self) -> ClientConnection:
        if self._socket is None:
            # Entering is how every version of the library hands out the connection without complaint.
            self._socket = connect(
                self._live.websocket_url,
                subprotocols=[f"tokenspeed.v1.{self.encoding}"],  # type: ignore[list-item]
                max_size=None,
                ping_interval=None,
            ).__enter__()
        return self._socket

    def encode(self, value: Any) -> str | bytes:
        return msgspec.msgpack.encode(value) if self.encoding == "msgpack" else json.dumps(value)

    def receive(self) -> list[dict[str, Any]]:
        frame = self.socket.recv(timeout=30)
        decoded = msgspec.msgpack.decode(frame) if isinstance(frame, bytes) else json.loads(frame)
        messages = decoded if isinstance(decoded, list) else [decoded]
        for message in messages:
            codes = [message.get("code"), (message.get("error") or {}).get("code")]
            assert "engine_error" not in codes, message
        return messages

    def ask(self, **command: Any) -> dict[str, Any]:
        self._count += 1
        id = f"ask{self._count}"
        self.socket.send(self.encode({**command, "id": id}))
        while True:
            for message in self.receive():
                if message.get("id") == id:
                    return message

    def send(self, frame: str | bytes) -> bool:
        """Send what may be anything; whether the connection answers afterwards. One that was closed is opened anew."""
        closed: ConnectionClosed | None = None
        try:
            self.socket.send(frame)
            assert self.ask(type="session.list")["type"] == "reply"
        except ConnectionClosed as error:
            closed = error
        if closed is None:
            return True
        # A server that closes while much is still on its way to it resets the connection, and its word may be lost.
        assert closed.rcvd is not None or len(frame) > SOCKET_BUFFER, "the connection broke without a word"
        assert closed.rcvd is None or closed.rcvd.code in (1007, 1009), closed
        self._socket = None
        return False

    def drop(self) -> None:
        """Go without a word."""
        if self._socket is not None:
            self._socket.socket.close()
            self._socket = None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@pytest.fixture(params=ENCODINGS)
def wire(live: Any, request: pytest.FixtureRequest) -> Iterator[Wire]:
    wire = Wire(live, request.param)
    yield wire
    wire.close()


NUMBERS = [0, -1, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30]
FLOATS = [1e308, -1e308, 0.5, 5e-324, math.nan, math.inf, -math.inf]
OTHERS = [None, True, "", "\0", "x" * 100_000, [], {}, [[]], {"": {}}]
NASTY = st.one_of(
    st.sampled_from([*NUMBERS, *FLOATS, *OTHERS]),
    st.integers(-(2**64), 2**64),
    st.floats(),
    st.text(max_size=20),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    ),
    st.integers(1, 80).map(lambda depth: _nested(depth)),
)
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
SAMPLING = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.0, "seed": 1, "max_tokens": 2, "stop": ["x"]}
SAMPLING |= {"stop_token_ids": [1], "ignore_eos": False, "repetition_penalty": 1.1, "presence_penalty": 0.1}
SAMPLING |= {"frequency_penalty": 0.1, "logit_bias": {"3": 1.0}, "logprobs": True, "top_logprobs": 1}
SAMPLING |= {"forced_token_ids": [5]}


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": [value]}
    return value


def commands(session: str, turn: str) -> list[dict[str, Any]]:
    """One right command of each kind, with every field."""
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    return [
        {"type": "session.open", "model": "pocket", "instructions": "x", "tools": [TOOL], "sampling": SAMPLING}
        | {"reasoning": "keep", "labels": {"a": "b"}, "from": turn},
        {"type": "turn.create", "session": session, "input": [message], "sampling": SAMPLING, "token_ids": True}
        | {"tools": [TOOL], "instructions": "y", "generate": True, "n": 1, "expect_head": turn},
        {"type": "turn.create", "parent": turn, "input": "hi", "sampling": SAMPLING, "n": 2},
        {"type": "turn.get", "turn": turn, "token_ids": True},
        {"type": "turn.cancel", "turn": turn, "keep": "partial"},
        {"type": "session.regenerate", "session": session, "of": turn, "sampling": SAMPLING},
        {"type": "session.update", "session": session, "instructions": "z", "tools": [TOOL], "sampling": SAMPLING}
        | {"reasoning": "drop", "labels": {"c": "d"}},
        {"type": "session.fork", "session": session, "at": turn, "n": 2},
        {"type": "session.rewind", "session": session, "to": turn},
        {"type": "session.get", "session": session},
        {"type": "session.list", "labels": {"a": "b"}, "limit": 3, "after": session},
        {"type": "session.turns", "session": session, "token_ids": True},
        {"type": "session.usage", "session": session},
        {"type": "session.close", "session": session},
    ]


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something can be replaced."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inner for place in [(*at, key), *places(item, (*at, key))]]


def replaced(value: Any, place: tuple[Any, ...], by: Any) -> Any:
    if not place:
        return by
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = replaced(value[place[0]], place[1:], by)
    return copy


@pytest.fixture(scope="module")
def origin(client: Client) -> Iterator[Session]:
    with client.session(temperature=0, max_tokens=2) as session:
        session.turn("Hello!")
        yield session


def test_right_commands_are_taken(wire: Wire, origin: Session) -> None:
    """The mutations below begin with something that works."""
    for number in range(len(commands("", ""))):
        with origin.fork() as fork:
            command = commands(fork.id, str(fork.head))[number]
            answer = wire.ask(**command)
            refused = answer["type"] == "error"
            assert not refused or command["type"] == "session.update", answer  # its rule is not the template's
            if command["type"] == "session.close":
                fork.close = lambda: None  # type: ignore[method-assign]


def test_mutated_commands(wire: Wire, origin: Session, neighbour: Neighbour) -> None:
    @settings(patient, max_examples=150)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        fork = origin.fork()
        command = {"id": "c", **data.draw(st.sampled_from(commands(fork.id, str(fork.head))))}
        for _ in range(data.draw(st.integers(1, 2))):
            place = data.draw(st.sampled_from(places(command)))
            # Two mutations may meet: what was replaced is no longer there to be replaced again.
            with suppress(TypeError, KeyError, IndexError):
                command = replaced(command, place, data.draw(NASTY))
        if isinstance(command, dict) and data.draw(st.booleans()):
            command[data.draw(st.text(max_size=5))] = data.draw(NASTY)
        try:
            frame = wire.encode(command)
        except OverflowError:  # msgpack has no such integers
            return
        assert wire.send(frame)

    run()
    neighbour.check()


def test_random_bytes(wire: Wire, neighbour: Neighbour) -> None:
    @settings(patient, max_examples=100)
    @given(frame=st.binary(max_size=200) | st.text(max_size=200))
    def run(frame: str | bytes) -> None:
        assert wire.send(frame)

    run()
    neighbour.check()


@pytest.mark.parametrize(
    "frame",
    [
        "[" * 10_000,
        '{"a":' * 10_000 + "1" + "}" * 10_000,
        '{"type":"session.open","id":"c","tools":[{"type":"function","name":"a","parameters":{"x":' + "[" * 10_000,
        '{"type":"session.list","id":"c","limit":' + "9" * 10_000 + "}",
        '{"type":"session.list","id":"c","limit":1e' + "9" * 1000 + "}",
        '{"type":"session.list","id":"' + "\\ud800" + '"}',
        '"' * 10_000,
        b"\x91" * 10_000 + b"\x01",
        b"\x81\xa1a" * 10_000 + b"\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff\xa1a",
        b"\xdb\xff\xff\xff\xffabc",
        b"\xcb" + struct.pack(">d", math.nan),
        b"\xc7\xff\x05" + b"\0" * 255,
    ],
    ids=range(14),
)
def test_hostile_frames(wire: Wire, neighbour: Neighbour, frame: str | bytes) -> None:
    assert wire.send(frame)
    neighbour.check()


def test_a_frame_far_past_the_limit(wire: Wire, neighbour: Neighbour) -> None:
    frame = wire.encode({"type": "session.open", "id": "c", "instructions": "x" * (17 * 2**20)})
    assert wire.send(frame), "a frame that is only a little too long is refused in words"
    assert not wire.send(wire.encode({"instructions": "x" * (65 * 2**20)}))
    neighbour.check()


def test_a_socket_closed_at_every_event(wire: Wire, neighbour: Neighbour, origin: Session) -> None:
    """The turn is finished and kept, whenever its client goes without a word."""
    whole: Turn | None = None
    index = 0
    while True:
        with origin.fork() as fork:
            wire.socket.send(
                wire.encode({"type": "turn.create", "id": "c", "session": fork.id, "input": "Who are you?"})
            )
            seen, over = 0, False
            while seen <= index and not over:
                for message in wire.receive():
                    seen += 1
                    over = over or message["type"] == "turn.ended"
            wire.drop()
            turns = fork.turns()
            while turns[-1].status == "running":
                turns = fork.turns()
            ended = turns[-1]
            whole = whole or ended
            assert len(turns) == 2
            assert (ended.status, ended.text, ended.usage.output) == (whole.status, whole.text, whole.usage.output)
        if over:
            break
        index += 1
    assert index >= 2
    neighbour.check()
