"""A real server with the model that ships, in float64, and the SDK on a websocket to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import pytest
from tokenizers import Tokenizer

import tokenspeed.pocket
from tokenspeed import Client, Engine, SamplingParams
from tokenspeed.cli.running import BackgroundServer
from tokenspeed.client import Session, Turn
from tokenspeed.config.engine import EngineConfig


@dataclass(frozen=True)
class Counters:
    """The engine's own totals."""

    model_tokens: int
    prefilled: int
    decoded: int


class World:
    """A server and a client."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = Client(url)
        self.tokenizer = Tokenizer.from_file(str(tokenspeed.pocket.DIRECTORY / "tokenizer.json"))

    def counters(self) -> Counters:
        text = httpx.get(f"{self.url}/metrics").text

        def value(name: str) -> int:
            found = re.search(rf"^tokenspeed_{name} (\S+)$", text, re.MULTILINE)
            assert found is not None, name
            return int(float(found[1]))

        return Counters(value("model_tokens"), value("prefilled_tokens"), value("decoded_tokens"))

    def ids(self, text: str) -> list[int]:
        """With the format's control tokens as such."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def id_of(self, token: str) -> int:
        return int(self.tokenizer.token_to_id(token))


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    config = EngineConfig(
        model=str(tokenspeed.pocket.DIRECTORY), dtype="float64", threads=1, forced_tokens=True, cache_bytes=256 << 20
    )
    with BackgroundServer(config) as server:
        world = World(server.started.url)
        with world.client:
            yield world


@pytest.fixture(scope="session")
def recompute() -> Callable[[Turn], list[int]]:
    """The ids that a turn must have had: greedy, from its prompt's ids, with nothing reused."""
    engine = Engine(tokenspeed.pocket.DIRECTORY, dtype="float64", prefix_cache=False, cache_bytes=64 << 20)

    def compute(turn: Turn) -> list[int]:
        assert turn.prompt_token_ids is not None
        params = SamplingParams(temperature=0, max_tokens=turn.usage.output)
        return engine.generate(turn.prompt_token_ids, params).token_ids

    return compute


@pytest.fixture
def open_session(world: World) -> Iterator[Callable[..., Session]]:
    sessions: list[Session] = []

    def start(**defaults: object) -> Session:
        sessions.append(world.client.session(**({"temperature": 0.0, "max_tokens": 40} | defaults)))  # type: ignore[arg-type]
        return sessions[-1]

    yield start
    for session in sessions:
        session.close()
