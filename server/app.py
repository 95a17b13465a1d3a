"""The HTTP application: the websocket of sessions, health and metrics."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Collection
from typing import Any

import msgspec
from litestar import Litestar, MediaType, Request, Response, WebSocket, get, websocket
from litestar.exceptions import HTTPException, WebSocketDisconnect

from tokenspeed.client.protocol.codec import SESSIONS_PATH, SUBPROTOCOL_JSON, encode
from tokenspeed.client.protocol.errors import SessionError, error_body
from tokenspeed.engine.client import EngineClient, EngineGone
from tokenspeed.server.access import ApiKeys, check_origin
from tokenspeed.server.connection import Connection, Host, Limits
from tokenspeed.server.frames import error_event
from tokenspeed.server.metrics import CONTENT_TYPE, Metrics

log = logging.getLogger(__name__)

READY_TIMEOUT_S = 2.0
_CODES = {401: "unauthorized", 404: "not_found", 405: "method_not_allowed", 413: "payload_too_large"}


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

    async def connect(self, socket: WebSocket[Any, Any, Any]) -> None:
        """Serve one websocket. A refusal accepts it first, so that the client reads why, then closes it with 4000 +
        the error's HTTP status.

        A client that offers no subprotocol speaks JSON; one that offers only others is refused (4400).
        """
        offered = [name.strip() for name in socket.headers.get("sec-websocket-protocol", "").split(",") if name]
        await socket.accept(subprotocols=SUBPROTOCOL_JSON if SUBPROTOCOL_JSON in offered else None)
        try:
            check_origin(
                socket.headers.get("origin"), socket.headers.get("host"), self._origins, local_only=not self._keys
            )
            tenant = self._keys.tenant(socket.headers.get("authorization"))
            if offered and SUBPROTOCOL_JSON not in offered:
                raise SessionError("bad_request", f"the subprotocol is {SUBPROTOCOL_JSON}, not {', '.join(offered)}")
        except SessionError as error:
            await socket.send_text(encode(error_event(error)))
            await socket.close(4000 + error.status, _short(error.message))
            return
        connection = Connection(self._host, self.metrics, self._limits, tenant, f"ws{next(self._channels)}")
        self._connections.add(connection)
        try:
            await connection.serve(AcceptedSocket(socket))
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
        """Close every connection (1001): the server is ending."""
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

    async def send(self, frame: str) -> None:
        await self._socket.send_text(frame)

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

    return Litestar(
        [sessions, live, ready, metrics],
        exception_handlers={
            SessionError: _session_error,
            HTTPException: _http_error,
            Exception: _internal_error,
        },
        openapi_config=None,
        logging_config=None,
    )


def _session_error(_: Request[Any, Any, Any], error: SessionError) -> Response[bytes]:
    headers = {"retry-after": str(-(-error.retry_after_ms // 1000))} if error.retry_after_ms is not None else {}
    if error.status == 409:
        headers["x-should-retry"] = "false"
    return Response(
        msgspec.json.encode(error_body(error)),
        status_code=error.status,
        media_type=MediaType.JSON,
        headers=headers,
    )


def _http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    answer = _session_error(request, SessionError(_CODES.get(error.status_code, "bad_request"), error.detail))
    answer.status_code = error.status_code
    answer.headers.update(error.headers or {})
    return answer


def _internal_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    log.error("%s failed", request.url.path, exc_info=error)
    return _session_error(request, SessionError("engine_error", "the server failed; its log says why"))


def _short(reason: str) -> str:
    """`reason` as a close frame can carry it: at most 123 bytes."""
    return reason.encode()[:123].decode(errors="ignore")
