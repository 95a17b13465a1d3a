"""The HTTP mirror, by plain requests."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tokenspeed.client import Client
from tokenspeed.client.protocol.commands import SessionOpen, SessionRegenerate, TurnCreate
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import TurnRecord
from tokenspeed.client.protocol.items import Item
from tokenspeed.engine.client import EngineGone
from tokenspeed.server.connection import Limits

EVENTS = {"accept": "text/event-stream"}


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as http:
        yield http


def opened(http: httpx.Client, **defaults: Any) -> str:
    answer = http.post("/v1/sessions", json=defaults)
    assert answer.status_code == 201
    return str(answer.json()["id"])


def told(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream: names and data."""
    events = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith(":")]
        if lines:
            (name, data) = lines
            events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def test_the_life_of_a_session(http: httpx.Client) -> None:
    answer = http.post("/v1/sessions", json={"instructions": "Be brief.", "labels": {"a": "b"}, "new": [1]})
    assert (answer.status_code, answer.headers["content-type"]) == (201, "application/json")
    session = answer.json()["id"]
    at = f"/v1/sessions/{session}"
    first = http.post(f"{at}/turns", json={"input": "one"})
    assert first.status_code == 200
    turn = first.json()
    assert (turn["status"], turn["reason"], turn["parent"]) == ("completed", "stop", None)
    assert turn["output"] == [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "You said: one"}]}
    ]
    assert turn["input"] == [{"type": "message", "role": "user", "content": "one"}]
    assert turn["usage"]["prompt"] == 10
    second = http.post(f"{at}/turns", json={"input": [{"type": "message", "role": "user", "content": "two"}]}).json()
    assert second["parent"] == turn["id"]
    assert [listed["id"] for listed in http.get(f"{at}/turns").json()["turns"]] == [turn["id"], second["id"]]
    assert http.get(f"/v1/turns/{turn['id']}").json() == turn
    assert http.get(f"{at}/usage").json()["turns"] == 2
    again = http.post(f"{at}/regenerate").json()
    assert (again["parent"], again["input"]) == (turn["id"], second["input"])
    assert again["id"] != second["id"]
    forks = http.post(f"{at}/fork", json={"at": turn["id"]})
    assert forks.status_code == 201
    assert len(forks.json()["sessions"]) == 1
    assert http.post(f"{at}/rewind", json={"to": turn["id"]}).json()["head"] == turn["id"]
    assert http.get(at).json()["head"] == turn["id"]
    changed = http.patch(at, json={"instructions": "Be long.", "labels": {"c": "d"}}).json()
    assert (changed["session"]["instructions"], changed["session"]["labels"]) == ("Be long.", {"c": "d"})
    assert changed["lost_tokens"] == 7
    gone = http.delete(at)
    assert (gone.status_code, gone.content) == (204, b"")
    missing = http.get(at)
    assert (missing.status_code, missing.json()["code"]) == (404, "session_not_found")


def test_a_turn_as_events(server: Any, http: httpx.Client) -> None:
    session = opened(http)
    with http.stream("POST", f"/v1/sessions/{session}/turns", json={"input": "hi"}, headers=EVENTS) as answer:
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        events = told(answer.read().decode())
    assert [name for name, _ in events[:2]] == ["reply", "turn.started"]
    assert events[-1][0] == "turn.ended"
    assert all(data["type"] == name for name, data in events)
    assert [data["seq"] for _, data in events[1:]] == list(range(len(events) - 1))
    assert "".join(data["text"] for name, data in events if name == "turn.delta") == "You said: hi"
    assert {data["turn"] for _, data in events} == {http.get(f"/v1/sessions/{session}").json()["head"]}


@pytest.mark.parametrize(
    ("accept", "events"),
    [("*/*", False), ("application/json, text/event-stream", False), ("text/event-stream, */*;q=0.1", True)],
)
def test_the_accept_header_decides(http: httpx.Client, accept: str, events: bool) -> None:
    path = f"/v1/sessions/{opened(http)}/turns"
    answer = http.post(path, json={"input": "hi"}, headers={"accept": accept})
    assert answer.headers["content-type"].startswith("text/event-stream" if events else "application/json")


def test_a_silent_stream_pings(server: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed.server.exchange.PING_INTERVAL_S", 0.05)
    server.host.pause_s = 0.3
    path = f"/v1/sessions/{opened(http)}/turns"
    text = http.post(path, json={"input": "a"}, headers=EVENTS).text
    assert text.count(": ping\n\n") >= 5
    assert told(text)[-1][0] == "turn.ended"


def test_turns_after_another_one(http: httpx.Client) -> None:
    session = opened(http, labels={"a": "b"})
    turn = http.post(f"/v1/sessions/{session}/turns", json={"input": "one"}).json()
    one = http.post("/v1/turns", json={"parent": turn["id"], "input": "two"}).json()
    assert (one["turns"][0]["parent"], len(one["sessions"])) == (turn["id"], 1)
    three = http.post("/v1/turns", json={"parent": turn["id"], "input": "two", "n": 3}).json()
    heads = [http.get(f"/v1/sessions/{branch['id']}").json()["head"] for branch in three["sessions"]]
    assert heads == [branch["id"] for branch in three["turns"]]
    assert len(set(heads)) == 3
    events = told(http.post("/v1/turns", json={"parent": turn["id"], "input": "x", "n": 2}, headers=EVENTS).text)
    assert len(events[0][1]["turn_ids"]) == 2
    assert sorted(data["turn"] for name, data in events if name == "turn.ended") == sorted(events[0][1]["turn_ids"])
    assert http.get(f"/v1/sessions/{session}").json()["head"] == turn["id"]
    refused = http.post("/v1/turns", json={"input": "x"})
    assert (refused.status_code, refused.json()["code"]) == (400, "bad_request")


def test_sessions_by_label_and_page(http: httpx.Client) -> None:
    red = [opened(http, labels={"team": "red", "n": str(n)}) for n in range(3)]
    opened(http, labels={"team": "blue=x"})

    def ids(**query: Any) -> list[str]:
        return [session["id"] for session in http.get("/v1/sessions", params=query).json()["sessions"]]

    assert ids(label="team=red") == red
    assert ids(label=["team=red", "n=1"]) == [red[1]]
    assert len(ids(label="team=blue=x")) == 1
    page = http.get("/v1/sessions", params={"label": "team=red", "limit": 2}).json()
    assert page["after"] == red[1]
    assert ids(label="team=red", after=page["after"]) == red[2:]
    for query in ({"label": "team"}, {"limit": "many"}, {"limit": "1.5"}):
        refused = http.get("/v1/sessions", params=query)
        assert (refused.status_code, refused.json()["code"]) == (400, "bad_request")


def test_a_busy_session_is_not_to_be_retried(server: Any, http: httpx.Client) -> None:
    server.host.pause_s = 0.05
    session = opened(http)
    with http.stream("POST", f"/v1/sessions/{session}/turns", json={"input": "a" * 40}, headers=EVENTS) as answer:
        lines = answer.iter_lines()
        turn = json.loads(next(line for line in lines if line.startswith("data: ")).removeprefix("data: "))["turn"]
        busy = http.post(f"/v1/sessions/{session}/turns", json={"input": "me, too"})
        assert (busy.status_code, busy.json()["code"]) == (409, "session_busy")
        assert busy.headers["x-should-retry"] == "false"
        cancelled = http.post(f"/v1/turns/{turn}/cancel", json={"keep": "partial"}).json()
        assert cancelled["head"] == http.get(f"/v1/sessions/{session}").json()["head"]
        assert '"status":"cancelled"' in "".join(lines)


@pytest.mark.parametrize("events", [True, False])
def test_a_turn_whose_client_left_is_finished_and_counted(server: Any, http: httpx.Client, events: bool) -> None:
    server.host.pause_s = 0.02
    session = opened(http)
    body = json.dumps({"input": "a" * 40}).encode()
    accept = "text/event-stream" if events else "*/*"
    head = f"POST /v1/sessions/{session}/turns HTTP/1.1\r\nhost: localhost\r\naccept: {accept}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
        raw.sendall(head.encode() + body)
        if events:
            assert b"200" in raw.recv(1000)
        else:
            time.sleep(0.1)
    assert server.host.closed_channels == []
    for _ in range(200):
        if 'tokenspeed_turns_total{status="completed"} 1.0' in http.get("/metrics").text:
            break
        time.sleep(0.02)
    else:
        pytest.fail("the turn was not counted")
    assert [turn["status"] for turn in http.get(f"/v1/sessions/{session}/turns").json()["turns"]] == ["completed"]
    assert server.host.closed_channels == ["http1"]


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (SessionError("session_busy", "x"), 409, {"x-should-retry": "false"}),
        (SessionError("head_moved", "x"), 412, {}),
        (SessionError("queue_full", "x", retry_after_ms=2500), 429, {"retry-after": "3"}),
        (SessionError("quota_exceeded", "x"), 429, {"retry-after": "1"}),
        (SessionError("overloaded", "x"), 503, {"retry-after": "1"}),
        (SessionError("unknown_call_id", "x", detail={"open_calls": ["a"]}), 400, {}),
        (EngineGone("x"), 503, {"retry-after": "1"}),
        (RuntimeError("secret"), 500, {}),
    ],
)
def test_every_refusal_has_its_status(
    server: Any, http: httpx.Client, error: Exception, status: int, headers: dict[str, str]
) -> None:
    for command in (SessionOpen, TurnCreate, SessionRegenerate):
        server.host.failures[command] = error
    for path, body in (("", None), ("/s/turns", {"input": "x"}), ("/s/regenerate", None)):
        answer = http.post(f"/v1/sessions{path}", json=body)
        assert answer.status_code == status
        told = answer.json()
        assert "secret" not in answer.text
        if isinstance(error, SessionError):
            assert (told["code"], told["retry"], told.get("detail", {})) == (error.code, error.retry, error.detail)
        assert {name: answer.headers.get(name) for name in headers} == headers


def test_a_failed_turn_is_an_error(server: Any, http: httpx.Client) -> None:
    def fail(command: TurnCreate, history: list[TurnRecord]) -> list[Item]:
        raise SessionError("engine_restarted", "the engine ended")

    server.host.script = fail
    answer = http.post(f"/v1/sessions/{opened(http)}/turns", json={"input": "x"})
    assert (answer.status_code, answer.json()["code"], answer.json()["retry"]) == (503, "engine_restarted", "replay")
    assert answer.json()["detail"]["turn"].startswith("resp_")


def test_what_a_body_may_be(start_server: Callable[..., Any]) -> None:
    server = start_server(limits=Limits(max_frame_bytes=1000))
    with httpx.Client(base_url=server.url) as http:

        def post(content: bytes, kind: str | None = "application/json") -> tuple[int, str]:
            answer = http.post("/v1/sessions", content=content, headers={"content-type": kind} if kind else {})
            return answer.status_code, answer.json().get("code", "")

        assert post(b"")[0] == post(b"", None)[0] == post(b"{}", "application/json; charset=utf-8")[0] == 201
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/msgpack", "", None):
            assert post(b"{}", kind) == (415, "bad_request")
        for content in (b"[]", b"7", b"{", b"\xff", b'{"labels":{"a":1}}', b'{"sampling":{"temperature":NaN}}'):
            assert post(content) == (400, "bad_request")
        assert post(b'{"new":' + b"[" * 64 + b"]" * 64 + b"}") == (400, "bad_request")
        assert post(b'{"new":' + b"[" * 200 + b"]" * 200 + b"}") == (400, "bad_request")
        assert post(b'{"instructions":"' + b"x" * 1000 + b'"}') == (413, "payload_too_large")

        def chunks() -> Iterator[bytes]:
            for _ in range(3):
                yield b" " * 400

        answer = http.post("/v1/sessions", content=chunks(), headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large")


def test_keys_origins_and_tenants(start_server: Callable[..., Any]) -> None:
    server = start_server(keys=("red=r", "blue=b"))
    red, blue = ({"authorization": f"Bearer {key}"} for key in "rb")
    with httpx.Client(base_url=server.url) as http:
        for headers in ({}, {"authorization": "Bearer wrong"}, red | {"origin": "https://evil.example"}):
            refused = http.post("/v1/sessions", headers=headers)
            assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
            assert refused.headers["www-authenticate"] == "Bearer"
        session = http.post("/v1/sessions", headers=red).json()["id"]
        assert http.get(f"/v1/sessions/{session}", headers=red).status_code == 200
        assert http.get(f"/v1/sessions/{session}", headers=blue).json()["code"] == "session_not_found"
        assert http.get("/v1/sessions", headers=blue).json()["sessions"] == []


def test_requests_and_websockets_see_the_same_sessions(server: Any, http: httpx.Client) -> None:
    session = opened(http)
    turn = http.post(f"/v1/sessions/{session}/turns", json={"input": "one"}).json()
    with Client(server.url) as client:
        again = client.session(id=session)
        assert again.turn("two").parent == turn["id"]
        assert [listed.id for listed in again.turns()] == [
            listed["id"] for listed in http.get(f"/v1/sessions/{session}/turns").json()["turns"]
        ]


def test_a_stopping_server_answers_what_runs(start_server: Callable[..., Any]) -> None:
    server = start_server()
    server.host.pause_s = 0.2
    with httpx.Client(base_url=server.url, timeout=20) as http, ThreadPoolExecutor(1) as other:
        whole, streamed = (f"/v1/sessions/{opened(http)}/turns" for _ in range(2))
        waiting = other.submit(httpx.post, server.url + whole, json={"input": "a" * 99}, timeout=20)
        with http.stream("POST", streamed, json={"input": "a" * 99}, headers=EVENTS) as answer:
            chunks = answer.iter_bytes()
            seen = next(chunks)
            while sum(isinstance(command, TurnCreate) for command in server.host.commands) < 2:
                time.sleep(0.01)
            begun = time.monotonic()
            server.stop()
            assert time.monotonic() - begun < 4
            name, data = told((seen + b"".join(chunks)).decode())[-1]
            assert (name, data["code"], data["retry"]) == ("error", "engine_restarted", "replay")
        refused = waiting.result(10)
        assert (refused.status_code, refused.json()["code"]) == (503, "engine_restarted")
