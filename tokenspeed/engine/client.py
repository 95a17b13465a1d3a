"""The one interface through which sessions use an engine, wherever it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from tokenspeed.engine.messages import Cancel, EngineEvent, EngineInfo, EngineStats, Generate


class EngineGone(Exception):
    """The engine's process ended. Turns in flight are lost; lineages must be sent again as whole prompts."""


class EngineClient(Protocol):
    """Commands are taken in the order of the calls. All methods are called on one event loop."""

    @property
    def info(self) -> EngineInfo: ...

    def generate(self, command: Generate) -> AsyncIterator[EngineEvent]:
        """Submit a turn (at the call, not at the first iteration). The iterator ends after `Ended` or `Rejected`.

        Raises:
            EngineGone: from the iterator.
        """
        ...

    def cancel(self, command: Cancel) -> None:
        """Ask for a turn's end; its `Ended` arrives on the turn's own iterator."""
        ...

    async def residency(self, turns: list[str]) -> list[int]:
        """For each lineage, how many of its ids a turn from there would find computed: the length whose state is kept.
        0 for unknown ones.

        Raises:
            EngineGone: if the process has ended.
        """
        ...

    def stand(self, on: str | None, off: str | None) -> None:
        """A session's head moved to lineage `on` and from lineage `off`."""
        ...

    def release(self, turns: list[str]) -> None: ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """End the engine and its process."""
        ...
