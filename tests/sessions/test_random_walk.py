"""Random commands over a few sessions: after each, host and engine hold the same lineages, and only reachable ones."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed.client.protocol.commands import (
    Sampling,
    SessionClose,
    SessionRegenerate,
    SessionUpdate,
    TurnCancel,
    TurnCreate,
)
from tokenspeed.client.protocol.items import FunctionCallItem, FunctionCallOutputItem, InputItem

OUTPUTS = [
    "\n</think>\n\nHi<|im_end|>",
    "cut while thinking",
    "r\n</think>\n\nx\n<tool_call>\n<function=f>\n</function>\n</tool_call><|im_end|>",
    "\n</think>\n\n<tool_call>\ncut in a call",
]
ACTIONS = ["turn"] * 6 + ["cancel", "cancel", "fork", "rewind", "start", "close", "forget"]
ACTIONS += ["warm", "again", "again", "update", "parent"]


@pytest.mark.parametrize("seed", range(4))
def test_the_books_balance(desk: Callable[..., Any], seed: int) -> None:
    async def walk() -> None:
        dice, d = random.Random(seed), desk(max_context=100_000, chunk=1 + seed)
        d.read()
        sessions = [await d.open(reasoning=rule) for rule in ("keep", "drop", "keep")]
        for _ in range(100):
            session = dice.choice(sessions)
            await step(d, dice, sessions, session, dice.choice(ACTIONS))
            check(d)
        for session in sessions:
            await d.ask(SessionClose("x", session))
        assert not d.engine.lineages
        assert not len(d.host._book._turns)
        assert not d.host._book._latest

    asyncio.run(asyncio.wait_for(walk(), 60))


async def step(d: Any, dice: random.Random, sessions: list[str], session: str, action: str) -> None:
    turns = await d.turns(session)
    output = dice.choice(OUTPUTS)
    if action == "turn":
        limit = Sampling(max_tokens=len(d.tokenizer.encode_control(output)))
        ended = await d.take(session, following(turns), output, sampling=limit)
        assert ended.status in ("completed", "incomplete")
    elif action == "cancel":
        d.script(output.removesuffix("<|im_end|>"), pause=True)
        turn = await d.begin(session, following(turns))
        for _ in range(dice.randint(0, 12)):
            await asyncio.sleep(0)
        await d.ask(TurnCancel("x", turn, dice.choice(["partial", "nothing"])))
        d.engine.scripts.clear()  # unread if the engine had forgotten the parent and was told no more
    elif action == "warm":
        assert (await d.take(session, following(turns), generate=False)).reason == "warmed"
    elif action == "again" and turns:
        d.script(output)
        limit = Sampling(max_tokens=len(d.tokenizer.encode_control(output)))
        of = dice.choice(turns).id
        ended = await d.end((await d.ask(SessionRegenerate("r", session, of, sampling=limit))).turn)
        assert ended.status in ("completed", "incomplete")
    elif action == "update":
        texts = {"instructions": dice.choice(["", "Be brief.", "Be long."]), "reasoning": dice.choice(["keep", "drop"])}
        reply = await d.ask(SessionUpdate("u", session, **texts))
        assert 0 <= reply.lost_tokens <= reply.session.tokens
    elif action == "parent" and turns and len(sessions) < 8:
        d.script(output)
        limit = Sampling(max_tokens=len(d.tokenizer.encode_control(output)))
        parent = dice.choice(turns)
        given = following(turns[: turns.index(parent) + 1])
        reply = await d.ask(TurnCreate("q", parent=parent.id, input=given, sampling=limit))
        await d.end(reply.turn)
        sessions.append(reply.session.id)
    elif action == "fork" and len(sessions) < 8:
        sessions.append(await d.fork(session, dice.choice(turns).id if turns else None))
    elif action == "rewind" and turns:
        await d.rewind(session, dice.choice(turns).id)
    elif action == "start":
        await d.rewind(session, "start")
    elif action == "close" and len(sessions) > 1:
        await d.ask(SessionClose("x", session))
        sessions.remove(session)
    elif action == "forget" and dice.random() < 0.5:
        d.engine.forget()


def following(turns: list[Any]) -> str | list[InputItem]:
    if turns and turns[-1].reason == "tool_calls":
        calls = [item for item in turns[-1].output if isinstance(item, FunctionCallItem)]
        return [FunctionCallOutputItem(call.call_id, "ok") for call in calls]
    return "hi"


def check(d: Any) -> None:
    reachable = {}
    for session in d.host._book:
        turn = session.head
        while turn is not None:
            reachable[turn.id] = turn
            turn = turn.parent
    assert len(d.host._book._turns) == len(reachable)
    heads = Counter(session.head.id for session in d.host._book if session.head)
    assert +d.engine.standing == heads
    assert set(d.engine.lineages) <= set(reachable)
    for name, (_, ids) in d.engine.lineages.items():
        assert list(reachable[name].ids()) == ids
