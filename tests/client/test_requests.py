from __future__ import annotations

import pytest

from tokenspeed.client.address import Address
from tokenspeed.client.protocol.commands import Sampling, TurnCreate
from tokenspeed.client.protocol.items import FunctionCallOutputItem, MessageItem
from tokenspeed.client.requests import TurnInput, input_of, sampling_of, turn_request, with_held
from tokenspeed.client.tools import tool_output


def test_input_in_every_form_becomes_items() -> None:
    assert input_of("hi") == "hi"
    items = input_of(
        [
            {"role": "user", "content": "a"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
            {"type": "function_call_output", "call_id": "c", "output": "7"},
            tool_output("d", 8),
            "e",
        ]
    )
    assert [type(item) for item in items] == [
        MessageItem,
        MessageItem,
        FunctionCallOutputItem,
        FunctionCallOutputItem,
        MessageItem,
    ]
    assert [item.text for item in items] == ["a", "b", "7", "8", "e"]
    assert input_of({"role": "user", "content": "a"}) == [MessageItem("user", "a")]


@pytest.mark.parametrize(
    "bad",
    [
        3,
        [3],
        {"type": "image"},
        {"role": "robot", "content": "x"},
        [None],
        {"role": "assistant", "content": "x", "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]},
    ],
)
def test_input_of_no_known_form_is_refused(bad: object) -> None:
    with pytest.raises(TypeError):
        input_of(bad)


def test_single_options_win_over_the_bundle() -> None:
    assert sampling_of(None, {}) is None
    assert sampling_of(Sampling(temperature=1.0, seed=3), {"temperature": 0}) == Sampling(temperature=0.0, seed=3)
    assert sampling_of({"top_k": 5}, {}) == Sampling(top_k=5)
    assert sampling_of(None, {"stop": "###"}) == sampling_of({"stop": ["###"]}, {}) == Sampling(stop=["###"])
    assert sampling_of(None, {"logit_bias": {5: 1, "6": -1.5}}) == Sampling(logit_bias={"5": 1.0, "6": -1.5})
    with pytest.raises(TypeError, match="unknown option 'temprature'"):
        sampling_of(None, {"temprature": 1})
    with pytest.raises(TypeError, match="sampling"):
        sampling_of({"seed": "x"}, {})
    for wrong in (
        {"stop": 3},
        {"stop": [3]},
        {"logit_bias": {True: 1}},
        {"logit_bias": {None: 1}},
        {"logit_bias": [5]},
    ):
        with pytest.raises(TypeError, match="sampling"):
            sampling_of(None, wrong)


def test_held_answers_join_the_callers() -> None:
    held = (tool_output("a", "mine"), tool_output("b", "mine"))

    def command_of(value: TurnInput) -> TurnCreate:
        command = turn_request("s", value, {}).command
        assert isinstance(command, TurnCreate)
        return with_held(command, held)

    command = command_of([tool_output("b", "theirs"), tool_output("c", "theirs")])
    assert [(item.call_id, item.text) for item in command.input] == [("a", "mine"), ("b", "theirs"), ("c", "theirs")]
    assert command_of("something else").input == "something else"


def test_the_address_comes_from_arguments_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENSPEED_BASE_URL", raising=False)
    monkeypatch.delenv("TOKENSPEED_API_KEY", raising=False)
    assert Address.of(None, None) == Address("http://localhost:8000", None)
    monkeypatch.setenv("TOKENSPEED_BASE_URL", "https://host/prefix/")
    monkeypatch.setenv("TOKENSPEED_API_KEY", "secret")
    address = Address.of(None, None)
    assert address.websocket_url == "wss://host/prefix/v1/sessions/ws"
    assert address.headers == {"Authorization": "Bearer secret"}
    assert Address.of("ws://other:1", "k") == Address("http://other:1", "k")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "/path"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must look like http://localhost:8000"):
        Address.of(url, None)
