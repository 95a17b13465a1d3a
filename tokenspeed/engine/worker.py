"""The engine's own process: `python -m tokenspeed.engine.worker ADDRESS PARENT`.

It connects to its client's socket, is told its configuration, loads the model and serves until it is shut down or its
parent is gone.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import zmq

from tokenspeed.engine.core import EngineCore
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
    decode_to_worker,
    encode,
)

IDLE_MS = 1000
"""How long an idle worker waits before it looks whether its parent still lives."""
LOADING_STEPS = 100
"""A phase of the start is reported so many times at most."""


class Worker:
    """An engine core behind a socket."""

    def __init__(self, socket: zmq.Socket[bytes], parent: int) -> None:
        self._socket = socket
        self._parent = parent

    def run(self) -> None:
        while not self._socket.poll(IDLE_MS):
            if os.getppid() != self._parent:
                return
        (start,) = decode_to_worker(self._socket.recv())
        assert isinstance(start, Start)
        reported: tuple[str, int] | None = None

        def progress(phase: str, done: int, total: int) -> None:
            nonlocal reported
            step = phase, done * LOADING_STEPS // total
            if step != reported:
                reported = step
                self._send([Loading(phase, done, total)])

        try:
            core = EngineCore(start.config, progress=progress)
        except Exception as error:
            # What the user can mend has a code or is a ValueError; the rest needs its traceback.
            if not hasattr(error, "code") and not isinstance(error, ValueError | RuntimeError):
                traceback.print_exc()
            self._send([Fatal(getattr(error, "code", "bad_model"), str(error) or type(error).__name__)])
            return
        self._send([Ready(core.info)])
        while self._take_messages(core):
            if core.busy:
                events = core.step()
                if events:
                    self._send(events)

    def _take_messages(self, core: EngineCore) -> bool:
        """Hand over what has arrived; wait only if the core is idle. False when it is time to end."""
        while self._socket.poll(0 if core.busy else IDLE_MS):
            for message in decode_to_worker(self._socket.recv()):
                if isinstance(message, Shutdown):
                    return False
                self._handle(core, message)
        return os.getppid() == self._parent

    def _handle(self, core: EngineCore, message: ToWorker) -> None:
        if isinstance(message, AskStats):
            self._send([core.stats()])
        elif isinstance(message, AskResidency):
            self._send([Residency(core.residency(message.turns))])
        elif not isinstance(message, Start | Shutdown):
            core.submit(message)

    def _send(self, messages: Sequence[FromWorker]) -> None:
        self._socket.send(encode(messages))


def main(address: str, parent: int) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.linger = 1000
    socket.sndhwm = socket.rcvhwm = 0
    socket.connect(address)
    try:
        Worker(socket, parent).run()
    finally:
        socket.close()
        context.term()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
