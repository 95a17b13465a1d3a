"""A server that listens: the socket, uvicorn, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Collection, Iterator

import uvicorn

from tokenspeed.engine.client import EngineClient
from tokenspeed.server.access import ApiKeys, is_loopback
from tokenspeed.server.app import Service, create_app
from tokenspeed.server.connection import Host, Limits

PING_INTERVAL_S = 20.0
SHUTDOWN_S = 5.0


class ServeError(Exception):
    """The server cannot listen as it was told to; the message says why, in one line."""


class Listener:
    """A bound TCP port. Bound before the weights are loaded, so that what cannot work fails at once.

    Args:
        host: a name or an address. Without keys it must be one that only this machine reaches.
        port: 0 takes a free one.

    Raises:
        ServeError: no keys and not loopback, an unknown host, or a port that is taken or not allowed.
    """

    def __init__(self, host: str, port: int, keys: ApiKeys) -> None:
        self.host = host
        try:
            if not keys and not is_loopback(host):
                raise ServeError(
                    f"without an API key the server listens on this machine only, not on {host}: "
                    "give --api-key TENANT=KEY, or --host 127.0.0.1"
                )
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except OSError as error:
            raise ServeError(f"the host {host} is not known: {error.strerror or error}") from None
        self.socket = socket.socket(family, kind, protocol)
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind(address)
        except OSError as error:
            self.socket.close()
            raise ServeError(_bind_message(error, host, port)) from None

    @property
    def port(self) -> int:
        return int(self.socket.getsockname()[1])

    @property
    def url(self) -> str:
        """Where a client on this machine finds the server."""
        any_address = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        host = any_address.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def listen(self) -> None:
        """Take connections from now on; before, they are refused. Raises ServeError as the constructor does: another
        server may have bound the port, too, and listened first."""
        try:
            self.socket.listen(2048)
        except OSError as error:
            raise ServeError(_bind_message(error, self.host, self.port)) from None

    def close(self) -> None:
        self.socket.close()


class Server:
    """Sessions served on a listener.

    Args:
        host: the sessions.
        engine: for health and metrics.
        limits: bounds of every connection.
        origins: browser origins that are let in beside the server's own.
    """

    def __init__(
        self,
        listener: Listener,
        host: Host,
        engine: EngineClient,
        keys: ApiKeys,
        *,
        limits: Limits | None = None,
        origins: Collection[str] = (),
    ) -> None:
        limits = limits or Limits()
        self._listener = listener
        self._service = Service(host, engine, keys, limits, origins)
        self._stopping = asyncio.Event()
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                create_app(self._service),
                ws="websockets-sansio",
                # Beyond the limit there is room for a refusal in words; past that the connection is closed (1009).
                ws_max_size=4 * limits.max_frame_bytes,
                ws_ping_interval=PING_INTERVAL_S,
                ws_ping_timeout=PING_INTERVAL_S,
                ws_per_message_deflate=False,
                timeout_graceful_shutdown=int(SHUTDOWN_S),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
            )
        )

    @property
    def url(self) -> str:
        return self._listener.url

    async def started(self) -> None:
        """Until connections are answered."""
        while not self._uvicorn.started:
            await asyncio.sleep(0.005)

    async def serve(self) -> None:
        """Answer until `stop`; then close the connections (1001) and return within `SHUTDOWN_S`. The host and the
        engine are left to whoever made them.

        Raises:
            ServeError: the port was taken while the server got ready.
        """
        self._listener.listen()
        stopper = asyncio.create_task(self._stop_when_told())
        try:
            await self._uvicorn.serve(sockets=[self._listener.socket])
        finally:
            stopper.cancel()
            self._listener.close()

    def stop(self) -> None:
        """End `serve`. Called on the event loop's thread."""
        self._stopping.set()

    async def _stop_when_told(self) -> None:
        await self._stopping.wait()
        await asyncio.wait([asyncio.create_task(self._service.drain())], timeout=SHUTDOWN_S)
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the caller's: uvicorn would raise them again after its end, past the engine's."""
        yield


def _bind_message(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: stop what uses it, or give another --port"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} is not allowed for this user: give a --port above 1023"
    return f"cannot listen on {host}:{port}: {error.strerror or error}"
