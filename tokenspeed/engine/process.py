"""An engine in its own process: the client side."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from tokenspeed.config.engine import EngineConfig
from tokenspeed.engine.client import EngineGone
from tokenspeed.engine.messages import (
    Cancel,
    Ended,
    EngineEvent,
    EngineInfo,
    EngineStats,
    Generate,
    Rejected,
    Release,
    Stand,
)
from tokenspeed.engine.wire import (
    AskResidency,
    AskStats,
    Fatal,
    FromWorker,
    Loading,
    Ready,
    Residency,
    Shutdown,
    Start,
    ToWorker,
    decode_from_worker,
    encode,
)

SHUTDOWN_S = 10.0
MOST_RESTARTS = 5
"""In a row, without one that served for `STABLE_S`; then the engine is given up."""
STABLE_S = 60.0

GONE = "the engine's process has ended; it is started again, and the turn can be sent again then"

Progress = Callable[[str, int, int], None]
"""Called with what is done at the moment, how much of it, and of how much."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class EngineStartError(RuntimeError):
    """The engine did not come up. `code` is of the error in its process (`bad_config`, `bad_model`, …)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class EngineDied(EngineStartError):
    """Its process ended while it was loading."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__("engine_error", f"the engine's process ended with exit code {exit_code}")


class WorkerProcess:
    """One life of the engine's process, on a socket of its own in a directory that only this user can read."""

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, directory: Path) -> None:
        self.process = process
        self.socket = socket
        self._directory = directory

    @classmethod
    async def launch(cls) -> WorkerProcess:
        directory = Path(tempfile.mkdtemp(prefix="tokenspeed-"))
        socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        address = f"ipc://{directory}/engine"
        socket.bind(address)
        # -P: the current directory is not a place to import from.
        command = [sys.executable, "-P", "-m", "tokenspeed.engine.worker", address, str(os.getpid())]
        # A group of its own: Ctrl-C is for this process, which ends the engine in its own time.
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, process_group=0)
        return cls(process, socket, directory)

    async def load(self, config: EngineConfig, progress: Progress | None) -> EngineInfo:
        """Raises EngineStartError if the model cannot be served."""
        exited = asyncio.create_task(self.process.wait())
        try:
            # A process that dies before it connects takes nothing, so this waits for its end as well.
            await self._unless(exited, asyncio.ensure_future(self.socket.send(encode([Start(config)]))))
            while True:
                frame = asyncio.ensure_future(self.socket.recv())
                await self._unless(exited, frame)
                for message in decode_from_worker(frame.result()):
                    if isinstance(message, Loading) and progress is not None:
                        progress(message.phase, message.done, message.total)
                    elif isinstance(message, Ready):
                        return message.info
                    elif isinstance(message, Fatal):
                        raise EngineStartError(message.code, message.message)
        finally:
            exited.cancel()

    async def _unless(self, exited: asyncio.Task[int], step: asyncio.Future[Any]) -> None:
        """Wait for `step`. Raises EngineDied if the process ends first."""
        await asyncio.wait({step, exited}, return_when=asyncio.FIRST_COMPLETED)
        if not step.done() and not await _soon(step):
            raise EngineDied(self.process.returncode)

    async def end(self, patience_s: float = 0.0) -> None:
        """Give the process so long to end by itself, then kill it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), patience_s)
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
        self.socket.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class ProcessEngine:
    """An `EngineClient` whose engine is a child process.

    If the process dies, the turns in flight fail with `EngineGone` and it is started again; the engine then knows no
    lineages (`unknown_lineage`), and whoever holds the ids sends whole prompts. After `MOST_RESTARTS` lives in a row
    that did not last, or if the model cannot be loaded any more, it stays down.
    """

    def __init__(self, config: EngineConfig, worker: WorkerProcess, info: EngineInfo) -> None:
        self._config = config
        self._worker = worker
        self._info = info
        self._turns: dict[str, asyncio.Queue[EngineEvent | None]] = {}
        self._stats: deque[asyncio.Future[EngineStats]] = deque()
        self._residencies: deque[asyncio.Future[list[int]]] = deque()
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._up = True
        self._restarts = 0
        self._life = asyncio.create_task(self._live())

    @classmethod
    async def start(cls, config: EngineConfig, progress: Progress | None = None) -> ProcessEngine:
        """Start the process and wait until it can answer.

        Raises:
            EngineStartError: with the reason, in one sentence.
        """
        worker = await WorkerProcess.launch()
        try:
            info = await worker.load(config, progress)
        except BaseException:
            await worker.end()
            raise
        return cls(config, worker, info)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def pid(self) -> int:
        return self._worker.process.pid

    @property
    def alive(self) -> bool:
        """Whether the engine runs or is being started again."""
        return not self._life.done()

    @property
    def restarts(self) -> int:
        """How often the process has died and was started again."""
        return self._restarts

    def generate(self, command: Generate) -> AsyncIterator[EngineEvent]:
        queue: asyncio.Queue[EngineEvent | None] = asyncio.Queue()
        if self._up:
            self._turns[command.turn] = queue
            self._post(command)
        else:
            queue.put_nowait(None)
        return self._events(queue)

    async def _events(self, queue: asyncio.Queue[EngineEvent | None]) -> AsyncIterator[EngineEvent]:
        while True:
            event = await queue.get()
            if event is None:
                raise EngineGone(GONE)
            yield event
            if isinstance(event, Ended | Rejected):
                return

    def cancel(self, command: Cancel) -> None:
        self._post(command)

    def stand(self, on: str | None, off: str | None) -> None:
        self._post(Stand(on, off))

    def release(self, turns: list[str]) -> None:
        if turns:
            self._post(Release(turns))

    async def stats(self) -> EngineStats:
        """The engine's answer, so it shows that the engine's loop turns.

        Raises:
            EngineGone: if the process has ended.
        """
        return await self._ask(AskStats(), self._stats)

    async def residency(self, turns: list[str]) -> list[int]:
        return await self._ask(AskResidency(turns), self._residencies)

    async def close(self) -> None:
        self._post(Shutdown())
        worker = self._worker
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(worker.process.wait(), SHUTDOWN_S)
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)
        self._fail_all()
        await self._worker.end()

    # ------------------------------------------------------------------ inside

    def _post(self, message: ToWorker) -> None:
        if self._up:
            self._outbox.put_nowait(encode([message]))

    async def _ask(self, question: ToWorker, waiting: deque[asyncio.Future[T]]) -> T:
        if not self._up:
            raise EngineGone(GONE)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiting.append(future)
        self._post(question)
        return await future

    async def _live(self) -> None:
        """Serve one process after the other."""
        failures = 0
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            await self._serve(self._worker)
            self._fail_all()
            code = self._worker.process.returncode
            failures = 1 if loop.time() - begun > STABLE_S else failures + 1
            if failures > MOST_RESTARTS:
                _log.error("the engine's process ended with exit code %s, and too often: it stays down", code)
                return
            _log.warning("the engine's process ended with exit code %s; it is started again", code)
            await self._worker.end()
            await asyncio.sleep(0.1 * 2 ** (failures - 1))
            self._worker = await WorkerProcess.launch()
            try:
                self._info = await self._worker.load(self._config, None)
            except EngineDied:
                continue  # the next round finds it dead
            except EngineStartError as error:
                _log.error("the engine cannot be started again: %s", error)
                return
            self._outbox = asyncio.Queue()
            self._restarts += 1
            self._up = True

    async def _serve(self, worker: WorkerProcess) -> None:
        """Carry messages until the process has ended."""
        carriers = [asyncio.create_task(self._send(worker)), asyncio.create_task(self._receive(worker))]
        try:
            await worker.process.wait()
        finally:
            self._up = False
            for task in carriers:
                task.cancel()
            await asyncio.gather(*carriers, return_exceptions=True)

    async def _send(self, worker: WorkerProcess) -> None:
        while True:
            await worker.socket.send(await self._outbox.get())

    async def _receive(self, worker: WorkerProcess) -> None:
        while True:
            for message in decode_from_worker(await worker.socket.recv()):
                self._dispatch(message)

    def _dispatch(self, message: FromWorker) -> None:
        if isinstance(message, EngineStats):
            _resolve(self._stats.popleft(), message)
        elif isinstance(message, Residency):
            _resolve(self._residencies.popleft(), message.lengths)
        elif isinstance(message, EngineEvent):
            ended = isinstance(message, Ended | Rejected)
            queue = self._turns.pop(message.turn, None) if ended else self._turns.get(message.turn)
            if queue is not None:
                queue.put_nowait(message)

    def _fail_all(self) -> None:
        self._up = False
        for queue in self._turns.values():
            queue.put_nowait(None)
        self._turns.clear()
        waiting: list[asyncio.Future[Any]] = [*self._stats, *self._residencies]
        for future in waiting:
            if not future.done():
                future.set_exception(EngineGone(GONE))
        self._stats.clear()
        self._residencies.clear()


def _resolve(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


async def _soon(frame: asyncio.Future[Any]) -> bool:
    """Whether a last frame of an ended process is still in the pipe; if not, stops waiting for it."""
    done, _ = await asyncio.wait({frame}, timeout=0.5)
    if not done:
        frame.cancel()
    return bool(done)
