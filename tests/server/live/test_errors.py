"""Every code of the protocol that a client can meet today, from a real server, over the websocket and by request.

`unauthorized`, `overloaded` and `engine_error` have their tests beside the scripted host, for they need keys, a silent
engine and a fault. `quota_exceeded` has no source yet: there are no quotas.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tokenspeed.client import Client, Session, SessionError

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = "\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>"
Refuse = Callable[..., SessionError]


@pytest.fixture
def session(client: Client) -> Iterator[Session]:
    with client.session(temperature=0, max_tokens=3, tools=[TOOL]) as session:
        yield session


@pytest.fixture
def refused(live: Any, session: Session) -> Callable[[dict[str, Any]], str]:
    """Takes a turn in both ways; the code and status by which both are refused alike."""

    def refuse(options: dict[str, Any]) -> tuple[str, int]:
        with pytest.raises(SessionError) as caught:
            session.turn(**options)
        answer = httpx.post(f"{live.url}/v1/sessions/{session.id}/turns", json=options, timeout=30)
        told = answer.json()
        assert (told["code"], told["message"]) == (caught.value.code, caught.value.message)
        assert (answer.status_code, told["retry"]) == (caught.value.status, caught.value.retry)
        return caught.value.code, answer.status_code

    return refuse


def test_bad_request(refused: Any) -> None:
    for sampling in (
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"max_tokens": 0},
        {"max_tokens": 2**40},
        {"seed": -1},
        {"stop": [""]},
        {"stop": ["x"] * 1000},
        {"stop_token_ids": [10**9]},
        {"stop_token_ids": [-1]},
        {"logit_bias": {"x": 1.0}},
        {"logit_bias": {"999999999": 1.0}},
        {"logit_bias": {"1": 1e6}},
        {"logprobs": True, "top_logprobs": 10**6},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 1e9},
        {"min_p": 2.0},
    ):
        assert refused({"input": "hi", "sampling": sampling}) == ("bad_request", 400), sampling
    assert refused({"input": ""}) == ("bad_request", 400)
    assert refused({"input": []}) == ("bad_request", 400)


@pytest.mark.parametrize("limit", [0, -1, 10**6, -(2**63)])
def test_bounds_of_a_list(live: Any, limit: int) -> None:
    answer = httpx.get(f"{live.url}/v1/sessions", params={"limit": limit})
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")


@pytest.mark.parametrize("n", [0, -1, 65, 2**62])
def test_bounds_of_forks_and_branches(live: Any, session: Session, n: int) -> None:
    turn = session.turn("Hello!")
    for path, body in ((f"/v1/sessions/{session.id}/fork", {"n": n}), ("/v1/turns", {"parent": turn.id, "n": n})):
        answer = httpx.post(live.url + path, json={"input": "x", **body})
        assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")


def test_what_does_not_exist(live: Any, client: Client, session: Session) -> None:
    for path in ("/v1/sessions/sess_a_x", "/v1/sessions/sess_a_x/turns", "/v1/sessions/sess_a_x/usage"):
        answer = httpx.get(live.url + path)
        assert (answer.status_code, answer.json()["code"]) == (404, "session_not_found")
    for method, path, body in (
        ("GET", "/v1/turns/resp_a_x", None),
        ("POST", "/v1/turns/resp_a_x/cancel", {}),
        ("POST", "/v1/turns", {"parent": "resp_a_x", "input": "x"}),
        ("POST", "/v1/sessions", {"from": "resp_a_x"}),
        ("POST", f"/v1/sessions/{session.id}/rewind", {"to": "resp_a_x"}),
        ("POST", f"/v1/sessions/{session.id}/regenerate", {"of": "resp_a_x"}),
        ("POST", f"/v1/sessions/{session.id}/fork", {"at": "resp_a_x"}),
    ):
        answer = httpx.request(method, live.url + path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (404, "turn_not_found"), path
    for call in (
        lambda: client.session(id="sess_a_x"),
        lambda: client.turn("resp_a_x", "x"),
        lambda: client.session(from_="resp_a_x"),
        lambda: session.rewind("resp_a_x"),
        lambda: session.regenerate("resp_a_x"),
    ):
        with pytest.raises(SessionError, match="_not_found"):
            call()
    assert httpx.get(f"{live.url}/v1/x").json()["code"] == "not_found"
    assert httpx.put(f"{live.url}/v1/sessions").json()["code"] == "method_not_allowed"


def test_tool_results_that_are_missing_or_unknown(refused: Any, session: Session) -> None:
    unknown = [{"type": "function_call_output", "call_id": "call_x", "output": "1"}]
    assert refused({"input": unknown}) == ("unknown_call_id", 400)
    from tokenizers import Tokenizer

    import tokenspeed.pocket

    tokenizer = Tokenizer.from_file(str(tokenspeed.pocket.DIRECTORY / "tokenizer.json"))
    forced = tokenizer.encode(CALL, add_special_tokens=False).ids
    turn = session.turn("What is 1 plus 1?", forced_token_ids=forced, max_tokens=200)
    assert [call.name for call in turn.tool_calls] == ["add"]
    assert refused({"input": "Never mind."}) == ("missing_tool_result", 400)
    assert refused({"input": unknown}) == ("unknown_call_id", 400)


def test_a_head_that_moved(refused: Any, session: Session) -> None:
    turn = session.turn("Hello!")
    session.turn("Hello!")
    assert refused({"input": "hi", "expect_head": turn.id}) == ("head_moved", 412)
    assert refused({"input": "hi", "expect_head": "start"}) == ("head_moved", 412)


def test_a_session_that_is_busy(refused: Any, session: Session) -> None:
    with session.turn("Hello!", stream=True, ignore_eos=True, max_tokens=400):
        assert refused({"input": "me, too"}) == ("session_busy", 409)


def test_a_context_that_is_full(refused: Any, session: Session) -> None:
    assert refused({"input": "word " * 600}) == ("context_length_exceeded", 400)
    with pytest.raises(SessionError, match="maximum context length is 512 tokens"):
        session.turn("word " * 600)
    assert session.turn("Hello!").status in ("completed", "incomplete")


def test_a_message_that_is_too_large(live: Any, client: Client) -> None:
    with pytest.raises(SessionError, match="payload_too_large"):
        client.session(instructions="x" * (17 * 2**20))
    answer = httpx.post(f"{live.url}/v1/sessions", json={"instructions": "x" * (17 * 2**20)})
    assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large")


def test_a_queue_that_is_full(live: Any, client: Client) -> None:
    """Four turns run and four wait, as this server is configured; the next is told to come back."""
    with ExitStack() as stack:
        sessions = [stack.enter_context(client.session(ignore_eos=True, temperature=0)) for _ in range(9)]
        head = sessions[8].turn("Hello!", max_tokens=1).id
        for number, session in enumerate(sessions[:8]):
            stream = stack.enter_context(session.turn("Hello!", stream=True, max_tokens=400))
            if number < 4:
                next(stream)  # it runs, and waits no more
        with pytest.raises(SessionError, match="queue_full") as caught:
            sessions[8].turn("Hello!", max_tokens=1)
        assert (caught.value.status, caught.value.retry) == (429, "after")
        hello = {"input": "Hello!", "sampling": {"max_tokens": 1}}
        answer = httpx.post(f"{live.url}/v1/sessions/{sessions[8].id}/turns", json=hello, timeout=30)
        assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        # Sessions that were to hold answers do not stay behind a refusal.
        known = [record.id for record in client.sessions()]
        for n in (1, 3):
            answer = httpx.post(f"{live.url}/v1/turns", json={**hello, "parent": head, "n": n}, timeout=60)
            assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
        assert [record.id for record in client.sessions()] == known


def test_an_engine_that_is_killed_comes_back(live: Any, client: Client) -> None:
    """The turns in flight fail with `engine_restarted`; the session goes on where it stood, with the right answer."""
    with client.session(temperature=0, max_tokens=12) as session, session.fork() as undisturbed:
        session.turn("The door code is 7319.")
        undisturbed.turn("The door code is 7319.")
        expected = undisturbed.turn("What is the door code?", token_ids=True)
        with session.turn("Count!", stream=True, ignore_eos=True, max_tokens=400) as stream:
            next(stream)
            kill_engine()
            with pytest.raises(SessionError, match="engine_restarted") as caught:
                stream.result()
        assert (caught.value.status, caught.value.retry) == (503, "replay")
        answer = httpx.post(f"{live.url}/v1/sessions/{session.id}/turns", json={"input": "x"}, timeout=30)
        if answer.status_code != 200:
            assert (answer.status_code, answer.json()["code"]) == (503, "engine_restarted")
            assert int(answer.headers["retry-after"]) >= 1
        else:
            session.rewind(session.turns()[-2])
        deadline = time.monotonic() + 60
        while not client.ready():
            assert time.monotonic() < deadline, "the engine did not come back"
            time.sleep(0.1)
        again = session.turn("What is the door code?", token_ids=True)
        assert again.output_token_ids == expected.output_token_ids
        assert again.prompt_token_ids == expected.prompt_token_ids


def kill_engine() -> None:
    """`kill -9` of the engines' processes that this one started: other tests' servers, if any, bring theirs back."""
    killed = 0
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"engine" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)
                killed += 1
    assert killed, "there is no engine"
