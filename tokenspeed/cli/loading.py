"""How far the engine's start has come, on stderr."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class LoadingBar:
    """A progress bar on a terminal; on anything else a line at the beginning."""

    def __init__(self, model: str) -> None:
        console = Console(stderr=True)
        self._plain = not console.is_terminal
        if self._plain:
            console.print(f"loading {model}", markup=False, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=self._plain,
        )
        self._model = model
        self._task = self._bar.add_task(f"loading {model}", total=None)

    def __call__(self, phase: str, done: int, total: int) -> None:
        self._bar.update(self._task, description=f"{self._model}: {phase}", completed=done, total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
