"""An engine in its own process: the client side."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

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
)
from tokenspeed.engine.wire import (
    AskStats,
    Fatal,
    FromWorker,
    Loading,
    Ready,
    Shutdown,
    Start,
    ToWorker,
    decode_from_worker,
    encode,
)

SHUTDOWN_S = 10.0


class EngineStartError(RuntimeError):
    """The engine did not come up. `code` is of the error in its process (`bad_config`, `bad_model`, …)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ProcessEngine:
    """An `EngineClient` whose engine is a child process, reached over an ipc socket in a private directory."""

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, directory: Path) -> None:
        self._process = process
        self._socket = socket
        self._directory = directory
        self._info: EngineInfo | None = None
        self._turns: dict[str, asyncio.Queue[EngineEvent | None]] = {}
        self._stats: deque[asyncio.Future[EngineStats]] = deque()
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._gone = False
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> ProcessEngine:
        """Start the process and wait until it can answer.

        Args:
            progress: called with (tensors loaded, tensors in all).

        Raises:
            EngineStartError: with the reason, in one sentence.
        """
        directory = Path(tempfile.mkdtemp(prefix="tokenspeed-"))  # readable by this user alone
        socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        address = f"ipc://{directory}/engine"
        socket.bind(address)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tokenspeed.engine.worker", address, stdin=asyncio.subprocess.DEVNULL
        )
        engine = cls(process, socket, directory)
        try:
            await socket.send(encode([Start(config)]))
            await engine._wait_until_ready(progress)
        except BaseException:
            await engine._end_process()
            raise
        engine._tasks = [asyncio.create_task(work()) for work in (engine._receive, engine._send, engine._watch)]
        return engine

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None
        return self._info

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return not self._gone

    def generate(self, command: Generate) -> AsyncIterator[EngineEvent]:
        queue: asyncio.Queue[EngineEvent | None] = asyncio.Queue()
        if self._gone:
            queue.put_nowait(None)
        else:
            self._turns[command.turn] = queue
            self._post(command)
        return self._events(command.turn, queue)

    async def _events(self, turn: str, queue: asyncio.Queue[EngineEvent | None]) -> AsyncIterator[EngineEvent]:
        while True:
            event = await queue.get()
            if event is None:
                raise EngineGone("the engine's process has ended")
            yield event
            if isinstance(event, Ended | Rejected):
                return

    def cancel(self, command: Cancel) -> None:
        self._post(command)

    def release(self, turns: list[str]) -> None:
        if turns:
            self._post(Release(turns))

    async def stats(self) -> EngineStats:
        """The engine's answer, so it shows that the engine's loop turns.

        Raises:
            EngineGone: if the process has ended.
        """
        if self._gone:
            raise EngineGone("the engine's process has ended")
        future: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._stats.append(future)
        self._post(AskStats())
        return await future

    async def close(self) -> None:
        self._post(Shutdown())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), SHUTDOWN_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all()
        await self._end_process()

    # ------------------------------------------------------------------ inside

    def _post(self, message: ToWorker) -> None:
        if not self._gone:
            self._outbox.put_nowait(encode([message]))

    async def _send(self) -> None:
        while True:
            await self._socket.send(await self._outbox.get())

    async def _receive(self) -> None:
        while True:
            for message in decode_from_worker(await self._socket.recv()):
                self._dispatch(message)

    def _dispatch(self, message: FromWorker) -> None:
        if isinstance(message, EngineStats):
            future = self._stats.popleft()
            if not future.done():
                future.set_result(message)
        elif isinstance(message, EngineEvent):
            ended = isinstance(message, Ended | Rejected)
            queue = self._turns.pop(message.turn, None) if ended else self._turns.get(message.turn)
            if queue is not None:
                queue.put_nowait(message)

    async def _watch(self) -> None:
        await self._process.wait()
        self._fail_all()

    def _fail_all(self) -> None:
        self._gone = True
        for queue in self._turns.values():
            queue.put_nowait(None)
        self._turns.clear()
        for future in self._stats:
            if not future.done():
                future.set_exception(EngineGone("the engine's process has ended"))
        self._stats.clear()

    async def _wait_until_ready(self, progress: Callable[[int, int], None] | None) -> None:
        exited = asyncio.create_task(self._process.wait())
        try:
            while self._info is None:
                frame = asyncio.ensure_future(self._socket.recv())
                await asyncio.wait({frame, exited}, return_when=asyncio.FIRST_COMPLETED)
                if not frame.done() and not await _soon(frame):
                    code = self._process.returncode
                    raise EngineStartError("engine_error", f"the engine's process ended with exit code {code}")
                for message in decode_from_worker(frame.result()):
                    if isinstance(message, Loading) and progress is not None:
                        progress(message.done, message.total)
                    elif isinstance(message, Ready):
                        self._info = message.info
                    elif isinstance(message, Fatal):
                        raise EngineStartError(message.code, message.message)
        finally:
            exited.cancel()

    async def _end_process(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._socket.close()
        shutil.rmtree(self._directory, ignore_errors=True)


async def _soon(frame: asyncio.Future[bytes]) -> bool:
    """Whether a last frame of an ended process is still in the pipe; if not, stops waiting for it."""
    done, _ = await asyncio.wait({frame}, timeout=0.5)
    if not done:
        frame.cancel()
    return bool(done)
