"""Errors as HTTP answers."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from tokenspeed.client.protocol.errors import SessionError, error_body
from tokenspeed.engine.client import EngineGone

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
"""Told to a client that may come back, where the error names no time of its own."""

_CODES = {401: "unauthorized", 404: "not_found", 405: "method_not_allowed", 413: "payload_too_large"}


def refused(_: Request[Any, Any, Any], error: SessionError) -> Response[bytes]:
    """The answer to a request that is refused: the error's status and body, and when it may be sent again."""
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        after_ms = error.retry_after_ms
        headers["retry-after"] = str(RETRY_AFTER_S if after_ms is None else -(-after_ms // 1000))
    if error.status == 409:
        headers["x-should-retry"] = "false"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(error_body(error)),
        status_code=error.status,
        media_type=MediaType.JSON,
        headers=headers,
    )


def _http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    answer = refused(request, SessionError(_CODES.get(error.status_code, "bad_request"), error.detail))
    answer.status_code = error.status_code
    answer.headers.update(error.headers or {})
    return answer


def _engine_gone(request: Request[Any, Any, Any], _: EngineGone) -> Response[bytes]:
    return refused(request, SessionError("engine_restarted", "the engine ended"))


def _internal_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    log.error("%s failed", request.url.path, exc_info=error)
    return refused(request, SessionError("engine_error", "the server failed; its log says why"))


EXCEPTION_HANDLERS: ExceptionHandlersMap = {
    SessionError: refused,
    HTTPException: _http_error,
    EngineGone: _engine_gone,
    Exception: _internal_error,
}
