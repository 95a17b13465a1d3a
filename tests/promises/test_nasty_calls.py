"""A hundred tool calls that are hard to read, forced through the whole stack, streamed and whole, cut and uncut."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

import tokenspeed.pocket
from tokenspeed import AsyncClient
from tokenspeed.cli.running import BackgroundServer
from tokenspeed.client import AsyncSession, Turn, tool_output
from tokenspeed.config.engine import EngineConfig
from tokenspeed.models.random_weights import tiny_checkpoint

CALLS = 100
AT_ONCE = 16
PIECES = [
    "</tool_call>", "<tool_call>", "</think>", "<think>", "<|im_end|>", "<|im_start|>", "<parameter=text>",
    "<function=note>", "<parameter=", "</func", '"', "'", "\\", "\\n", "\\u0041", "\n", "\r\n", "\t", " ", "  ",
    "汉字", "かな", "한글", "é", "🙂", "👩‍👩‍👧‍👦", "🏳️‍🌈",
    "e\u0301", "{", "}", "[1, null]", '{"a": "b"}', "abc", "0", "9" * 30, "\u0000",
    "\u2028", "<", ">", "&amp;", "<!-- -->", "]]>",
]  # fmt: skip
TOOL = {
    "type": "function",
    "name": "note",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "more": {"type": "string"}, "data": {"type": "object"}},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A small random model with the shipped model's tokenizer and chat format."""
    pocket = tokenspeed.pocket.DIRECTORY
    vocabulary = Tokenizer.from_file(str(pocket / "tokenizer.json")).get_vocab_size()
    shape = {"vocab_size": vocabulary, "max_position_embeddings": 65536, "eos_token_id": 2}
    model = tiny_checkpoint(tmp_path_factory.mktemp("nasty"), **shape)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(pocket / file, model)
    config = EngineConfig(model=str(model), threads=1, forced_tokens=True, max_sequences=AT_ONCE, cache_bytes=256 << 20)
    with BackgroundServer(config) as running:
        yield running.started.url


class Forcer:
    """Spells output as ids, text as plain pieces of any size."""

    def __init__(self) -> None:
        self._whole = Tokenizer.from_file(str(tokenspeed.pocket.DIRECTORY / "tokenizer.json"))
        bare = json.loads(self._whole.to_str()) | {"added_tokens": []}
        self._plain = Tokenizer.from_str(json.dumps(bare))

    def vocabulary(self) -> dict[str, int]:
        """Ids by what they write, for those that write ASCII."""
        return self._plain.get_vocab()

    def control(self, text: str) -> list[int]:
        return list(self._whole.encode(text, add_special_tokens=False).ids)

    def text(self, text: str, rng: random.Random) -> list[int]:
        """Cut at random: each piece is spelled by itself, so token boundaries fall anywhere."""
        ids: list[int] = []
        while text:
            size = rng.choice([1, 2, 3, 7, len(text)])
            ids += self._plain.encode(text[:size], add_special_tokens=False).ids
            text = text[size:]
        return ids

    def call(self, arguments: dict[str, Any], rng: random.Random) -> list[int]:
        ids = self.control("\n</think>\n\n<tool_call>\n") + self.text("<function=note>\n", rng)
        for name, value in arguments.items():
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            ids += self.text(f"<parameter={name}>\n", rng) + self.text(written, rng)
            ids += self.text("\n</parameter>\n", rng)
        return ids + self.text("</function>\n", rng) + self.control("</tool_call><|im_end|>")


def nasty(rng: random.Random) -> dict[str, Any]:
    """Arguments made of what parsers trip over. The format cannot write a value that holds its own closing tag and the
    next opening one in a row, so that alone is left out."""
    text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(0, 14)))
    arguments: dict[str, Any] = {"text": text}
    if rng.random() < 0.5:
        arguments["more"] = "".join(rng.choice(PIECES) for _ in range(3))
    if rng.random() < 0.3:
        arguments["data"] = {"list": [1, 2.5, None, True], "text": rng.choice(PIECES), "deep": {"a": {"b": []}}}
    return arguments


def honest(turn: Turn, arguments: dict[str, Any], cut: bool) -> None:
    """What a turn says of its calls is true."""
    for call in turn.tool_calls:
        if call.parse_error is None:
            assert json.loads(call.arguments) == arguments
            assert call.status == "completed"
        else:
            assert call.status == "incomplete"
            assert call.raw is not None
    if cut:
        assert (turn.status, turn.reason) == ("incomplete", "length")
    else:
        assert (turn.status, turn.reason) == ("completed", "tool_calls")
        assert len(turn.tool_calls) == 1


async def stream(session: AsyncSession, text: str, **options: Any) -> tuple[Turn, dict[int, str]]:
    pieces: dict[int, str] = {}
    async with session.turn(text, stream=True, **options) as deltas:
        async for delta in deltas:
            pieces[delta.item] = pieces.get(delta.item, "") + delta.text
        return await deltas.result(), pieces


async def one_more(session: AsyncSession, turn: Turn) -> None:
    """Whatever the ending was, the session takes another turn."""
    if turn.reason == "tool_calls":
        after = await session.turn([tool_output(call, "done") for call in turn.tool_calls], max_tokens=1)
    else:
        after = await session.turn("go on", max_tokens=1)
    assert after.usage.computed <= after.usage.prompt - turn.usage.prompt - turn.usage.output + 1


async def check(client: AsyncClient, forcer: Forcer, number: int) -> None:
    rng = random.Random(number)
    arguments = nasty(rng)
    forced = forcer.call(arguments, rng)
    cuts = [None, *rng.sample(range(1, len(forced)), 4)]
    async with client.session(tools=[TOOL], temperature=0.0) as session:
        for cut in cuts:
            options = {"forced_token_ids": forced, "max_tokens": cut or len(forced), "token_ids": True}
            whole = await session.turn("write", **options)
            assert whole.output_token_ids == forced[:cut]
            honest(whole, arguments, cut is not None)
            await session.rewind("start")
            streamed, pieces = await stream(session, "write", **options)
            assert (streamed.status, streamed.reason) == (whole.status, whole.reason)
            assert streamed.output_token_ids == whole.output_token_ids
            for index, (item, other) in enumerate(zip(streamed.items, whole.items, strict=True)):
                assert type(item) is type(other)
                text = item.arguments if hasattr(item, "arguments") else item.text  # type: ignore[union-attr]
                assert text == (other.arguments if hasattr(other, "arguments") else other.text)  # type: ignore[union-attr]
                if getattr(item, "parse_error", None) is None:
                    assert pieces.get(index, "") == text
            await one_more(session, streamed)
            await session.rewind("start")


def test_a_hundred_nasty_calls(server: str) -> None:
    forcer = Forcer()

    async def all_of_them() -> None:
        async with AsyncClient(server) as client:
            gate = asyncio.Semaphore(AT_ONCE)

            async def gated(number: int) -> None:
                async with gate:
                    await check(client, forcer, number)

            await asyncio.gather(*(gated(number) for number in range(CALLS)))

    asyncio.run(all_of_them())


def test_sixty_kilobytes_of_arguments(server: str) -> None:
    forcer = Forcer()
    rng = random.Random(0)
    # The longest words that are one token each, in any order, so that 60 KB are few steps.
    longest = sorted(forcer.vocabulary().items(), key=lambda item: len(item[0]))
    words = [(word, token) for word, token in longest if word.isascii() and word.isalpha()][-60:]
    chosen = [rng.choice(words) for _ in range(60_000 // len(words[0][0]))]
    text = "".join(word for word, _ in chosen)
    assert len(text) >= 60_000
    forced = forcer.control("\n</think>\n\n<tool_call>\n") + forcer.text("<function=note>\n<parameter=text>\n", rng)
    forced += [token for _, token in chosen]
    forced += forcer.text("\n</parameter>\n</function>\n", rng) + forcer.control("</tool_call><|im_end|>")

    async def take() -> None:
        async with AsyncClient(server) as client, client.session(tools=[TOOL]) as session:
            turn, pieces = await stream(session, "write", forced_token_ids=forced, max_tokens=len(forced))
            honest(turn, {"text": text}, cut=False)
            assert pieces[0] == turn.tool_calls[0].arguments
            await one_more(session, turn)

    asyncio.run(take())


def test_cut_at_every_length(server: str) -> None:
    forcer = Forcer()
    rng = random.Random(7)
    arguments = {"text": "汉🙂</func", "more": "\n<parameter=x>"}
    forced = forcer.call(arguments, rng)

    async def take() -> None:
        async with AsyncClient(server) as client:

            async def cut_at(length: int) -> None:
                async with client.session(tools=[TOOL]) as session:
                    turn = await session.turn("write", forced_token_ids=forced, max_tokens=length)
                    honest(turn, arguments, cut=length < len(forced))
                    await one_more(session, turn)

            await asyncio.gather(*(cut_at(length) for length in range(1, len(forced) + 1)))

    asyncio.run(take())
