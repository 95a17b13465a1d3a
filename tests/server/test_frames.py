"""Nothing that a client sends is decoded before it was bounded, and nothing it sends is fatal."""

from __future__ import annotations

import json
import struct
import time
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenspeed.client.protocol.codec import JSON, MSGPACK, Codec
from tokenspeed.client.protocol.commands import Command, SessionGet
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import ErrorEvent
from tokenspeed.client.protocol.given import GivenTurn
from tokenspeed.server.bounds import MAX_COMMANDS, check_json, check_msgpack, exceeds_depth
from tokenspeed.server.frames import read_frame

MAX = 4096

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\[]{}é', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='"[{\\', max_size=3), inner, max_size=3)
    ),
    max_leaves=20,
)
patient = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max((depth_of(inner) for inner in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth_of(inner) for inner in value), default=0)
    return 0


def read(codec: Codec, value: Any, max_bytes: int = MAX) -> list[Command | ErrorEvent]:
    return read_frame(codec, msgspec.msgpack.encode(value) if codec.binary else json.dumps(value), max_bytes)


def refusal(frame: str | bytes, max_bytes: int = 10**7) -> ErrorEvent:
    (answer,) = read_frame(MSGPACK if isinstance(frame, bytes) else JSON, frame, max_bytes)
    assert isinstance(answer, ErrorEvent)
    return answer


@patient
@given(value=json_values, ascii_only=st.booleans())
def test_depth_is_that_of_the_decoded_value(value: object, ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    depth = depth_of(value)
    assert not exceeds_depth(data, depth)
    assert depth == 0 or exceeds_depth(data, depth - 1)


@pytest.mark.parametrize("depth", [64, 65, 1000, 100_000])
@pytest.mark.parametrize("shape", ["[", '{"a":'])
def test_nesting_past_64_is_refused(depth: int, shape: str) -> None:
    closing = "]" if shape == "[" else "}"
    packed = (b"\x91" if shape == "[" else b"\x81\xa1a") * depth
    for frame in (shape * depth + "1" + closing * depth, shape * depth, packed + b"\x01"):
        too_deep = "nested more than 64 deep" in refusal(frame).message
        assert too_deep == (depth > 64)


@pytest.mark.parametrize("unit", ['"', '\\"', '"\\', "[", "[]", '["', "{[", '"a",', "1", "1.", "-1e"])
def test_the_check_is_linear_on_hostile_input(unit: str) -> None:
    """A quadratic scan of a megabyte would take minutes."""
    begun = time.monotonic()
    with suppress(SessionError):
        check_json((unit * (2**20 // len(unit))).encode())
    assert time.monotonic() - begun < 5


@patient
@given(value=json_values)
def test_what_json_can_say_passes_in_both_forms(value: object) -> None:
    def small(value: object) -> bool:
        if isinstance(value, list | dict):
            return all(map(small, value.values() if isinstance(value, dict) else value))
        return not isinstance(value, int) or -(2**63) <= value < 2**64

    if small(value):
        check_msgpack(msgspec.msgpack.encode(value))
        check_json(json.dumps(value).encode())
    else:
        with pytest.raises(SessionError, match="64 bits"):
            check_json(json.dumps(value).encode())


@patient
@given(value=json_values.filter(lambda value: isinstance(value, list)), cut=st.integers(1, 400))
def test_msgpack_that_ends_too_early_is_refused(value: Any, cut: int) -> None:
    try:
        data = msgspec.msgpack.encode(value)
    except OverflowError:
        return
    assert refusal(data[: max(0, len(data) - cut)]).code == "bad_request"


@given(data=st.binary(max_size=60))
@settings(deadline=None, max_examples=500)
def test_no_bytes_are_fatal(data: bytes) -> None:
    for answer in read_frame(MSGPACK, data, MAX):
        assert isinstance(answer, ErrorEvent)


def test_an_array_is_not_allocated_for_its_announced_length() -> None:
    for header in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdd\x00\x00\x00\x09" * 20, b"\xdc\xff\xff"):
        assert "ends before the values" in refusal(header + b"\x01" * 8).message
    # Every level for itself announces no more than the bytes that follow; all of them together do.
    assert "ends before the values" in refusal(b"\xdd\x00\x10\x00\x00" * 60 + b"\x00" * 2**20).message


def test_many_values_are_refused_in_bounded_time() -> None:
    begun = time.monotonic()
    assert "more than 1048576 values" in refusal(b"\xdd\x00\x90\x00\x00" + b"\x00" * 0x900000).message
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "value",
    [
        b"\xc4\x01\xff",  # binary data
        b"\xd4\x05\x00",  # an extension
        b"\xd6\xff\x00\x00\x00\x00",  # a time
        b"\xc1",
        b"\xcb" + struct.pack(">d", float("nan")),
        b"\xcb" + struct.pack(">d", float("-inf")),
        b"\xca" + struct.pack(">f", float("inf")),
        b"\x81\x01\x02",  # a key that is a number
        b"\x81\xc0\x02",
        b"\x81\x90\x02",
    ],
)
def test_msgpack_says_no_more_than_json(value: bytes) -> None:
    frame = b"\x83\xa4type\xacsession.open\xa2id\xa1c\xa6labels" + value
    assert refusal(frame).code == "bad_request"
    assert refusal(frame).id is None


@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 20, "1" * 5000, "-" + "9" * 19]
)
def test_numbers_that_do_not_fit_are_refused(text: str) -> None:
    for field in (
        '"sampling":{"temperature":%s}',
        '"sampling":{"seed":%s}',
        '"tools":[{"type":"function","name":"a","parameters":{"x":%s}}]',
    ):
        assert refusal('{"type":"session.open","id":"c",' + field % text + "}").code == "bad_request"


@pytest.mark.parametrize(
    "text", ["18446744073709551615", "-9223372036854775808", "0." + "3" * 30, "1" * 25 + ".5", "1e-300"]
)
def test_numbers_that_fit_pass(text: str) -> None:
    check_json(f'{{"a":"{"9" * 40}","b":[{text}]}}'.encode())


@pytest.mark.parametrize("codec", [JSON, MSGPACK])
def test_a_frame_is_one_command_or_several(codec: Codec) -> None:
    get = {"type": "session.get", "id": "c1", "session": "s", "of_a_later_version": [1]}
    assert read(codec, get) == [SessionGet("c1", "s")]
    both = read(codec, [get, {"type": "turn.create", "id": "c2", "session": "s", "input": "hi"}])
    assert both == [SessionGet("c1", "s"), GivenTurn("c2", "s", "hi")]
    assert read(codec, []) == []


@pytest.mark.parametrize("codec", [JSON, MSGPACK])
def test_one_bad_command_does_not_take_its_neighbours_along(codec: Codec) -> None:
    good, missing, unknown, number = read(
        codec,
        [
            {"type": "session.get", "id": "c1", "session": "s"},
            {"type": "session.get", "id": "c2"},
            {"type": "x", "id": "c3"},
            7,
        ],
    )
    assert good == SessionGet("c1", "s")
    assert (missing.id, missing.code) == ("c2", "bad_request")
    assert "session" in missing.message
    assert (unknown.id, number.id) == ("c3", None)


@pytest.mark.parametrize(
    "frame", ["", "{", "nonsense", '{"type":"session.list","id":NaN}', b"", b'{"type":"x"}', b"\x01\x01"]
)
def test_what_is_no_command_is_answered(frame: str | bytes) -> None:
    answer = refusal(frame)
    assert (answer.code, answer.retry, answer.id) == ("bad_request", "never", None)


def test_each_subprotocol_has_its_kind_of_frame() -> None:
    (answer,) = read_frame(JSON, b'{"type":"session.list","id":"c"}', MAX)
    assert (answer.code, answer.message) == ("bad_request", "the subprotocol tokenspeed.v1.json takes text frames")
    (answer,) = read_frame(MSGPACK, '{"type":"session.list","id":"c"}', MAX)
    assert (answer.code, answer.message) == ("bad_request", "the subprotocol tokenspeed.v1.msgpack takes binary frames")


def test_size_is_counted_in_bytes() -> None:
    fits = json.dumps({"type": "session.get", "id": "c", "session": "é" * 100}, ensure_ascii=False)
    packed = msgspec.msgpack.encode(json.loads(fits))
    for codec, frame in ((JSON, fits), (MSGPACK, packed)):
        size = len(frame.encode()) if isinstance(frame, str) else len(frame)
        assert isinstance(read_frame(codec, frame, size)[0], SessionGet)
        answer = refusal(frame, size - 1)
        assert (answer.code, answer.detail) == ("payload_too_large", {"bytes": size, "max_bytes": size - 1})


@pytest.mark.parametrize("codec", [JSON, MSGPACK])
def test_a_frame_of_too_many_commands_is_answered_once(codec: Codec) -> None:
    many = [0] * (MAX_COMMANDS + 1)
    frame = json.dumps(many) if codec is JSON else msgspec.msgpack.encode(many)
    (answer,) = read_frame(codec, frame, 2**20)
    assert isinstance(answer, ErrorEvent)
    assert answer.code == "bad_request"
    assert f"{MAX_COMMANDS + 1} commands; at most {MAX_COMMANDS}" in answer.message
    fewer = json.dumps(many[1:]) if codec is JSON else msgspec.msgpack.encode(many[1:])
    assert len(read_frame(codec, fewer, 2**20)) == MAX_COMMANDS
