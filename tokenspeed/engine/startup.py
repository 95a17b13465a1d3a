"""The phases of an engine's start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Startup:
    """Tells how far a start has come.

    Attributes:
        seconds: {phase: how long it took}.
    """

    def __init__(self, progress: Callable[[str, int, int], None] | None) -> None:
        self._progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Yields a function to call with (done, total)."""

        def progress(done: int, total: int) -> None:
            if self._progress is not None:
                self._progress(name, done, total)

        begun = time.monotonic()
        yield progress
        self.seconds[name] = round(time.monotonic() - begun, 3)
