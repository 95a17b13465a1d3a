"""The SDK, the server, the session host, the engine's process and the pocket model, all real."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tokenspeed.client import AsyncClient, Client, SessionError, tool_output


@pytest.fixture
def client(served: Any) -> Iterator[Client]:
    with Client(served.url, "right") as client:
        yield client


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def test_a_function_is_called_and_its_result_sent_back(client: Client) -> None:
    with client.session(tools=[add], temperature=0, max_tokens=80) as session:
        turn = session.turn("What is 1234 plus 5678?")
        call = turn.steps[0].tool_calls[0]
        assert call.name == "add"
        assert len(turn.steps) == 2
        given = [item for item in turns_input(session, turn.id) if item.call_id == call.call_id]
        assert len(given) == 1
        first, second = turn.steps
        new = second.usage.prompt - first.usage.prompt - first.usage.output
        assert second.usage.computed <= new + 1
        assert second.usage.prompt == second.usage.reused.total + second.usage.computed


def turns_input(session: Any, turn: str) -> list[Any]:
    return next(listed.input for listed in session.turns() if listed.id == turn)


def test_streamed_and_whole_say_the_same(client: Client) -> None:
    session = client.session(temperature=0, max_tokens=60)
    branch = session.fork()
    whole = session.turn("Hello! Who are you?")
    with branch.turn("Hello! Who are you?", stream=True) as stream:
        text = "".join(delta.text for delta in stream if delta.channel == "text")
    streamed = stream.result()
    assert text == streamed.text == whole.text
    assert [type(item) for item in streamed.items] == [type(item) for item in whole.items]


def test_a_busy_session_refuses_and_cancel_keeps_the_partial_answer(client: Client) -> None:
    session = client.session(ignore_eos=True, temperature=0)
    with session.turn("Hello!", stream=True) as stream:
        next(stream)
        with pytest.raises(SessionError, match="session_busy"):
            session.turn("me, too")
    cut = stream.result()
    assert (cut.status, session.head) == ("cancelled", cut.id)
    again = session.turn("Thank you!", ignore_eos=False, max_tokens=20)
    assert again.parent == cut.id
    assert again.usage.computed <= again.usage.prompt - cut.usage.prompt - cut.usage.output + 1


def test_cancel_can_take_the_turn_back(client: Client) -> None:
    session = client.session(ignore_eos=True)
    timer = threading.Timer(0.3, session.cancel, ["nothing"])
    timer.start()
    turn = session.turn("Hello!")
    timer.join()
    assert (turn.status, session.head, session.turns()) == ("cancelled", None, [])


def test_a_turn_cut_by_its_limit_says_so_and_the_next_goes_on(client: Client) -> None:
    session = client.session(tools=[add], temperature=0)
    cut = session.turn("What is 1234 plus 5678?", max_tokens=6)
    assert (cut.status, cut.reason, cut.usage.output) == ("incomplete", "length", 6)
    assert session.turn("Thank you!", max_tokens=10).parent == cut.id


def test_refusals_leave_the_session_as_it_was(client: Client) -> None:
    session = client.session(temperature=0, max_tokens=20)
    turn = session.turn("Hello!")
    with pytest.raises(SessionError, match="unknown_call_id"):
        session.turn([tool_output("call_nobody_made", "x")])
    with pytest.raises(SessionError, match="bad_request"):
        session.turn("Hello!", temperature=-1)
    with pytest.raises(SessionError, match="turn_not_found"):
        session.rewind("resp_x")
    assert session.get().head == turn.id
    assert session.turn("Thank you!").parent == turn.id


def test_asyncio_sessions_side_by_side(served: Any) -> None:
    async def run() -> None:
        async with AsyncClient(served.url, "right") as client:
            sessions = [await client.session(temperature=0, max_tokens=30) for _ in range(4)]
            told = await asyncio.gather(
                *(session.turn(f"The door code is {1000 + 111 * n}.") for n, session in enumerate(sessions))
            )
            alone = await client.session(temperature=0, max_tokens=30)
            for number, turn in enumerate(told):
                await alone.rewind("start")
                assert (await alone.turn(f"The door code is {1000 + 111 * number}.")).text == turn.text

    asyncio.run(asyncio.wait_for(run(), 60))
