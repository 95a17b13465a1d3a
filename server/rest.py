"""The HTTP mirror of the websocket: every command as a request, turns whole or as server-sent events."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream

from tokenspeed.client.protocol.commands import Command, SessionClose
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import Reply
from tokenspeed.server.bounds import check_json, check_size
from tokenspeed.server.exchange import Exchange, Exchanges
from tokenspeed.server.operations import OPERATIONS, BranchesAnswer, Operation, Reader, sessions_of

JSON_MEDIA_TYPE = "application/json"
EVENT_STREAM = "text/event-stream"
CHANNEL = "http"

_LONG_BODY = 65_536
"""Bytes from which a body is checked and decoded on a thread."""


class Mirror:
    """Answers requests.

    Args:
        admit: the tenant of a request; raises SessionError if it is not let in.
        max_body_bytes: of a request.
    """

    def __init__(
        self, exchanges: Exchanges, admit: Callable[[Request[Any, Any, Any]], str], max_body_bytes: int
    ) -> None:
        self._exchanges = exchanges
        self._admit = admit
        self._max_body_bytes = max_body_bytes
        self._channels = itertools.count(1)

    def routes(self) -> Sequence[HTTPRouteHandler]:
        return [self._route(operation) for operation in OPERATIONS]

    def _route(self, operation: Operation) -> HTTPRouteHandler:
        reader = Reader(operation)

        async def answer(request: Request[Any, Any, Any]) -> Response[Any]:
            tenant = self._admit(request)
            command = await self._command(reader, operation, request)
            if operation.takes_turns:
                return await self._turns(operation, tenant, command, _wants_events(request))
            reply = await self._exchanges.host.request(tenant, command, CHANNEL)
            self._exchanges.metrics.answered(command, reply)
            return _answer(operation, reply)

        path = operation.path.replace("}", ":str}")
        # Each answer brings its own status; the handler's would be refused beside a body where it is 204.
        return HTTPRouteHandler(path, http_method=operation.method, status_code=200, name=operation.name)(answer)

    async def _command(self, reader: Reader, operation: Operation, request: Request[Any, Any, Any]) -> Command:
        body = b""
        if operation.body:
            body = await request.body()
            check_size(body, self._max_body_bytes)
        if body and request.content_type[0] != JSON_MEDIA_TYPE:
            raise HTTPException(f"the body must be {JSON_MEDIA_TYPE}", status_code=415)
        query = parse_qsl(request.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = (reader, request.path_params, query, body)
        return _read(*given) if len(body) < _LONG_BODY else await asyncio.to_thread(_read, *given)

    async def _turns(self, operation: Operation, tenant: str, command: Command, events: bool) -> Response[Any]:
        exchange = Exchange(self._exchanges, tenant, f"{CHANNEL}{next(self._channels)}")
        reply = await exchange.begin(command)
        if events:
            return Stream(exchange.stream(reply), media_type=EVENT_STREAM, headers={"cache-control": "no-cache"})
        try:
            turns = await exchange.whole(command, reply)
        except SessionError:
            if operation.answer is BranchesAnswer:
                # Nobody is told of the sessions that were to hold the answers, so none stays.
                for session in sessions_of(reply):
                    await self._exchanges.host.request(tenant, SessionClose("", session.id), CHANNEL)
            raise
        if operation.answer is BranchesAnswer:
            return _json(BranchesAnswer(turns, sessions_of(reply)), operation.status)
        return _json(turns[0], operation.status)


def _read(reader: Reader, path: dict[str, str], query: list[tuple[str, str]], body: bytes) -> Command:
    check_json(body)
    return reader.read(path, query, body)


def _answer(operation: Operation, reply: Reply) -> Response[Any]:
    taken = operation.take(reply)
    if taken is None:
        return Response(None, status_code=operation.status)
    return _json(taken, operation.status)


def _json(value: msgspec.Struct, status: int) -> Response[Any]:
    return Response(msgspec.json.encode(value), status_code=status, media_type=MediaType.JSON)


def _wants_events(request: Request[Any, Any, Any]) -> bool:
    """Whether events are accepted, and an answer in JSON is not named beside them before."""
    accepted = [part.partition(";")[0].strip().lower() for part in request.headers.get("accept", "").split(",")]
    known = [media_type for media_type in accepted if media_type in (EVENT_STREAM, JSON_MEDIA_TYPE)]
    return known[:1] == [EVENT_STREAM]
