"""The asyncio SDK against a real server: what differs from the blocking one, and that the rest does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tokenspeed.client import (
    AsyncClient,
    ConnectionFailed,
    FunctionCallItem,
    MessageItem,
    SessionError,
    StepLimitExceeded,
    tool_output,
)
from tokenspeed.client.protocol.commands import TurnCreate
from tokenspeed.client.protocol.events import TurnRecord
from tokenspeed.client.protocol.items import FunctionCallOutputItem, Item, OutputTextPart


def say(text: str) -> MessageItem:
    return MessageItem("assistant", [OutputTextPart(text)])


def call(number: int, name: str, arguments: str = "{}") -> FunctionCallItem:
    return FunctionCallItem(f"call{number}", name, arguments)


def outputs(command: TurnCreate) -> list[tuple[str, str]]:
    if isinstance(command.input, str):
        return []
    return [(item.call_id, item.text) for item in command.input if isinstance(item, FunctionCallOutputItem)]


def with_client(server: Any, work: Callable[[AsyncClient], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with AsyncClient(server.url) as client:
            await work(client)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_the_life_of_a_session(server: Any) -> None:
    async def work(client: AsyncClient) -> None:
        assert await client.ready()
        async with client.session(instructions="Be brief.", temperature=0) as session:
            first = await session.turn("one")
            second = await session.turn("two")
            assert (second.parent, session.head, first.text) == (first.id, second.id, "You said: one")
            branch = await session.fork(at=first)
            await session.rewind("start")
            assert (session.head, await session.turns()) == (None, [])
            assert [turn.text for turn in await branch.turns()] == ["You said: one", "You said: two"]
            again = await client.session(id=branch.id)
            assert (await again.get()).sampling.temperature == 0.0
            assert (await again.usage()).turns == 2
            assert len(await client.sessions()) == 2
        with pytest.raises(SessionError, match="session_not_found"):
            await session.turn("gone")

    with_client(server, work)


def test_streams_and_their_results(server: Any) -> None:
    async def work(client: AsyncClient) -> None:
        session = await client.session()
        stream = session.turn("hello", stream=True)
        assert stream.id is None
        text = ""
        async for delta in stream:
            text += delta.text
        turn = await stream.result()
        assert text == turn.text == "You said: hello"
        assert stream.id == turn.id
        begun = await session.turn("again", stream=True)
        assert (await anext(begun)).text == "You "
        assert (await begun.result()).text == "You said: again"

    with_client(server, work)


def test_calls_of_one_answer_run_at_the_same_time(server: Any) -> None:
    server.host.script = lambda command, history: (
        [say(str(outputs(command)))] if history else [call(1, "first"), call(2, "second"), call(3, "broken")]
    )
    met = asyncio.Event()

    async def first() -> str:
        await asyncio.wait_for(met.wait(), 5)
        return "met"

    async def second() -> int:
        met.set()
        return 2

    async def broken() -> None:
        raise ValueError("no luck")

    async def work(client: AsyncClient) -> None:
        session = await client.session(tools=[first, second, broken])
        turn = await session.turn("go")
        expected = [("call1", "met"), ("call2", "2"), ("call3", "error: ValueError: no luck")]
        assert turn.text == str(expected)
        assert len(turn.steps) == 2

    with_client(server, work)


def test_limits_and_mixed_answers(server: Any) -> None:
    def script(command: TurnCreate, history: list[TurnRecord]) -> list[Item]:
        if outputs(command):
            return [say(str(outputs(command)))]
        return [call(1, "mine"), call(2, "yours")] if command.input == "mixed" else [call(1, "mine")]

    server.host.script = script

    def mine() -> str:
        return "from the function"

    async def work(client: AsyncClient) -> None:
        session = await client.session(tools=[mine, {"type": "function", "name": "yours"}])
        with pytest.raises(StepLimitExceeded):
            await session.turn("only mine", max_steps=1)
        await session.rewind("start")
        turn = await session.turn("mixed")
        answer = await session.turn([tool_output(turn.tool_calls[1], "from the caller")])
        assert answer.text == "[('call1', 'from the function'), ('call2', 'from the caller')]"

    with_client(server, work)


def test_a_tool_that_is_cancelled_leaves_a_session_that_can_go_on(server: Any) -> None:
    server.host.script = lambda command, history: (
        [say(str(outputs(command)))] if history else [call(1, "slow"), call(2, "quick")]
    )
    began = asyncio.Event()

    async def slow() -> None:
        began.set()
        await asyncio.sleep(60)

    async def quick() -> str:
        return "done"

    async def work(client: AsyncClient) -> None:
        session = await client.session(tools=[slow, quick])
        task = asyncio.create_task(session.turn("go"))
        await began.wait()
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (turn,) = await session.turns()
        answer = await session.turn([tool_output(turn.tool_calls[0], "by hand")])
        assert "('call1', 'by hand')" in answer.text
        assert "('call2', 'done')" in answer.text

    with_client(server, work)


@pytest.mark.parametrize("leave", ["with", "break", "task"])
def test_leaving_a_stream_cancels_the_turn(server: Any, leave: str) -> None:
    server.host.pause_s = 0.01

    async def work(client: AsyncClient) -> None:
        session = await client.session()
        if leave == "task":
            task = asyncio.create_task(session.turn("a" * 4000))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()  # while it tells the server
            with pytest.raises(asyncio.CancelledError):
                await task
        elif leave == "with":
            async with session.turn("a" * 4000, stream=True) as stream:
                async for _ in stream:
                    break
            assert (await stream.result()).status == "cancelled"
        else:
            async for _ in session.turn("a" * 4000, stream=True):
                break
        for _ in range(200):
            turns = await session.turns()
            if turns:
                break
            await asyncio.sleep(0.01)
        assert [turn.status for turn in turns] == ["cancelled"]
        assert (await session.turn("next")).parent == turns[0].id

    with_client(server, work)


def test_cancel_from_another_task(server: Any) -> None:
    server.host.pause_s = 0.01

    async def work(client: AsyncClient) -> None:
        session = await client.session()
        await session.cancel()
        turn = asyncio.create_task(session.turn("a" * 4000))
        await asyncio.sleep(0.1)
        await session.cancel()
        assert (await turn).status == "cancelled"

    with_client(server, work)


def test_many_sessions_share_a_socket(server: Any) -> None:
    server.host.pause_s = 0.005

    async def work(client: AsyncClient) -> None:
        sessions = [await client.session() for _ in range(20)]
        turns = await asyncio.gather(*(session.turn(f"n{number}") for number, session in enumerate(sessions)))
        assert [turn.text for turn in turns] == [f"You said: n{number}" for number in range(20)]
        with pytest.raises(SessionError, match="session_busy"):
            await asyncio.gather(sessions[0].turn("one"), sessions[0].turn("two"))

    with_client(server, work)


def test_a_server_that_goes_and_one_that_is_not_there(start_server: Callable[..., Any]) -> None:
    server = start_server()
    server.host.pause_s = 0.05

    async def work(client: AsyncClient) -> None:
        session = await client.session()
        stream = await session.turn("a" * 400, stream=True)
        await anext(stream)
        await asyncio.to_thread(server.stop)
        with pytest.raises(ConnectionFailed, match="the server is ending"):
            await anext(stream) and [delta async for delta in stream]
        with pytest.raises(ConnectionFailed, match="cannot connect"):
            await session.turn("more")
        assert not await client.ready()

    with_client(server, work)


def test_a_wrong_key_is_unauthorized(start_server: Callable[..., Any]) -> None:
    server = start_server(keys=("red=right",))

    async def work(client: AsyncClient) -> None:
        with pytest.raises(SessionError) as caught:
            await client.session()
        assert caught.value.code == "unauthorized"

    with_client(server, work)


def test_closing_again_does_nothing_and_hides_no_error(server: Any) -> None:
    async def scenario() -> None:
        async with AsyncClient(server.url) as client:
            async with client.session() as session:
                await session.close()
            gone = await client.session()
            await (await client.session(id=gone.id)).close()
            with pytest.raises(ValueError, match="the caller's own"):
                async with gone:
                    raise ValueError("the caller's own")

    asyncio.run(scenario())
