"""A whole server with the model that ships: engine process, session host, HTTP and websockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tokenspeed.pocket
from tokenspeed.cli.running import BackgroundServer
from tokenspeed.client import Client
from tokenspeed.config.engine import EngineConfig


class Live:
    """A server that runs.

    Attributes:
        url: of its HTTP side.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def websocket_url(self) -> str:
        return "ws" + self.url.removeprefix("http") + "/v1/sessions/ws"


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    config = EngineConfig(
        model=str(tokenspeed.pocket.DIRECTORY),
        dtype="float64",
        threads=1,
        forced_tokens=True,
        cache_bytes=128 << 20,
        max_context=512,
        max_queue=4,
        max_sequences=4,
    )
    with BackgroundServer(config) as server:
        yield Live(server.started.url)


@pytest.fixture(scope="session")
def client(live: Live) -> Iterator[Client]:
    with Client(live.url) as client:
        yield client
