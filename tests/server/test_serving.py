"""Health, metrics, plain HTTP errors, and what keeps a server from listening."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tokenspeed.client import Client
from tokenspeed.server.access import ApiKeys
from tokenspeed.server.serving import Listener, ServeError


def metrics(server: Any) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_live_and_ready_are_two_things(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert httpx.get(f"{server.url}/health/live").json() == {"status": "live"}
    assert httpx.get(f"{server.url}/health/ready").json() == {"status": "ready", "model": "scripted"}
    monkeypatch.setattr("tokenspeed.server.app.READY_TIMEOUT_S", 0.05)
    server.engine.stats_delay_s = 5.0
    answer = httpx.get(f"{server.url}/health/ready")
    assert answer.status_code == 503
    assert (answer.json()["code"], answer.json()["retry"], answer.headers["retry-after"]) == (
        "overloaded",
        "after",
        "1",
    )
    assert httpx.get(f"{server.url}/health/live").status_code == 200


def test_other_paths_and_methods_get_the_protocols_errors(server: Any) -> None:
    answer = httpx.get(f"{server.url}/v1/nothing")
    assert (answer.status_code, answer.json()["code"], answer.json()["retry"]) == (404, "not_found", "never")
    answer = httpx.post(f"{server.url}/health/live")
    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")
    assert "GET" in answer.headers["allow"]


def test_metrics_count_what_happened(server: Any) -> None:
    before = metrics(server)
    assert before["tokenspeed_pages_free"] == 60
    assert before["tokenspeed_rows_total"] == 8
    assert before["tokenspeed_websockets"] == 0
    with Client(server.url) as client:
        session = client.session()
        session.turn("one")
        session.turn("two")
        session.fork().close()
        server.host.pause_s = 0.01
        with session.turn("a" * 400, stream=True) as stream:
            next(stream)
        during = metrics(server)
    assert during['tokenspeed_turns_total{status="completed"}'] == 2
    assert during['tokenspeed_turns_total{status="cancelled"}'] == 1
    assert during["tokenspeed_prompt_tokens_total"] == 30
    assert during['tokenspeed_reused_tokens_total{tier="device"}'] == 12
    assert during["tokenspeed_computed_tokens_total"] == 18
    assert during["tokenspeed_output_tokens_total"] == 15
    assert during["tokenspeed_ttft_seconds_count"] == 3
    assert during["tokenspeed_ttft_seconds_sum"] == pytest.approx(0.6)
    assert during['tokenspeed_itl_seconds_bucket{le="0.01"}'] == 3
    assert (during["tokenspeed_sessions"], during["tokenspeed_websockets"]) == (1, 1)


def test_metrics_are_served_while_the_engine_is_silent(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed.server.app.READY_TIMEOUT_S", 0.05)
    server.engine.stats_delay_s = 5.0
    assert metrics(server)["tokenspeed_websockets"] == 0


def test_without_a_key_only_this_machine_is_served() -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ServeError, match=rf"not on {host}: give --api-key TENANT=KEY"):
            Listener(host, 0, ApiKeys({}))
    listener = Listener("0.0.0.0", 0, ApiKeys.parse(["red=k"]))
    assert listener.url == f"http://127.0.0.1:{listener.port}"
    listener.close()
    listener = Listener("localhost", 0, ApiKeys({}))
    assert listener.url == f"http://localhost:{listener.port}"
    listener.close()


def test_a_port_in_use_is_one_readable_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError) as caught:
            Listener("127.0.0.1", port, ApiKeys({}))
    assert str(caught.value) == f"port {port} on 127.0.0.1 is in use: stop what uses it, or give another --port"


def test_a_port_that_was_taken_while_the_weights_loaded() -> None:
    listener = Listener("127.0.0.1", 0, ApiKeys({}))
    other = Listener("127.0.0.1", listener.port, ApiKeys({}))
    other.listen()
    with pytest.raises(ServeError, match="is in use"):
        listener.listen()
    for each in (listener, other):
        each.close()


def test_an_unknown_host_is_one_readable_line() -> None:
    with pytest.raises(ServeError, match=r"the host no\.such\.invalid is not known"):
        Listener("no.such.invalid", 0, ApiKeys({}))


def test_a_stopped_server_frees_its_port(start_server: Callable[..., Any]) -> None:
    server = start_server()
    port = int(server.url.rpartition(":")[2])
    server.stop()
    listener = Listener("127.0.0.1", port, ApiKeys({}))
    listener.listen()
    listener.close()
