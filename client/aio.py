"""The asyncio client: `AsyncClient`. The blocking client's twin; see there for more words."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self, Unpack, overload

import httpx

from tokenspeed.client.address import Address
from tokenspeed.client.aio_link import AsyncLink
from tokenspeed.client.aio_session import AsyncSession
from tokenspeed.client.aio_stream import AsyncTurnStream
from tokenspeed.client.core import Core
from tokenspeed.client.protocol.codec import Encoding
from tokenspeed.client.protocol.commands import ReasoningRule, Sampling, SessionGet, SessionList, SessionOpen
from tokenspeed.client.protocol.events import SessionRecord
from tokenspeed.client.requests import (
    SamplingOptions,
    TurnInput,
    TurnOptions,
    TurnRequest,
    attached_tools,
    branch_records,
    check_attach,
    opened_tools,
    record_in,
    sampling_of,
    session_open,
    turn_request,
)
from tokenspeed.client.tools import Tool, Toolset
from tokenspeed.client.turns import Turn, TurnAssembly


class AsyncBranch(NamedTuple):
    """A turn after another one, and the session that it opened."""

    session: AsyncSession
    turn: Turn


class AsyncClient:
    """`Client` for one asyncio event loop: the same names, arguments and errors. Tools may be async functions."""

    def __init__(
        self, base_url: str | None = None, api_key: str | None = None, *, encoding: Encoding = "msgpack"
    ) -> None:
        self._address = Address.of(base_url, api_key, encoding)
        self._link = AsyncLink(self._address)

    @property
    def base_url(self) -> str:
        return self._address.base_url

    def session(
        self,
        *,
        id: str | None = None,
        from_: Turn | str | None = None,
        instructions: str | None = None,
        tools: Iterable[Tool] | None = None,
        model: str | None = None,
        reasoning: ReasoningRule | None = None,
        labels: Mapping[str, str] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Opening:
        """Open a session, or return to one: `session = await client.session(…)`, or `async with client.session(…) as
        session:`, which closes it at the end. Arguments as in `Client.session`."""
        chosen = sampling_of(sampling, options)
        if id is not None:
            check_attach(
                from_=from_,
                instructions=instructions,
                model=model,
                reasoning=reasoning,
                labels=labels,
                sampling=chosen,
            )
            return Opening(self._attach(id, list(tools or ())))
        toolset = Toolset(tools) if tools is not None else None
        command = session_open(toolset, instructions, model, reasoning, labels, chosen, from_)
        return Opening(self._open(command, toolset))

    @overload
    async def turn(
        self, parent: Turn | str, input: TurnInput, *, n: None = None, **options: Unpack[TurnOptions]
    ) -> AsyncBranch: ...

    @overload
    async def turn(
        self, parent: Turn | str, input: TurnInput, *, n: int, **options: Unpack[TurnOptions]
    ) -> list[AsyncBranch]: ...

    async def turn(
        self, parent: Turn | str, input: TurnInput, *, n: int | None = None, **options: Unpack[TurnOptions]
    ) -> AsyncBranch | list[AsyncBranch]:
        """Take a turn after any turn, in a new session with the same past; with `n` so many, side by side. Arguments
        and answer as in `Client.turn`."""
        request = turn_request(None, input, options, parent, n if n is not None else 1)
        core, reply = await self._link.request(request.command)
        branches = [
            self._branch(record, request, core, turn)
            for record, turn in zip(branch_records(reply), core.turns(reply), strict=True)
        ]
        taken = await asyncio.gather(*branches)
        return taken if n is not None else taken[0]

    async def sessions(self, labels: Mapping[str, str] | None = None) -> list[SessionRecord]:
        """The sessions of this key's tenant that are not closed and bear all of `labels`, in the order of opening."""
        records: list[SessionRecord] = []
        command = SessionList("", dict(labels or {}))
        while True:
            _, reply = await self._link.request(command)
            records += reply.sessions or []
            if reply.after is None:
                return records
            command = SessionList("", command.labels, after=reply.after)

    async def ready(self) -> bool:
        """Whether the server can answer now (its `/health/ready`); False if it cannot be reached, too."""
        try:
            async with httpx.AsyncClient(trust_env=self._address.proxy is True) as http:
                return (await http.get(f"{self.base_url}/health/ready")).is_success
        except httpx.HTTPError:
            return False

    async def close(self) -> None:
        """Close the connection. Sessions stay in the server; a later call connects again."""
        await self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _attach(self, session: str, tools: list[Tool]) -> AsyncSession:
        record = record_in((await self._link.request(SessionGet("", session)))[1])
        return AsyncSession(self._link, record, attached_tools(record, tools))

    async def _open(self, command: SessionOpen, toolset: Toolset | None) -> AsyncSession:
        record = record_in((await self._link.request(command))[1])
        return AsyncSession(self._link, record, opened_tools(record, toolset))

    async def _branch(self, record: SessionRecord, request: TurnRequest, core: Core, turn: TurnAssembly) -> AsyncBranch:
        session = AsyncSession(self._link, record, opened_tools(record, request.tools))
        async with AsyncTurnStream(session, request, (core, turn)) as stream:
            return AsyncBranch(session, await stream.result())


class Opening:
    """A session that is about to open: await it, or enter it with `async with`."""

    def __init__(self, opening: Coroutine[Any, Any, AsyncSession]) -> None:
        self._opening = opening
        self._session: AsyncSession | None = None

    def __await__(self) -> Generator[Any, None, AsyncSession]:
        return self._opening.__await__()

    async def __aenter__(self) -> AsyncSession:
        self._session = await self._opening
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.__aexit__(kind, error, traceback)
