"""The SDK's words for what changes sessions and turns, in both forms of the wire and in both clients."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from tokenspeed.client import AsyncClient, AsyncSession, Client, FunctionCallItem, MessageItem, Session, SessionError
from tokenspeed.client.protocol.commands import (
    Sampling,
    SessionOpen,
    SessionRegenerate,
    SessionUpdate,
    TurnCreate,
)
from tokenspeed.client.protocol.events import TurnRecord
from tokenspeed.client.protocol.items import FunctionCallOutputItem, Item, OutputTextPart


@pytest.fixture(params=["msgpack", "json"])
def client(server: Any, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(server.url, encoding=request.param) as client:
        yield client


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def last(server: Any, kind: type[Any]) -> Any:
    return next(command for command in reversed(server.host.commands) if isinstance(command, kind))


def calls_once(command: TurnCreate, history: list[TurnRecord]) -> list[Item]:
    if isinstance(command.input, str):
        return [FunctionCallItem("call1", "add", '{"a":1,"b":2}')]
    return [MessageItem("assistant", [OutputTextPart(command.input[0].text)])]


def test_options_of_a_turn_reach_the_server(server: Any, client: Client) -> None:
    session = client.session(stop=["###"], temperature=0)
    assert last(server, SessionOpen).sampling == Sampling(temperature=0.0, stop=["###"])
    assert last(server, SessionOpen).tools is None
    first = session.turn("one", logprobs=True, top_logprobs=2, expect_head="start", instructions="Be brief.")
    command = last(server, TurnCreate)
    assert command.sampling == Sampling(logprobs=True, top_logprobs=2)
    assert (command.expect_head, command.instructions, command.tools) == ("start", "Be brief.", None)
    session.turn("two", expect_head=first, logit_bias={"7": -1.5}, tools=[])
    command = last(server, TurnCreate)
    assert (command.expect_head, command.tools, command.sampling) == (first.id, [], Sampling(logit_bias={"7": -1.5}))
    session.warm("three")
    assert last(server, TurnCreate).generate is False
    with pytest.raises(TypeError, match="unknown option 'expected_head'"):
        session.turn("four", expected_head="start")  # type: ignore[call-arg]


def test_tools_of_a_turn_run_from_then_on(server: Any, client: Client) -> None:
    server.host.script = calls_once
    session = client.session()
    assert session.turn("go", tools=[add]).text == "3"
    assert last(server, TurnCreate).tools is None, "the results' turn repeats the tools"
    assert session.turn("again").text == "3"
    server.host.failures[TurnCreate] = SessionError("head_moved", "x")
    with pytest.raises(SessionError, match="head_moved"):
        session.turn("go", tools=[])
    del server.host.failures[TurnCreate]
    assert session.turn("again").text == "3", "a refused turn took the tools away"


def test_update_says_what_it_costs(server: Any, client: Client) -> None:
    server.host.script = calls_once
    session = client.session(instructions="a")
    assert session.update(labels={"x": "y"}, temperature=0.5) == 0
    assert last(server, SessionUpdate).sampling == Sampling(temperature=0.5)
    assert session.get().labels == {"x": "y"}
    assert session.update(instructions="b", tools=[add]) == 7
    assert session.get().instructions == "b"
    assert session.turn("go").text == "3"


def test_regenerate(server: Any, client: Client) -> None:
    session = client.session(tools=[add])
    first = session.turn("one")
    second = session.turn("two")
    again = session.regenerate(seed=7, token_ids=True)
    assert (again.parent, session.head, again.text) == (first.id, again.id, second.text)
    command = last(server, SessionRegenerate)
    assert (command.of, command.sampling, command.token_ids) == (None, Sampling(seed=7), True)
    with session.regenerate(again, stream=True) as stream:
        assert "".join(delta.text for delta in stream) == second.text
    assert (stream.result().parent, last(server, SessionRegenerate).of) == (first.id, again.id)

    # A regenerated answer that calls tools has them run, too.
    def calls_anew(command: TurnCreate, history: list[TurnRecord]) -> list[Item]:
        (item,) = command.input
        return calls_once(command if isinstance(item, FunctionCallOutputItem) else TurnCreate("", "s", "go"), history)

    server.host.script = calls_anew
    assert session.regenerate().text == "3"


def test_turns_after_another_one(server: Any, client: Client) -> None:
    session = client.session(labels={"a": "b"})
    turn = session.turn("one")
    branch = client.turn(turn, "two")
    assert branch.turn.parent == turn.id
    assert branch.turn.session == branch.session.id != session.id
    assert branch.session.turn("three").parent == branch.turn.id
    several = client.turn(turn.id, "two", n=3, seed=4)
    assert last(server, TurnCreate).sampling == Sampling(seed=4)
    assert [each.turn.parent for each in several] == [turn.id] * 3
    assert len({each.session.id for each in several}) == 3
    assert all(each.session.head == each.turn.id for each in several)
    assert (session.head, len(session.turns())) == (turn.id, 1)
    assert client.turn(turn, "two", n=1)[0].turn.text == "You said: two"
    opened = client.session(from_=turn)
    assert (opened.head, last(server, SessionOpen).from_) == (turn.id, turn.id)
    with pytest.raises(TypeError, match="from_ cannot be given with id"):
        client.session(id=session.id, from_=turn)


def test_sessions_by_label_over_all_pages(server: Any, client: Client) -> None:
    red = [client.session(labels={"team": "red"}).id for _ in range(130)]
    client.session(labels={"team": "blue"})
    assert [record.id for record in client.sessions({"team": "red"})] == red
    assert len(client.sessions()) == 131


def test_an_unknown_encoding_is_refused(server: Any) -> None:
    with pytest.raises(ValueError, match="the encoding is 'xml'; it must be one of msgpack, json"):
        Client(server.url, encoding="xml")  # type: ignore[arg-type]


@pytest.mark.parametrize("encoding", ["msgpack", "json"])
def test_the_asyncio_client_does_the_same(server: Any, encoding: Any) -> None:
    async def run() -> None:
        async with AsyncClient(server.url, encoding=encoding) as client:
            session = await client.session(instructions="a")
            first = await session.turn("one", expect_head="start")
            second = await session.turn("two", logprobs=True)
            again = await session.regenerate(seed=1)
            assert (again.parent, session.head, again.text) == (first.id, again.id, second.text)
            async with session.regenerate(stream=True) as stream:
                assert "".join([delta.text async for delta in stream]) == second.text
            assert await session.update(instructions="b") == 7
            await session.warm("three")
            assert last(server, TurnCreate).generate is False
            opened, turn = await client.turn(first, "two")
            assert (turn.parent, opened.head) == (first.id, turn.id)
            several = await client.turn(first, "two", n=3)
            assert [each.turn.parent for each in several] == [first.id] * 3
            assert (await client.session(from_=first)).head == first.id
            assert len(await client.sessions(labels={})) == 6
            server.host.script = calls_once
            assert (await session.turn("go", tools=[add])).text == "3"
            assert (await session.turn("again")).text == "3"

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize(("blocking", "aio"), [(Client, AsyncClient), (Session, AsyncSession)])
def test_both_clients_have_the_same_names_and_arguments(blocking: type, aio: type) -> None:
    def public(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(value).parameters) if callable(value) else []
            for name, value in vars(kind).items()
            if not name.startswith("_")
        }

    assert public(blocking) == public(aio)
