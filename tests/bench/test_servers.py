from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import tokenspeed.pocket
from tokenspeed.bench.agentic import Workload, measure
from tokenspeed.bench.driver import BenchError
from tokenspeed.bench.servers import ServerTarget, connect, digits_of
from tokenspeed.cli.running import BackgroundServer
from tokenspeed.config.engine import EngineConfig

SMALL = Workload(context=150, turns=3, new=40, generate=12, salt=7)
AROUND = 5
"""Tokens that the fake server puts around each message."""


@pytest.fixture(scope="module")
def native() -> Iterator[str]:
    config = EngineConfig(model=str(tokenspeed.pocket.DIRECTORY), threads=1, cache_bytes=64 << 20, max_context=512)
    with BackgroundServer(config) as server:
        yield server.started.url


class Fake(ThreadingHTTPServer):
    """Speaks Chat Completions and Responses. A word is a token; an answer repeats the last word said.

    Attributes:
        requests: bodies, in order.
        change: what becomes of the usage of the nth request, counted from 1.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.change: Callable[[int, dict[str, Any]], None] = lambda number, usage: None
        self._seen: list[list[str]] = []
        self._stored: dict[str, list[str]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
        self.requests.append(body)
        number = len(self.requests)
        if path == "/v1/chat/completions":
            prompt = [word for message in body["messages"] for word in around(message["content"])]
            count, names = body["max_tokens"], ("prompt_tokens", "completion_tokens", "prompt_tokens_details")
        else:
            prompt = self._stored.get(body.get("previous_response_id", ""), []) + around(body["input"])
            count, names = body["max_output_tokens"], ("input_tokens", "output_tokens", "input_tokens_details")
        output = [prompt[-2]] * count
        cached = max((shared(prompt, other) for other in self._seen), default=0)
        # The message's end is not part of what was cached as long as the answer goes on.
        self._seen.append(prompt[:-1])
        usage = {names[0]: len(prompt), names[1]: count, names[2]: {"cached_tokens": cached}}
        self.change(number, usage)
        if path == "/v1/chat/completions":
            yield {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
            for word in output:
                yield {"choices": [{"delta": {"content": f"{word} "}}]}
            yield {"choices": [], "usage": usage}
            yield "[DONE]"
        else:
            self._stored[f"resp_{number}"] = [*prompt, *around(" ".join(output))]
            for word in output:
                yield {"type": "response.output_text.delta", "delta": f"{word} "}
            yield {"type": "response.incomplete", "response": {"id": f"resp_{number}", "usage": usage}}


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self._begin("application/json")
        self.wfile.write(b'{"data": [{"id": "first"}, {"id": "second"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.headers.append(dict(self.headers))
        self._begin("text/event-stream")
        for event in self.server.answer(self.path, body):
            data = event if isinstance(event, str) else json.dumps(event)
            self.wfile.write(f"data: {data}\n\n".encode())

    def _begin(self, content_type: str) -> None:
        self.send_response(200)
        self.send_header("content-type", content_type)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def around(text: str) -> list[str]:
    return ["<", "role", ">", *text.split(), "end", "."]


def shared(one: list[str], other: list[str]) -> int:
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(other))


@pytest.fixture
def fake() -> Iterator[Fake]:
    server = Fake()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("conversations", [1, 2])
def test_native_sessions(native: str, conversations: int) -> None:
    connection = connect(native, "native")
    workload = Workload(150, 3, 40, 12, conversations, salt=conversations)
    report = measure(ServerTarget(connection), workload)
    connection.close()
    assert len(report.rows) == 3 * conversations
    for row in report.rows:
        answer = row.answer
        assert answer.reused is not None
        assert answer.computed == answer.prompt - answer.reused
        assert answer.computed <= row.new + 1
        assert abs(row.new - (150 if row.turn == 1 else 40)) <= 5
    assert report.hit_rate == pytest.approx(report.hit_rate_bound, abs=0.01)
    assert report.first_reused == 0


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_other_apis(fake: Fake, api: Any) -> None:
    connection = connect(f"{fake.url}/v1", api, api_key="right")
    report = measure(ServerTarget(connection), SMALL)
    connection.close()
    # A first turn has AROUND tokens around its text, and so has each message behind it, the answers, too.
    sizes = [(150, 150), (150 + 12 + 40 + AROUND, 40 + AROUND), (150 + 2 * (12 + 40 + AROUND), 40 + AROUND)]
    assert [(row.answer.prompt, row.new) for row in report.rows] == sizes
    assert report.rows[1].answer.reused == 150 - 1
    assert report.hit_rate is not None
    assert 0 < report.hit_rate < report.hit_rate_bound
    assert fake.headers[0]["Authorization"] == "Bearer right"
    last = fake.requests[-1]
    assert last["model"] == "first"
    if api == "chat":
        assert [message["role"] for message in last["messages"]] == ["user", "assistant"] * 2 + ["user"]
    else:
        assert last["previous_response_id"] == f"resp_{len(fake.requests) - 1}"
        assert len(last["input"].split()) == 40 - AROUND


def test_a_server_that_drops_the_history_fails(fake: Fake) -> None:
    """The fifth request is the conversation's first turn; before it come two probes and the turn asked twice."""

    def forget(number: int, usage: dict[str, Any]) -> None:
        if number == 6:
            usage["prompt_tokens"] = 40

    fake.change = forget
    with pytest.raises(BenchError, match="turn 2: the prompt has 40 tokens; its history of 162 and 40 new ones make"):
        measure(ServerTarget(connect(fake.url, "chat")), Workload(150, 3, 40, 12, salt=7))


def test_a_server_that_stops_early_fails(fake: Fake) -> None:
    fake.change = lambda number, usage: usage.update(completion_tokens=11) if number == 7 else None
    with pytest.raises(BenchError, match="turn 3: 11 tokens were generated; 12 were asked for"):
        measure(ServerTarget(connect(fake.url, "chat")), SMALL)


def test_a_warm_cache_fails(fake: Fake) -> None:
    fake.change = lambda number, usage: usage["input_tokens_details"].update(cached_tokens=100)
    with pytest.raises(BenchError, match="100 tokens of the first turn came from the cache"):
        measure(ServerTarget(connect(fake.url, "responses")), SMALL)


def test_a_server_that_is_none_is_said(fake: Fake) -> None:
    with pytest.raises(BenchError, match="the server cannot be reached"):
        connect("http://127.0.0.1:9", "chat")
    with pytest.raises(BenchError, match="base_url is 'nonsense'"):
        connect("nonsense", "native")
    fake.change = lambda number, usage: usage.clear()
    with pytest.raises(BenchError, match="does not answer as this API says: KeyError 'prompt_tokens'"):
        ServerTarget(connect(fake.url, "chat", model="other"))
    assert fake.requests[0]["model"] == "other"


def test_contents_are_digits_of_their_seed() -> None:
    assert digits_of("a", 50) == digits_of("a", 50) != digits_of("b", 50)
    assert {len(word) for word in digits_of("a", 50).split()} == {1}
