"""What the SDK's newer words come to with a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tokenspeed.client import AsyncClient, Client, Session, SessionError

LONG = "My name is Ines, the door code is 7319, and my favourite colour is green. "


@pytest.fixture
def session(client: Client) -> Iterator[Session]:
    with client.session(instructions="You are a helpful assistant.", temperature=0, max_tokens=8) as session:
        yield session


def test_logprobs_are_those_of_every_output_token(live: Any, session: Session) -> None:
    with session.turn("Hello!", stream=True, logprobs=True, top_logprobs=2, token_ids=True) as stream:
        deltas = list(stream)
    turn = stream.result()
    assert turn.logprobs is not None
    assert [entry.id for entry in turn.logprobs] == turn.output_token_ids
    assert all(entry.logprob <= 0 and len(entry.top) == 2 for entry in turn.logprobs)
    # Greedy: what was sampled is the most likely.
    assert all(entry.top[0] == (entry.id, entry.logprob) for entry in turn.logprobs)
    streamed = [entry for delta in deltas for entry in delta.logprobs or []]
    assert turn.logprobs[: len(streamed)] == streamed
    assert session.regenerate().logprobs is None
    body = {"sampling": {"logprobs": True}, "token_ids": True}
    whole = httpx.post(f"{live.url}/v1/sessions/{session.id}/regenerate", json=body, timeout=30).json()
    assert [entry["id"] for entry in whole["logprobs"]] == whole["output_token_ids"] == turn.output_token_ids
    assert whole["input"] == [{"type": "message", "role": "user", "content": "Hello!"}]


def test_a_stop_string_ends_a_turn(session: Session) -> None:
    whole = session.turn("Hello!", max_tokens=30)
    text = whole.text or whole.reasoning
    assert len(text) > 6
    cut = session.regenerate(stop=[text[3:5]], max_tokens=30)
    assert (cut.reason, cut.stop_string) == ("stop", text[3:5])
    assert text[3:5] not in (cut.text or cut.reasoning)
    assert session.turns()[-1].stop_string == text[3:5]


def test_an_update_costs_what_it_says(session: Session) -> None:
    session.turn(LONG)
    assert session.update(temperature=0.5, labels={"a": "b"}) == 0
    lost = session.update(instructions="Be brief.")
    assert lost > 20
    turn = session.turn("What is my name?")
    assert turn.miss_reason == "updated"
    assert turn.usage.computed >= turn.usage.prompt - turn.usage.reused.total > 20
    record = session.get()
    assert (record.instructions, record.labels, record.sampling.temperature) == ("Be brief.", {"a": "b"}, 0.5)


def test_warming_takes_the_prefill_out_of_the_turn(session: Session) -> None:
    warm = session.warm(LONG * 3)
    assert (warm.reason, warm.items, warm.usage.output) == ("warmed", [], 0)
    assert warm.usage.computed > 50
    turn = session.turn("")
    assert turn.usage.computed < 12
    assert turn.text or turn.reasoning


def test_rewind_points_are_cheap(session: Session) -> None:
    turns = [session.turn(text) for text in (LONG, "What is my name?", "Thank you!")]
    record = session.get()
    assert record.rewind_points is not None
    assert set(record.rewind_points) <= {turn.id for turn in turns}
    assert record.residency is not None
    assert record.residency.device >= record.tokens - 1
    for point in record.rewind_points:
        before = next(turn for turn in turns if turn.id == point)
        with session.fork() as fork:
            fork.rewind(point)
            after = fork.turn("Hello!")
        assert after.usage.computed <= after.usage.prompt - before.usage.prompt - before.usage.output + 1
    assert record.rewind_points[-1] == session.head


def test_turns_after_another_one(client: Client, session: Session) -> None:
    turn = session.turn(LONG)
    branches = client.turn(turn, "What is my name?", n=3, token_ids=True)
    assert len({tuple(branch.turn.output_token_ids or []) for branch in branches}) == 1
    for branch in branches:
        usage = branch.turn.usage
        assert usage.computed <= usage.prompt - turn.usage.prompt - turn.usage.output + 1
        assert branch.session.get().instructions == "You are a helpful assistant."
        branch.session.close()
    assert session.head == turn.id == session.get().head
    with client.session(from_=turn, instructions="Be brief.") as other:
        assert (other.head, other.get().instructions) == (turn.id, "Be brief.")
        assert other.turn("Hello!").parent == turn.id
    with pytest.raises(SessionError, match="turn_not_found"):
        client.session(from_="resp_a_x")


def test_labels_filter(client: Client) -> None:
    with client.session(labels={"team": "red", "n": "1"}) as one, client.session(labels={"team": "red"}) as two:
        assert [record.id for record in client.sessions({"team": "red"})] == [one.id, two.id]
        assert [record.id for record in client.sessions({"team": "red", "n": "1"})] == [one.id]


def test_the_asyncio_client(live: Any) -> None:
    async def run() -> None:
        async with AsyncClient(live.url) as client, client.session(temperature=0, max_tokens=4) as session:
            first = await session.turn(LONG, token_ids=True)
            again = await session.regenerate(token_ids=True)
            assert (again.id != first.id, again.output_token_ids) == (True, first.output_token_ids)
            assert again.usage.computed < 12
            branches = await client.turn(again, "Hello!", n=2)
            assert len({branch.turn.text + branch.turn.reasoning for branch in branches}) == 1
            assert await session.update(instructions="Be brief.") > 0
            for branch in branches:
                await branch.session.close()

    asyncio.run(asyncio.wait_for(run(), 60))
