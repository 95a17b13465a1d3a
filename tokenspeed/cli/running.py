"""The parts put together: an engine in its own process, a session host on it, a server around that."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tokenspeed.pocket
from tokenspeed.cli.errors import CommandError
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.model import ModelError
from tokenspeed.engine.messages import EngineInfo
from tokenspeed.engine.process import EngineStartError, ProcessEngine
from tokenspeed.models.repository import resolve
from tokenspeed.server.access import ApiKeys
from tokenspeed.server.serving import Listener, ServeError, Server
from tokenspeed.sessions.host import SessionHost

Progress = Callable[[str, int, int], None]
"""Called with what is done at the moment, how much of it, and of how much."""


@dataclass(frozen=True)
class Started:
    """A server that answers. `engine_s`, `format_s`: seconds to load the engine and to read the chat format."""

    url: str
    info: EngineInfo
    engine_s: float
    format_s: float


def listen(host: str, port: int, keys: ApiKeys) -> Listener:
    """Raises CommandError where the server could not listen."""
    try:
        return Listener(host, port, keys)
    except ServeError as error:
        raise CommandError(str(error)) from None


def model_directory(model: str | None) -> Path:
    """The model's directory: the pocket model's if none is named, fetched if it is a repository.

    Raises:
        CommandError: there is no such model.
    """
    if model is None:
        return tokenspeed.pocket.DIRECTORY
    try:
        return resolve(model)
    except ModelError as error:
        raise CommandError(str(error)) from None


async def serve(
    config: EngineConfig,
    listener: Listener,
    keys: ApiKeys,
    started: Callable[[Started], None],
    *,
    model_name: str | None = None,
    origins: Collection[str] = (),
    progress: Progress | None = None,
    stop: asyncio.Event | None = None,
    signals: bool = False,
) -> None:
    """Serve until `stop` is set or, with `signals`, SIGINT or SIGTERM comes; the engine's process ends with it.

    Args:
        config: `config.model` is a directory.
        started: called once the server answers.
        model_name: what clients call the model; the directory's name if left out.

    Raises:
        CommandError: the model cannot be loaded or served, or the engine has ended by itself.
    """
    stop = stop or asyncio.Event()
    if signals:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
    begun = time.monotonic()
    engine = await _start_engine(config, progress, stop)
    if engine is None:
        listener.close()
        return
    try:
        engine_s = time.monotonic() - begun
        try:
            # The chat format is read and tested against its template, which takes a while.
            host = await asyncio.to_thread(SessionHost, engine, Path(config.model), "a", model_name)
        except (ValueError, OSError) as error:
            raise CommandError(f"{config.model}: {error}") from None
        format_s = time.monotonic() - begun - engine_s
        server = Server(listener, host, engine, keys, origins=origins)
        try:
            await _serve(server, engine, stop, lambda: started(Started(server.url, engine.info, engine_s, format_s)))
        except ServeError as error:
            raise CommandError(str(error)) from None
        finally:
            await host.close()
    finally:
        listener.close()
        await engine.close()


async def _start_engine(config: EngineConfig, progress: Progress | None, stop: asyncio.Event) -> ProcessEngine | None:
    """None if told to stop before it was ready."""
    starting = asyncio.create_task(ProcessEngine.start(config, progress=progress))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            return starting.result()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return None
    except EngineStartError as error:
        raise CommandError(str(error)) from None
    finally:
        stopped.cancel()


async def _serve(server: Server, engine: ProcessEngine, stop: asyncio.Event, started: Callable[[], None]) -> None:
    serving = asyncio.create_task(server.serve())
    starting = asyncio.create_task(server.started())
    ends = [serving, asyncio.create_task(stop.wait()), asyncio.create_task(_gone(engine))]
    try:
        await asyncio.wait([serving, starting], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            started()
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        server.stop()
        await serving
        if not stop.is_set():
            raise CommandError("the engine's process has ended")
    finally:
        for task in (starting, *ends):
            task.cancel()
        await asyncio.gather(starting, *ends, return_exceptions=True)


async def _gone(engine: ProcessEngine) -> None:
    """Until the engine's process has ended by itself."""
    while engine.alive:
        await asyncio.sleep(0.5)


class BackgroundServer:
    """A server on a free port of this machine, on a thread of its own, for as long as a `with` block lasts."""

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        self._config = config
        self._progress = progress
        self._ready = threading.Event()
        self._started: Started | None = None
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="tokenspeed-server")

    @property
    def started(self) -> Started:
        assert self._started is not None
        return self._started

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:
            self._end()
            raise
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        keys = ApiKeys({})
        await serve(
            self._config,
            listen("127.0.0.1", 0, keys),
            keys,
            self._answering,
            progress=self._progress,
            stop=self._stop,
        )

    def _answering(self, started: Started) -> None:
        self._started = started
        self._ready.set()


def engine_config(model: str | None, **settings: Any) -> EngineConfig:
    """The settings of an engine that serves `model`."""
    return EngineConfig(model=str(model_directory(model)), **settings)
