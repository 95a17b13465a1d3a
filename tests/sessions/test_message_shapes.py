"""Every sequence of items, wherever a session may stand: what becomes of it is what `docs/message-shapes.md` says."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.client.protocol.commands import Sampling
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.items import FunctionCallItem, FunctionCallOutputItem, InputItem, MessageItem, TextPart

ANSWER = "\n</think>\n\nHi<|im_end|>"
CALLS = "\n</think>\n\n" + "<tool_call>\n<function=f>\n</function>\n</tool_call>\n" * 2
ROLES: dict[str, Any] = {"U": "user", "E": "user", "S": "system", "D": "developer", "A": "assistant"}
PLACES = ["start", "answer", "calls", "cut", "warm-up"]


def sequences(letters: str, common: str) -> Iterator[str]:
    """All up to three letters, all of four and five `common` ones, and some of the rest."""
    for length in range(4):
        yield from map("".join, itertools.product(letters, repeat=length))
    for length in (4, 5):
        yield from map("".join, itertools.product(common, repeat=length))
    draw = random.Random(5)
    for _ in range(150):
        yield "".join(draw.choices(letters, k=draw.choice([4, 5])))


class Place:
    """A session that stands somewhere, and always returns there."""

    def __init__(self, desk: Any, session: str, head: str | None, calls: list[str]) -> None:
        self.desk = desk
        self.session = session
        self.head = head
        self.calls = calls

    @classmethod
    async def reach(cls, desk: Any, name: str, **defaults: Any) -> Place:
        session = await desk.open(**defaults)
        if name == "start":
            return cls(desk, session, None, [])
        if name == "warm-up":
            ended = await desk.take(session, "go", generate=False)
        elif name == "cut":
            limit = len(desk.tokenizer.encode_control(CALLS))
            ended = await desk.take(session, "go", CALLS, sampling=Sampling(max_tokens=limit))
        else:
            ended = await desk.take(session, "go", CALLS + "<|im_end|>" if name == "calls" else ANSWER)
        [turn] = await desk.turns(session)
        assert turn.reason == {"warm-up": "warmed", "cut": "length", "calls": "tool_calls", "answer": "stop"}[name]
        calls = [item.call_id for item in turn.output if isinstance(item, FunctionCallItem)]
        assert len(calls) == (2 if name in ("calls", "cut") else 0)
        return cls(desk, session, ended.turn, calls)

    def item(self, letter: str, text: str) -> InputItem:
        if letter in "12X":
            place = "12X".index(letter)
            call = self.calls[place] if place < len(self.calls) else f"call_{letter}"
            return FunctionCallOutputItem(call, text)
        return MessageItem(ROLES[letter], [TextPart(text[:1]), TextPart(text[1:])])

    async def prompt(self, items: list[InputItem], generate: bool) -> list[int]:
        """The prompt of a turn, which is then taken back. Raises SessionError."""
        ended = await self.desk.take(self.session, items, ANSWER if generate else None, generate=generate)
        await self.desk.rewind(self.session, self.head or "start")
        self.desk.events.clear()
        prompt: list[int] = self.desk.engine.prompts.pop(ended.turn)
        return prompt


@pytest.mark.parametrize(("name", "instructions"), [*((name, None) for name in PLACES), ("start", "Be brief.")])
def test_every_sequence_is_rendered_merged_or_refused_as_written(
    desk: Callable[..., Any], shapes: Any, name: str, instructions: str | None
) -> None:

    async def test() -> None:
        d = desk()
        place = await Place.reach(d, name, instructions=instructions)
        past = d.engine.lineages[place.head][1] if place.head else []
        start = d.tokenizer.decode(past)
        if instructions is not None and not past:
            start = "<|im_start|>system\nBe brief.<|im_end|>\n"
        good = {"calls": "12", "cut": "12", "warm-up": ""}.get(name, "U")
        seen = set()
        for count, sequence in enumerate(sequences(shapes.letters, "UA12" if name in ("calls", "cut") else "USEA")):
            texts = ["" if letter == "E" else f"{letter}{at}" for at, letter in enumerate(sequence)]
            items = [place.item(*pair) for pair in zip(sequence, texts, strict=True)]
            outcome = shapes.outcome(name, sequence)
            seen.add(outcome)
            generate = count % 3 == 0 or sequence == ""
            if outcome.error is not None:
                turns = len(d.engine.generated)
                with pytest.raises(SessionError) as caught:
                    await d.begin(place.session, items, generate=generate)
                assert (caught.value.status, caught.value.code) == outcome.error, sequence
                record = await d.record(place.session)
                assert (record.state, record.head, len(d.engine.generated)) == ("idle", place.head, turns), sequence
                sequence, texts, generate = good, list(good), generate or good == ""
                items = [place.item(*pair) for pair in zip(good, good, strict=True)]
            prompt = await place.prompt(items, generate)
            assert prompt[: len(past)] == past
            expected = start + shapes.written(name, sequence, texts) + (shapes.prompt if generate else "")
            assert d.tokenizer.decode(prompt) == expected, sequence
        assert len(seen) >= 3, "the table says something else for every place"

    asyncio.run(test())


def test_a_warm_up_of_nothing_is_refused(desk: Callable[..., Any]) -> None:
    async def test() -> None:
        place = await Place.reach(desk(), "warm-up")
        for empty in ("", []):
            with pytest.raises(SessionError, match="bad_request: the input is empty"):
                await place.desk.begin(place.session, empty, generate=False)
        assert (await place.desk.take(place.session, "", ANSWER)).status == "completed"

    asyncio.run(test())


@pytest.mark.parametrize("reasoning", ["keep", "drop"])
@pytest.mark.parametrize(
    ("template", "calls"),
    [
        ("plainer.jinja", CALLS),
        ("hermes.jinja", "\n</think>\n\n" + '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n' * 2),
    ],
)
def test_other_templates_render_every_text_or_refuse(
    desk: Callable[..., Any],
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    calls: str,
    reasoning: str,
) -> None:
    monkeypatch.setitem(globals(), "CALLS", calls)
    shutil.copytree(directory, tmp_path / "model")
    shutil.copy(Path(__file__).parent / template, tmp_path / "model" / "chat_template.jinja")

    async def test(name: str) -> None:
        d = desk(directory=tmp_path / "model")
        place = await Place.reach(d, name, reasoning=reasoning)
        statuses = []
        for count, sequence in enumerate(sequences("UESDA12X", "")):
            if len(sequence) > 2:
                break
            texts = ["" if letter == "E" else f"{letter}{at}" for at, letter in enumerate(sequence)]
            items = [place.item(*pair) for pair in zip(sequence, texts, strict=True)]
            try:
                prompt = d.tokenizer.decode(await place.prompt(items, count % 2 == 0))
                assert all(text in prompt for text in texts), sequence
                statuses.append(200)
            except SessionError as error:
                d.engine.scripts.clear()
                statuses.append(error.status)
        assert set(statuses) == {200, 400}

    for name in PLACES:
        asyncio.run(test(name))


def test_the_tables_know_every_place_and_letter(shapes: Any) -> None:
    assert list(shapes.before) == PLACES
    assert shapes.letters == "UESDA12X"
    assert len(shapes.contents) > 40
