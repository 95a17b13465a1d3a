"""Nothing that a client sends is decoded before it was bounded, and nothing it sends is fatal."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenspeed.client.protocol.commands import SessionGet, TurnCreate
from tokenspeed.client.protocol.events import ErrorEvent
from tokenspeed.server.frames import exceeds_depth, read_frame

MAX = 4096

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\[]{}é', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='"[{\\', max_size=3), inner, max_size=3)
    ),
    max_leaves=20,
)


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max((depth_of(inner) for inner in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth_of(inner) for inner in value), default=0)
    return 0


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
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
    for frame in (shape * depth + "1" + closing * depth, shape * depth):
        (answer,) = read_frame(frame, 10**7)
        assert isinstance(answer, ErrorEvent)
        too_deep = "nested more than 64 deep" in answer.message
        assert too_deep == (depth > 64)


@pytest.mark.parametrize("unit", ['"', '\\"', '"\\', "[", "[]", '["', "{[", '"a",'])
def test_the_check_is_linear_on_hostile_input(unit: str) -> None:
    """A quadratic scan of a megabyte would take minutes."""
    begun = time.monotonic()
    exceeds_depth((unit * (2**20 // len(unit))).encode(), 64)
    assert time.monotonic() - begun < 5


def test_a_frame_is_one_command_or_several() -> None:
    get = '{"type":"session.get","id":"c1","session":"s"}'
    assert read_frame(get, MAX) == [SessionGet("c1", "s")]
    both = read_frame(f'[{get},{{"type":"turn.create","id":"c2","session":"s","input":"hi"}}]', MAX)
    assert both == [SessionGet("c1", "s"), TurnCreate("c2", "s", "hi")]
    assert read_frame("[]", MAX) == []


def test_one_bad_command_does_not_take_its_neighbours_along() -> None:
    frame = '[{"type":"session.get","id":"c1","session":"s"},{"type":"session.get","id":"c2"},{"type":"x","id":"c3"},7]'
    good, missing, unknown, number = read_frame(frame, MAX)
    assert good == SessionGet("c1", "s")
    assert (missing.id, missing.code) == ("c2", "bad_request")
    assert "session" in missing.message
    assert (unknown.id, number.id) == ("c3", None)


@pytest.mark.parametrize("frame", ["", "{", "nonsense", '{"type":"session.list","id":NaN}', b'{"type":"session.list"}'])
def test_what_is_no_command_is_answered(frame: str | bytes) -> None:
    (answer,) = read_frame(frame, MAX)
    assert isinstance(answer, ErrorEvent)
    assert (answer.code, answer.retry, answer.id) == ("bad_request", "never", None)


def test_size_is_counted_in_bytes() -> None:
    fits = json.dumps({"type": "session.get", "id": "c", "session": "é" * 100}, ensure_ascii=False)
    size = len(fits.encode())
    assert isinstance(read_frame(fits, size)[0], SessionGet)
    (answer,) = read_frame(fits, size - 1)
    assert (answer.code, answer.detail) == ("payload_too_large", {"bytes": size, "max_bytes": size - 1})
