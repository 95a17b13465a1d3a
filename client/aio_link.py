"""One websocket for the asyncio client: connects when needed, read by one task, shared by all tasks of the loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.typing import Subprotocol

from tokenspeed.client.address import Address
from tokenspeed.client.core import Core
from tokenspeed.client.errors import ConnectionFailed, ProtocolError
from tokenspeed.client.link import refusal
from tokenspeed.client.protocol.commands import Command, TurnCancel
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import Reply
from tokenspeed.client.turns import Delta, TurnAssembly


class AsyncLink:
    """Belongs to one event loop. After a lost connection the next command opens another one."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connecting = asyncio.Lock()
        self._core: Core | None = None
        self._socket: ClientConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        # Keyed by connection, too: two of them number their commands alike.
        self._waiting: dict[tuple[Core, str], set[asyncio.Future[None]]] = {}
        self._cancelling: set[asyncio.Task[None]] = set()

    async def request(self, command: Command) -> tuple[Core, Reply]:
        """Send a command and wait for its answer; returns it with the connection's core.

        Raises:
            SessionError: the server refused the command, or the client.
            ConnectionFailed: no connection, or it was lost before the answer.
        """
        core, socket = await self._connected()
        frame = core.submit(command)
        try:
            # The reader finds out about a lost connection too, with the reason, and answers every command that waits.
            with suppress(ConnectionClosed):
                await socket.send(frame)
            while not core.answered(command.id):
                await self._wait(core, command.id)
        except asyncio.CancelledError:
            core.abandon(command.id)
            raise
        return core, core.take(command.id)

    async def create(self, command: Command) -> tuple[Core, TurnAssembly]:
        """Begin a turn; raises as `request` does."""
        core, reply = await self.request(command)
        return core, core.turns(reply)[0]

    async def next_delta(self, core: Core, turn: TurnAssembly) -> Delta | None:
        """The turn's next delta, as soon as there is one; None after the last."""
        while not turn.deltas and not turn.over:
            await self._wait(core, turn.id)
        return turn.deltas.popleft() if turn.deltas else None

    async def cancel(self, core: Core, turn: TurnAssembly) -> None:
        """End a running turn in the server and wait until it has ended. A lost connection is no error here. Goes on
        in the background if the waiting task is itself cancelled."""
        task = asyncio.create_task(self._cancel(core, turn))
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)
        await asyncio.shield(task)

    async def close(self) -> None:
        """Close the connection, after the cancels under way were sent."""
        if self._cancelling:
            await asyncio.wait(self._cancelling, timeout=1.0)
        socket, reader = self._socket, self._reader
        self._core = self._socket = self._reader = None
        if socket is not None:
            await socket.close()
        if reader is not None:
            await reader

    async def _cancel(self, core: Core, turn: TurnAssembly) -> None:
        if turn.over or core is not self._core:
            return
        try:
            await self.request(TurnCancel("", turn.id))
        except (SessionError, ConnectionFailed):
            return
        while not turn.over:
            await self._wait(core, turn.id)

    async def _connected(self) -> tuple[Core, ClientConnection]:
        async with self._connecting:
            if self._core is None or self._socket is None or self._core.failure is not None:
                core = Core(self._address.websocket_url, self._address.codec)
                self._socket = await _open(self._address)
                self._core = core
                self._reader = asyncio.create_task(self._read(core, self._socket))
            return self._core, self._socket

    async def _wait(self, core: Core, key: str) -> None:
        """Until there may be news of `key`, a command or a turn of this connection."""
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault((core, key), set())
        waiting.add(told)
        try:
            await told
        finally:
            waiting.discard(told)
            if not waiting and self._waiting.get((core, key)) is waiting:
                del self._waiting[core, key]

    def _tell(self, core: Core, keys: list[str]) -> None:
        for key in keys:
            for told in self._waiting.pop((core, key), ()):
                if not told.done():
                    told.set_result(None)

    async def _read(self, core: Core, socket: ClientConnection) -> None:
        failure: Exception
        try:
            while True:
                self._tell(core, core.receive(await socket.recv()))
        except ConnectionClosed as closed:
            received = closed.rcvd
            failure = core.closed(received.code if received else None, received.reason if received else "")
        except ProtocolError as error:
            await socket.close(1002)
            failure = error
        self._tell(core, core.fail(failure))


async def _open(address: Address) -> ClientConnection:
    url = address.websocket_url
    try:
        return await connect(
            url,
            subprotocols=[Subprotocol(address.codec.subprotocol)],
            additional_headers=address.headers,
            compression=None,
            max_size=None,
            proxy=address.proxy,
        )
    except InvalidStatus as error:
        raise ConnectionFailed(url, refusal(error)) from None
    except (OSError, WebSocketException) as error:
        raise ConnectionFailed(url, f"cannot connect: {error or type(error).__name__}") from error
