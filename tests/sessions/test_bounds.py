"""Numbers that are too large are refused with the number and the limit, before anything is made of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tokenspeed.client.protocol.commands import Sampling, SessionFork, SessionOpen, TurnCreate
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.items import FunctionTool, MessageItem

HI = "\n</think>\n\nHi<|im_end|>"
MakeDesk = Callable[..., Any]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))  # type: ignore[arg-type]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"a": schema}
    return schema


def tools(count: int, **fields: Any) -> dict[str, Any]:
    return {"tools": [FunctionTool(f"f{number}", **fields) for number in range(count)]}


def sampled(**fields: Any) -> dict[str, Any]:
    return {"sampling": Sampling(**fields)}


# (what fits, what does not, its number, the limit)
OPENS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"instructions": "a" * 2000}, {"instructions": "a" * 1_000_001}, "1000001", "1000000"),
    (tools(256), tools(257), "257", "256"),
    (
        {"tools": [FunctionTool("f" * 128)]},
        {"tools": [FunctionTool("f" * 129)]},
        "129",
        "128",
    ),
    (
        tools(1, description="a" * 9000),
        tools(1, description="a" * 100_000),
        "100001",
        "100000",
    ),
    (tools(1), tools(1, parameters={"a" * 60_000: "b" * 40_000}), "100001", "100000"),
    (tools(1), tools(1, parameters={"a": [1] * 100_000}), "100003", "100000"),
    (tools(1), tools(11, description="a" * 99_999), "1100000", "1000000"),
    (
        tools(1, parameters=nested(32)),
        tools(1, parameters=nested(33)),
        "33",
        "32",
    ),
    ({"labels": {str(n): "" for n in range(32)}}, {"labels": {str(n): "" for n in range(33)}}, "33", "32"),
    ({"labels": {"a" * 64: "b" * 512}}, {"labels": {"a" * 65: ""}}, "65", "64"),
    ({"labels": {"a": ""}}, {"labels": {"a": "b" * 513}}, "513", "512"),
    ({"labels": {"a": ""}}, {"labels": {"": ""}}, "0", "1"),
    (sampled(stop=["x"] * 16), sampled(stop=["x"] * 17), "17", "16"),
    (sampled(stop=["x" * 1024]), sampled(stop=["x" * 1025]), "1025", "1024"),
    (sampled(stop=["x"]), sampled(stop=[""]), "0", "1"),
    (
        sampled(logit_bias={str(n): 1.0 for n in range(1024)}),
        sampled(logit_bias={str(n): 1.0 for n in range(1025)}),
        "1025",
        "1024",
    ),
    (sampled(logit_bias={"3071": -100.0}), sampled(logit_bias={"3072": 1.0}), "3072", "3071"),
    (sampled(logit_bias={"1": 100.0}), sampled(logit_bias={"1": 101.0}), "101", "100"),
    (sampled(logprobs=True, top_logprobs=20), sampled(logprobs=True, top_logprobs=21), "21", "20"),
    (sampled(repetition_penalty=100.0), sampled(repetition_penalty=101.0), "101", "100"),
    (sampled(presence_penalty=-100.0), sampled(presence_penalty=float("nan")), "nan", "100"),
]


def test_bounds_of_what_a_session_is_opened_with(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk(max_context=100_000)
        for fits, exceeds, number, limit in OPENS:
            await d.open(**fits)
            with pytest.raises(SessionError) as caught:
                await d.ask(SessionOpen("o", **exceeds))
            assert caught.value.code == "bad_request"
            assert number in caught.value.message, caught.value
            assert limit in caught.value.message, caught.value
        with pytest.raises(SessionError, match="lone surrogate"):
            await d.open(**sampled(stop=["\ud800"]))

    run(test)


@pytest.mark.parametrize("key", ["", "a", "-1", "1.0", " 1", "0x1", "²", "१", "1" * 11])
def test_biases_are_of_decimal_ids(desk: MakeDesk, key: str) -> None:
    async def test() -> None:
        d = desk()
        with pytest.raises(SessionError) as caught:
            await d.open(**sampled(logit_bias={key: 1.0}))
        assert (caught.value.code, repr(key) in caught.value.message) == ("bad_request", True)

    run(test)


def test_bounds_of_turns_and_forks(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        session = await d.open()
        first = await d.take(session, "a", HI)
        refused = [
            (SessionFork("f", session, n=65), "65", "64"),
            (SessionFork("f", session, n=0), "0", "1"),
            (TurnCreate("q", parent=first.turn, input="b", n=65), "65", "64"),
            (TurnCreate("q", parent=first.turn, input="b", n=-1), "-1", "1"),
            (TurnCreate("q", session, [MessageItem("user", "a")] * 4097), "4097", "4096"),
            (TurnCreate("q", session, "a", sampling=Sampling(stop=["x"] * 17)), "17", "16"),
            (TurnCreate("q", session, "a", tools=tools(257)["tools"]), "257", "256"),
        ]
        for command, number, limit in refused:
            with pytest.raises(SessionError) as caught:
                await d.ask(command)
            assert caught.value.code == "bad_request"
            assert number in caught.value.message, caught.value
            assert limit in caught.value.message, caught.value
        record = await d.record(session)
        assert (record.state, record.head, record.tools) == ("idle", first.turn, [])
        assert len(d.engine.generated) == 1

    run(test)


def test_sampling_goes_through_the_layers(desk: MakeDesk) -> None:
    async def test() -> None:
        d = desk()
        base = Sampling(stop=["zzz"], logit_bias={"7": 1.5}, repetition_penalty=1.2, logprobs=True, top_logprobs=2)
        session = await d.open(sampling=base)
        await d.take(session, "a", HI, sampling=Sampling(presence_penalty=0.5, stop=[], logit_bias={"007": -1.0}))
        params = d.engine.generated[-1].sampling
        assert (params.stop, params.logit_bias) == ((), ((7, -1.0),))
        assert (params.repetition_penalty, params.presence_penalty, params.top_logprobs) == (1.2, 0.5, 2)
        await d.take(session, "b", HI)
        params = d.engine.generated[-1].sampling
        assert (params.stop, params.logit_bias, params.presence_penalty) == (("zzz",), ((7, 1.5),), 0.0)

    run(test)
