"""Log-probabilities: each output token's, in order, over the deltas and the turn's end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed.client.protocol.commands import Sampling
from tokenspeed.client.protocol.events import TokenLogprob, TurnDelta
from tokenspeed.sessions.channel import Channel

OUTPUT = "Think.\n</think>\n\nLooking 😀 STOP"
MakeDesk = Callable[..., Any]


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("top", [0, 2])
def test_every_token_has_its_own(desk: MakeDesk, chunk: int, top: int) -> None:
    async def test() -> None:
        d = desk(chunk=chunk)
        session = await d.open(sampling=Sampling(stop=["STOP"], logprobs=True, top_logprobs=top))
        ended = await d.take(session, "a", OUTPUT)
        deltas = [event for event in d.of(ended.turn) if isinstance(event, TurnDelta)]
        found = [entry for delta in deltas for entry in delta.logprobs or []] + (ended.logprobs or [])
        ids = list(d.tokenizer.encode_control(OUTPUT))[: ended.usage.output]
        tops = [[(token, -0.25 * token), (0, -9.0)][:top] for token in ids]
        assert found == [TokenLogprob(token, -0.25 * token, best) for token, best in zip(ids, tops, strict=True)]
        # A delta's text is what its tokens, and those withheld before it, have written.
        read = 0
        for delta in deltas:
            read += len(delta.logprobs or [])
            assert d.tokenizer.decode(ids[:read]).replace("STOP", "").count(delta.text.strip()) >= 1
        plain = await d.take(await d.open(), "a", "\n</think>\n\nHi<|im_end|>")
        assert plain.logprobs is None
        assert all(event.logprobs is None for event in d.of(plain.turn) if isinstance(event, TurnDelta))

    asyncio.run(asyncio.wait_for(test(), 30))


def test_merged_deltas_keep_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr("tokenspeed.sessions.channel.MERGE_FROM", 1)
        channel = Channel()
        for seq in range(4):
            given = [TokenLogprob(seq, -1.0)] if seq != 2 else None
            channel.put(TurnDelta("s", "t", seq, 0, "text", str(seq), logprobs=given))
        channel.close()
        [event] = [event async for event in channel.read()]
        assert isinstance(event, TurnDelta)
        assert (event.text, event.logprobs) == ("0123", [TokenLogprob(seq, -1.0) for seq in (0, 1, 3)])

    asyncio.run(test())
