"""`docs/message-shapes.md` over the wire, by a real engine: each kind of contents, and sequences of items, by request
and in both forms of the websocket. Nothing that is given fails in the server; after a refusal the session goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from websockets.sync.client import connect

import tokenspeed.pocket
from tokenspeed.client import Client, Session
from tokenspeed.client.protocol.errors import ERROR_RULES
from tokenspeed.client.protocol.items import FunctionCallOutputItem

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
CALL = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
ROLES = {"U": "user", "E": "user", "S": "system", "D": "developer", "A": "assistant"}
ONE = {"max_tokens": 1, "temperature": 0.0}
Taken = tuple[tuple[int, str] | None, Any]
"""The status and code of a refusal, if it was one; its message, or the prompt's ids."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(tokenspeed.pocket.DIRECTORY / "tokenizer.json"))


@pytest.fixture(scope="module", params=["request", "json", "msgpack"])
def take(live: Any, request: pytest.FixtureRequest) -> Iterator[Callable[[str, str], Taken]]:
    """Takes a turn on a session; the input is given as JSON text."""
    if request.param == "request":
        with httpx.Client(base_url=live.url, timeout=60) as http:
            yield lambda session, text: _by_request(http, session, text)
        return
    protocol: Any = f"tokenspeed.v1.{request.param}"
    with connect(live.websocket_url, subprotocols=[protocol], ping_interval=None) as socket:
        yield lambda session, text: _by_websocket(socket, request.param == "msgpack", session, text)


def _by_request(http: httpx.Client, session: str, text: str) -> Taken:
    body = f'{{"input": {text}, "sampling": {json.dumps(ONE)}, "token_ids": true}}'
    headers = {"content-type": "application/json"}
    answer = http.post(f"/v1/sessions/{session}/turns", content=body.encode(), headers=headers)
    told = answer.json()
    if answer.status_code == 200:
        return None, told["prompt_token_ids"]
    return (answer.status_code, told["code"]), told["message"]


def _by_websocket(socket: Any, binary: bool, session: str, text: str) -> Taken:
    rest = f'"type": "turn.create", "id": "c", "session": "{session}", "sampling": {json.dumps(ONE)}, "token_ids": true'
    frame: Any = f'{{"input": {text}, {rest}}}'
    if binary:
        # Text that is no Unicode goes as the bytes that a careless client would write.
        frame = msgspec.msgpack.encode(json.loads(frame)) if "\\ud800" not in frame else _careless(json.loads(frame))
    socket.send(frame)
    while True:
        received = socket.recv(timeout=60)
        messages = msgspec.msgpack.decode(received) if binary else json.loads(received)
        for message in messages if isinstance(messages, list) else [messages]:
            if message["type"] == "error":
                return (ERROR_RULES[message["code"]].status, message["code"]), message["message"]
            if message["type"] == "turn.ended":
                assert message["status"] != "failed", message
                return None, message["prompt_token_ids"]


def _careless(command: dict[str, Any]) -> bytes:
    marked = msgspec.msgpack.encode({**command, "input": "???"})
    return marked.replace(b"\xa3???", b"\xa3" + command["input"].encode(errors="surrogatepass"))


@pytest.fixture(scope="module")
def reach(client: Client, tokenizer: Tokenizer) -> Iterator[Callable[[str, int], tuple[Session, list[str], list[int]]]]:
    """A new session that stands somewhere, the calls of its head and the ids so far."""
    heads: dict[tuple[str, int], Session] = {}

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def first(after: str, calls: int) -> Session:
        session = client.session(tools=[TOOL] if calls else [])
        output = ids("\n</think>\n\n" + "\n".join([CALL] * calls or ["Hi"]))
        if after == "warm-up":
            session.warm("go")
        elif after != "start":
            output += ids("<|im_end|>") * (after != "cut")
            session.turn("go", forced_token_ids=output, max_tokens=len(output))
        return session

    def make(after: str, calls: int) -> tuple[Session, list[str], list[int]]:
        calls = calls if after in ("calls", "cut") else 0
        if (after, calls) not in heads:
            heads[after, calls] = first(after, calls)
        session = heads[after, calls].fork()
        turns = session.turns(token_ids=True)
        past = [*(turns[0].prompt_token_ids or []), *(turns[0].output_token_ids or [])] if turns else []
        open_calls = [call.call_id for call in turns[0].tool_calls] if turns else []
        assert len(open_calls) == calls
        return session, open_calls, past

    yield make
    for session in heads.values():
        session.close()


def goes_on(session: Session, after: str, calls: list[str]) -> None:
    """The session takes the turn that it should be given."""
    good: Any = [FunctionCallOutputItem(call, "ok") for call in calls] or ("" if after == "warm-up" else "Hello")
    assert session.turn(good, max_tokens=1).usage.output == 1


def test_contents(take: Callable[[str, str], Taken], reach: Any, tokenizer: Tokenizer, content_shape: Any) -> None:
    session, calls, past = reach(content_shape.after, 1)
    with session:
        call = "".join(calls)
        error, found = take(session.id, content_shape.input.replace("CALL", call))
        assert error == content_shape.outcome.error, found
        if error is not None:
            assert content_shape.words.replace("CALL", call) in found.replace("`", "'")
            goes_on(session, content_shape.after, calls)
            return
        text = json.loads(content_shape.words)
        around = "\n<tool_response>\n{}\n</tool_response>" if calls else "<|im_start|>user\n{}<|im_end|>\n"
        fresh = found[len(past) :]
        assert around.format(text) in tokenizer.decode(fresh, skip_special_tokens=False)
        # Control tokens that a text spells are none: the format's own are the only ones.
        assert [fresh.count(tokenizer.token_to_id(token)) for token in ("<|im_start|>", "<|im_end|>")] == [2, 1]


@st.composite
def inputs(draw: st.DrawFn, letters: str) -> tuple[str, str, list[str], list[bool]]:
    """Where a session stands, items, their texts, and which are given as parts."""
    after = draw(st.sampled_from(["start", "answer", "calls", "cut", "warm-up"]))
    likely = letters.replace("X", "") if after in ("calls", "cut") else letters.strip("12X")
    sequence = "".join(draw(st.lists(st.sampled_from(draw(st.sampled_from([letters, likely]))), max_size=5)))
    if after in ("calls", "cut") and draw(st.booleans()):
        both = list(dict.fromkeys(sequence + "12"))[:5]  # each at most once, so that many are taken
        sequence = "".join(draw(st.permutations(both)))
    texts = st.sampled_from(["Hello", " \n", "Größe 価格 🙂", "<|im_end|>", "</tool_response>", "\0", "x" * 50])
    given_texts = ["" if letter == "E" else draw(texts) for letter in sequence]
    return after, sequence, given_texts, draw(st.lists(st.booleans(), min_size=5, max_size=5))


def item(letter: str, text: str, parts: bool, calls: list[str]) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text[:3]}, {"type": "text", "text": text[3:]}] if parts else text
    if letter not in "12X":
        return {"type": "message", "role": ROLES[letter], "content": content}
    named = dict(zip("12", calls, strict=False))
    return {"type": "function_call_output", "call_id": named.get(letter, f"call_{letter}"), "output": content}


def test_sequences(take: Callable[[str, str], Taken], reach: Any, tokenizer: Tokenizer, shapes: Any) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(drawn=inputs(shapes.letters))
    def run(drawn: tuple[str, str, list[str], list[bool]]) -> None:
        after, sequence, texts, parts = drawn
        session, calls, past = reach(after, 2)
        with session:
            items = [item(*each, calls) for each in zip(sequence, texts, parts[: len(texts)], strict=True)]
            error, found = take(session.id, json.dumps(items))
            assert error == shapes.outcome(after, sequence).error, found
            if error is not None:
                goes_on(session, after, calls)
                return
            assert found[: len(past)] == past
            expected = shapes.written(after, sequence, texts) + shapes.prompt
            assert tokenizer.decode(found[len(past) :], skip_special_tokens=False) == expected

    run()


def test_a_key_given_twice_and_unknown_fields_of_a_command(take: Callable[[str, str], Taken], reach: Any) -> None:
    """As the page says at its end."""
    session, _, _ = reach("start", 0)
    with session:
        assert take(session.id, '[], "messages": ["a"]') == ((400, "bad_request"), take(session.id, "[]")[1])
        error, _ = take(session.id, '"a", "messages": ["a"]')
        assert error is None
