"""Preambles shared between tenants."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import tokenspeed.pocket
from tokenspeed.client.protocol.commands import SessionOpen, TurnCreate
from tokenspeed.client.protocol.events import TurnEnded
from tokenspeed.config.engine import EngineConfig
from tokenspeed.engine.process import ProcessEngine
from tokenspeed.sessions.host import SessionHost
from tokenspeed.sessions.sharing import shared_prefix

MODEL = tokenspeed.pocket.DIRECTORY
INSTRUCTIONS = "You answer for the Harbour Office. " * 8


def write(path: Path, **content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


async def first_turns(prefixes: tuple[bytes, ...]) -> list[TurnEnded]:
    engine = await ProcessEngine.start(
        EngineConfig(model=str(MODEL), threads=1, cache_bytes=64 << 20, shared_prefixes=prefixes)
    )
    host = SessionHost(engine, MODEL)
    ended = []
    try:
        for tenant in ("red", "blue"):
            opened = await host.request(tenant, SessionOpen("o", instructions=INSTRUCTIONS), tenant)
            assert opened.session is not None
            await host.request(tenant, TurnCreate("t", opened.session.id, "Hello!"), tenant)
            async for event in host.events(tenant):
                if isinstance(event, TurnEnded):
                    ended.append(event)
                    break
    finally:
        await host.close()
        await engine.close()
    return ended


def test_every_tenant_begins_after_it(tmp_path: Path) -> None:
    prefix = shared_prefix(MODEL, write(tmp_path / "p.json", instructions=INSTRUCTIONS))
    shared = asyncio.run(first_turns((prefix,)))
    assert [event.usage.reused.total for event in shared] == [len(prefix) // 4] * 2
    assert len(prefix) // 4 > 50
    apart = asyncio.run(first_turns(()))
    assert [event.usage.reused.total for event in apart] == [0, 0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "p.json"),
        ('{"instructions": 5}', "instructions"),
        ('{"instruction": "x"}', "instruction"),
        ("{}", "neither instructions nor tools"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=words):
        shared_prefix(MODEL, path)
    with pytest.raises(ValueError, match="nothing"):
        shared_prefix(MODEL, tmp_path / "nothing.json")
