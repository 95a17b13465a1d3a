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
from tokenspeed.sessions.journal.directory import DataDirectory
from tokenspeed.sessions.journal.journal import Journal
from tokenspeed.sessions.journal.postgres import PostgresStore
from tokenspeed.sessions.journal.sqlite import SqliteStore
from tokenspeed.sessions.journal.store import JournalError, Moved, Store

OWNER = "a"
"""The server's name in the ids that it gives, and in the journal."""

Progress = Callable[[str, int, int], None]
"""Called with what is done at the moment, how much of it, and of how much."""


@dataclass(frozen=True)
class Started:
    """A server that answers.

    Attributes:
        engine_s, format_s: seconds to load the engine, and to read the chat format and the journal.
        sessions: how many it goes on with.
        kept_in: where sessions are kept; None for in memory.
    """

    url: str
    info: EngineInfo
    engine_s: float
    format_s: float
    sessions: int
    kept_in: str | None


class Records:
    """A journal in a directory that is this server's alone, or in a database.

    Attributes:
        place: what messages call it.
    """

    def __init__(self, kept_in: Path | str) -> None:
        """`kept_in`: a directory, or the address of a PostgreSQL database. Raises: CommandError."""
        self._directory: DataDirectory | None = None
        try:
            if isinstance(kept_in, Path):
                self._directory, self.place = self._held(kept_in), str(kept_in)
                store: Store = SqliteStore.open(self._directory.journal, OWNER)
            else:
                store = PostgresStore.open(kept_in, OWNER)
                self.place = store.place
        except JournalError as error:
            if self._directory is not None:
                self._directory.close()
            raise CommandError(str(error)) from None
        self.journal = Journal(store)

    def _held(self, directory: Path) -> DataDirectory:
        try:
            return DataDirectory(directory)
        except JournalError as error:
            raise CommandError(f"{error}; give another --data-dir, or --no-journal") from None

    def close(self) -> None:
        self.journal.close()
        if self._directory is not None:
            self._directory.close()


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
    kept_in: Path | str | None = None,
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
        kept_in: where sessions are kept, a directory or the address of a PostgreSQL database; if left out, they end
            with the server.

    Raises:
        CommandError: the model cannot be loaded or served, or the engine has ended by itself; the journal is in use,
            damaged, or cannot be written any more.
    """
    stop = stop or asyncio.Event()
    if signals:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
    try:
        records = await asyncio.to_thread(Records, kept_in) if kept_in is not None else None
        try:
            await _serve_model(config, listener, keys, started, model_name, records, origins, progress, stop)
        finally:
            if records is not None:
                records.close()
    finally:
        listener.close()


async def _serve_model(
    config: EngineConfig,
    listener: Listener,
    keys: ApiKeys,
    started: Callable[[Started], None],
    model_name: str | None,
    records: Records | None,
    origins: Collection[str],
    progress: Progress | None,
    stop: asyncio.Event,
) -> None:
    journal = records.journal if records is not None else None
    begun = time.monotonic()
    engine = await _start_engine(config, progress, stop)
    if engine is None:
        return
    try:
        engine_s = time.monotonic() - begun
        try:
            # The chat format is read and tested against its template, which takes a while.
            host = await asyncio.to_thread(SessionHost, engine, Path(config.model), OWNER, model_name, journal)
        except (ValueError, OSError) as error:
            raise CommandError(f"{config.model}: {error}") from None
        except JournalError as error:
            raise CommandError(str(error)) from None
        format_s = time.monotonic() - begun - engine_s
        server = Server(listener, host, engine, keys, origins=origins)
        place = records.place if records is not None else None
        answering = Started(server.url, engine.info, engine_s, format_s, host.sessions, place)
        try:
            await _serve(server, engine, journal, stop, lambda: started(answering))
        except ServeError as error:
            raise CommandError(str(error)) from None
        finally:
            await host.close()
    finally:
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


async def _serve(
    server: Server,
    engine: ProcessEngine,
    journal: Journal | None,
    stop: asyncio.Event,
    started: Callable[[], None],
) -> None:
    serving = asyncio.create_task(server.serve())
    starting = asyncio.create_task(server.started())
    ends = [serving, asyncio.create_task(stop.wait()), asyncio.create_task(_gone(engine, journal))]
    try:
        await asyncio.wait([serving, starting], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            started()
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        server.stop()
        await serving
        if not stop.is_set():
            raise CommandError("the engine's process has ended" if not _lost(journal) else f"{_lost(journal)}")
    finally:
        for task in (starting, *ends):
            task.cancel()
        await asyncio.gather(starting, *ends, return_exceptions=True)


async def _gone(engine: ProcessEngine, journal: Journal | None) -> None:
    """Until the engine's process has ended by itself, or nothing can be journalled any more."""
    while engine.alive and not _lost(journal):
        await asyncio.sleep(0.5)


def _lost(journal: Journal | None) -> JournalError | None:
    """Why the journal cannot be written. Whose sessions another server has taken stays, to say so."""
    failure = journal.failure if journal is not None else None
    return None if isinstance(failure, Moved) else failure


class BackgroundServer:
    """A server on a free port of this machine, on a thread of its own, for as long as a `with` block lasts. Its
    sessions are kept in memory only."""

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
