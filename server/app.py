"""The HTTP application: the websocket of sessions, its mirror in plain requests, health and metrics."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Collection
from typing import Any

import msgspec
from litestar import Litestar, MediaType, Response, WebSocket, get, websocket
from litestar.connection import ASGIConnection
from litestar.exceptions import WebSocketDisconnect

from tokenspeed.client.protocol.codec import CODECS, JSON, SESSIONS_PATH
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.engine.client import EngineClient, EngineGone
from tokenspeed.server.access import ApiKeys, check_origin
from tokenspeed.server.answers import EXCEPTION_HANDLERS
from tokenspeed.server.connection import Connection, Host, Limits
from tokenspeed.server.exchange import Exchanges
from tokenspeed.server.frames import error_event
from tokenspeed.server.metrics import CONTENT_TYPE, Metrics
from tokenspeed.server.openapi import document
from tokenspeed.server.rest import Mirror

log = logging.getLogger(__name__)

READY_TIMEOUT_S = 2.0


class Live(msgspec.Struct):
    status: str = "live"


class Ready(msgspec.Struct):
    model: str
    status: str = "ready"


class Service:
    """What the routes share.

    Args:
        host: the sessions.
        engine: asked whether it can answer, and for its gauges.
        keys: API keys; without any, every client is the tenant `local`.
        origins: browser origins that are let in beside the server's own.
    """

    def __init__(
        self, host: Host, engine: EngineClient, keys: ApiKeys, limits: Limits, origins: Collection[str] = ()
    ) -> None:
        self.metrics = Metrics()
        self._host = host
        self._engine = engine
        self._keys = keys
        self._limits = limits
        self._origins = origins
        self._channels = itertools.count(1)
        self._connections: set[Connection] = set()
        self._exchanges = Exchanges(host, self.metrics)

    @property
    def max_body_bytes(self) -> int:
        return self._limits.max_frame_bytes

    def mirror(self) -> Mirror:
        """The requests that do what the websocket does."""
        return Mirror(self._exchanges, self.admit, self.max_body_bytes)

    def admit(self, connection: ASGIConnection[Any, Any, Any, Any]) -> str:
        """The tenant of a request or a websocket. Raises SessionError (`unauthorized`) if it is not let in."""
        headers = connection.headers
        check_origin(headers.get("origin"), headers.get("host"), self._origins, local_only=not self._keys)
        return self._keys.tenant(headers.get("authorization"))

    async def connect(self, socket: WebSocket[Any, Any, Any]) -> None:
        """Serve one websocket. A refusal accepts it first, so that the client reads why, then closes it with 4000 +
        the error's HTTP status.

        Of several subprotocols the first that is known is spoken. A client that offers none speaks JSON; one that
        offers only others is refused (4400), in JSON.
        """
        offered = [name.strip() for name in socket.headers.get("sec-websocket-protocol", "").split(",") if name]
        known = {codec.subprotocol: codec for codec in CODECS.values()}
        chosen = next((known[name] for name in offered if name in known), None)
        codec = chosen or JSON
        await socket.accept(subprotocols=chosen.subprotocol if chosen else None)
        accepted = AcceptedSocket(socket)
        try:
            tenant = self.admit(socket)
            if offered and chosen is None:
                raise SessionError("bad_request", f"the subprotocols are {', '.join(known)}, not {', '.join(offered)}")
        except SessionError as error:
            await accepted.send(codec.encode(error_event(error)))
            await accepted.close(4000 + error.status, _short(error.message))
            return
        connection = Connection(self._host, self.metrics, self._limits, codec, tenant, f"ws{next(self._channels)}")
        self._connections.add(connection)
        try:
            await connection.serve(accepted)
        finally:
            self._connections.discard(connection)

    async def ready(self) -> Ready:
        """Raises SessionError (`engine_restarted`, `overloaded`) if the engine does not answer in time."""
        try:
            self.metrics.engine(await asyncio.wait_for(self._engine.stats(), READY_TIMEOUT_S))
        except EngineGone:
            raise SessionError("engine_restarted", "the engine has ended") from None
        except TimeoutError:
            raise SessionError(
                "overloaded", f"the engine did not answer within {READY_TIMEOUT_S} s", retry_after_ms=1000
            ) from None
        return Ready(self._engine.info.model)

    async def drain(self) -> None:
        """Close every connection (1001) and answer every request: the server is ending."""
        await self._exchanges.leave()
        connections = list(self._connections)
        for connection in connections:
            connection.leave()
        await asyncio.gather(
            *(connection.close(1001, "the server is ending") for connection in connections), return_exceptions=True
        )


class AcceptedSocket:
    """A websocket as `Connection` wants it."""

    def __init__(self, socket: WebSocket[Any, Any, Any]) -> None:
        self._socket = socket

    async def receive(self) -> str | bytes | None:
        try:
            message = await self._socket.receive()
        except WebSocketDisconnect:
            return None
        if message["type"] != "websocket.receive":
            return None
        text: str | None = message.get("text")
        return text if text is not None else bytes(message.get("bytes") or b"")

    async def send(self, frame: str | bytes) -> None:
        if isinstance(frame, str):
            await self._socket.send_text(frame)
        else:
            await self._socket.send_bytes(frame)

    async def close(self, code: int, reason: str) -> None:
        await self._socket.close(code, reason)


def create_app(service: Service) -> Litestar:
    """The ASGI application of `service`."""

    @websocket(SESSIONS_PATH)
    async def sessions(socket: WebSocket[Any, Any, Any]) -> None:
        await service.connect(socket)

    @get("/health/live", sync_to_thread=False)
    def live() -> Live:
        return Live()

    @get("/health/ready")
    async def ready() -> Ready:
        return await service.ready()

    @get("/metrics", media_type="text/plain")
    async def metrics() -> Response[bytes]:
        # A scrape is answered without the engine's gauges rather than not at all.
        try:
            await service.ready()
        except SessionError as error:
            log.warning("metrics without the engine's: %s", error)
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    described = msgspec.json.encode(document())

    @get("/openapi.json", sync_to_thread=False)
    def openapi() -> Response[bytes]:
        return Response(described, media_type=MediaType.JSON)

    return Litestar(
        [sessions, live, ready, metrics, openapi, *service.mirror().routes()],
        exception_handlers=EXCEPTION_HANDLERS,
        request_max_body_size=service.max_body_bytes,
        openapi_config=None,
        logging_config=None,
    )


def _short(reason: str) -> str:
    """`reason` as a close frame can carry it: at most 123 bytes."""
    return reason.encode()[:123].decode(errors="ignore")
