"""One websocket for the blocking client: connects when needed, reads on a thread of its own, shared by all threads."""

from __future__ import annotations

import threading
from contextlib import suppress

from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from tokenspeed.client.address import Address
from tokenspeed.client.core import Core
from tokenspeed.client.errors import ConnectionFailed, ProtocolError
from tokenspeed.client.protocol.commands import Command, TurnCancel
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import Reply
from tokenspeed.client.turns import Delta, TurnAssembly


class Link:
    """Thread-safe. After a lost connection the next command opens another one; turns of the lost one fail."""

    def __init__(self, address: Address) -> None:
        self._address = address
        # Guards the core and everything that hangs on it, and tells waiting threads of news.
        self._news = threading.Condition()
        self._core: Core | None = None
        self._socket: ClientConnection | None = None

    def request(self, command: Command) -> tuple[Core, Reply]:
        """Send a command and wait for its answer; returns it with the connection's core.

        Raises:
            SessionError: the server refused the command, or the client.
            ConnectionFailed: no connection, or it was lost before the answer.
        """
        with self._news:
            core, socket = self._connected()
            frame = core.submit(command)
        # The reader finds out about a lost connection too, with the reason, and answers every command that waits.
        with suppress(ConnectionClosed):
            socket.send(frame)
        with self._news:
            try:
                self._news.wait_for(lambda: core.answered(command.id))
            except BaseException:
                core.abandon(command.id)
                raise
            return core, core.take(command.id)

    def create(self, command: Command) -> tuple[Core, TurnAssembly]:
        """Begin a turn; raises as `request` does."""
        core, reply = self.request(command)
        return core, self.turns(core, reply)[0]

    def turns(self, core: Core, reply: Reply) -> list[TurnAssembly]:
        """The turns that a command began."""
        with self._news:
            return core.turns(reply)

    def next_delta(self, turn: TurnAssembly) -> Delta | None:
        """The turn's next delta, as soon as there is one; None after the last."""
        with self._news:
            self._news.wait_for(lambda: turn.deltas or turn.over)
            return turn.deltas.popleft() if turn.deltas else None

    def cancel(self, core: Core, turn: TurnAssembly) -> None:
        """End a running turn in the server and wait until it has ended. A lost connection is no error here."""
        with self._news:
            if turn.over or core is not self._core:
                return
        try:
            self.request(TurnCancel("", turn.id))
        except (SessionError, ConnectionFailed):
            return
        with self._news:
            self._news.wait_for(lambda: turn.over)

    def forget(self, core: Core, turn: TurnAssembly) -> None:
        with self._news:
            core.forget(turn.id)

    def close(self) -> None:
        with self._news:
            socket, self._socket, self._core = self._socket, None, None
        if socket is not None:
            socket.close()

    def _connected(self) -> tuple[Core, ClientConnection]:
        if self._core is not None and self._socket is not None and self._core.failure is None:
            return self._core, self._socket
        core = Core(self._address.websocket_url, self._address.codec)
        socket = _open(self._address)
        self._core, self._socket = core, socket
        threading.Thread(target=self._read, args=(core, socket), name="tokenspeed-reader", daemon=True).start()
        return core, socket

    def _read(self, core: Core, socket: ClientConnection) -> None:
        failure: Exception
        try:
            while True:
                frame = socket.recv()
                with self._news:
                    core.receive(frame)
                    self._news.notify_all()
        except ConnectionClosed as closed:
            received = closed.rcvd
            failure = core.closed(received.code if received else None, received.reason if received else "")
        except ProtocolError as error:
            socket.close(1002)
            failure = error
        with self._news:
            core.fail(failure)
            self._news.notify_all()


def _open(address: Address) -> ClientConnection:
    url = address.websocket_url
    try:
        connection = connect(
            url,
            subprotocols=[Subprotocol(address.codec.subprotocol)],
            additional_headers=address.headers,
            compression=None,
            max_size=None,
            proxy=address.proxy,
        )
        # Entering is how every version of the library hands out the connection without complaint.
        return connection.__enter__()
    except InvalidStatus as error:
        raise ConnectionFailed(url, refusal(error)) from None
    except (OSError, WebSocketException) as error:
        raise ConnectionFailed(url, f"cannot connect: {error or type(error).__name__}") from error


def refusal(error: InvalidStatus) -> str:
    """What an answer in plain HTTP says of the other end: it is not this protocol's server."""
    return f"no tokenspeed server answers there (HTTP {error.response.status_code})"
