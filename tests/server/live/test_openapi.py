"""The OpenAPI document, and requests that schemathesis makes up from it: right ones, wrong ones, never a fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from tokenspeed.client import Client, Session
from tokenspeed.server.openapi import document
from tokenspeed.server.operations import OPERATIONS

SCHEMA = schemathesis.openapi.from_dict(document())
APIS = {result.ok().definition.raw["operationId"]: result.ok() for result in SCHEMA.get_all_operations()}

# Bounds are not all in the schema (what a turn may follow is not of a schema's kind), so right data may be refused.
NOT_PROMISED = ["positive_data_acceptance"]
WANTED = [CHECKS.get_one(name) for name in CHECKS.get_all_names() if name not in NOT_PROMISED]


@pytest.fixture(scope="module")
def origin(client: Client) -> Iterator[Session]:
    """A session with a turn, from which each request gets a session and a turn of its own."""
    with client.session(max_tokens=2, temperature=0) as session:
        session.turn("Hello!")
        yield session


@pytest.mark.parametrize("name", APIS)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_made_up_requests(live: Any, origin: Session, name: str, data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE]))
    case = data.draw(APIS[name].as_strategy(generation_mode=mode))
    fork = origin.fork()
    real = {"session": fork.id, "turn": fork.head}
    for place in list(case.path_parameters or {}):
        # Most ids that are made up give way to one that exists.
        if data.draw(st.integers(0, 3)):
            case.path_parameters[place] = real[place]
    if isinstance(case.body, dict):
        for place in ("parent", "to", "at", "of", "expect_head", "from"):
            if isinstance(case.body.get(place), str) and data.draw(st.booleans()):
                case.body[place] = fork.head
    case.call_and_validate(base_url=live.url, checks=WANTED, timeout=30)


def test_the_document_is_served_and_describes_every_operation(live: Any) -> None:
    served = httpx.get(f"{live.url}/openapi.json").json()
    assert served == document()
    assert served["openapi"] == "3.1.0"
    for operation in OPERATIONS:
        described = served["paths"][operation.path][operation.method.lower()]
        kinds = set(described["responses"][str(operation.status)].get("content", {}))
        expected = {"application/json"} if operation.answer is not None else set()
        assert kinds == expected | ({"text/event-stream"} if operation.takes_turns else set())
        assert ("415" in described["responses"]) == operation.body
