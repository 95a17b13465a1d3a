"""The protocol's state on the client's side of one connection, without I/O.

A front (blocking or asyncio) sends the frames that `submit` returns, hands every received frame to `receive` and wakes
whoever waits for one of the keys that it returns: ids of answered commands and of turns with news.
"""

from __future__ import annotations

import itertools

import msgspec

from tokenspeed.client.errors import ConnectionFailed, ProtocolError
from tokenspeed.client.protocol.codec import Codec
from tokenspeed.client.protocol.commands import Command, SessionRegenerate, TurnCreate
from tokenspeed.client.protocol.errors import ERROR_RULES, SessionError
from tokenspeed.client.protocol.events import ErrorEvent, Reply, ServerMessage, TurnEnded, TurnEvent
from tokenspeed.client.turns import TurnAssembly

REFUSED = 4000
"""Close codes from here on are a refusal: 4000 + the HTTP status."""


class Core:
    """One connection's commands without an answer, and its turns.

    Events may overtake the reply that names their turn. A turn that nobody waits for any more is given to `forget`;
    its later events are dropped.
    """

    def __init__(self, url: str, codec: Codec) -> None:
        self.url = url
        self._codec = codec
        self.failure: Exception | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[str, Command] = {}
        self._answers: dict[str, tuple[Command, Reply | Exception]] = {}
        self._turns: dict[str, TurnAssembly] = {}
        self._forgotten: set[str] = set()
        self._abandoned: set[str] = set()
        self._fault: SessionError | None = None

    def submit(self, command: Command) -> str | bytes:
        """Give `command` its id and return the frame to send. Raises what the connection ended with, if it ended."""
        if self.failure is not None:
            raise self.failure
        command.id = f"c{next(self._ids)}"
        frame = self._codec.encode(command)
        self._waiting[command.id] = command
        return frame

    def answered(self, command: str) -> bool:
        return command in self._answers

    def take(self, command: str) -> Reply:
        """The answer to a command that was answered, once.

        Raises:
            SessionError: the server refused it.
            ConnectionFailed: the connection was lost before the answer.
        """
        _, answer = self._answers.pop(command)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def abandon(self, command: str) -> None:
        """Nobody waits for this answer any more; the turn that it may name is forgotten when it comes."""
        sent, answer = self._answers.pop(command, (None, None))
        if isinstance(answer, Reply):
            self._forget_begun(sent, answer)
        elif command in self._waiting:
            self._abandoned.add(command)

    def turn(self, turn: str) -> TurnAssembly:
        """The state of a turn that this connection receives."""
        assembly = self._turns.get(turn)
        if assembly is None:
            assembly = self._turns[turn] = TurnAssembly(turn)
            if self.failure is not None:
                assembly.fail(self.failure)
        return assembly

    def turns(self, reply: Reply) -> list[TurnAssembly]:
        """The turns that a command began. Raises ProtocolError if the reply names none."""
        named = _turns_named(reply)
        if not named:
            raise ProtocolError(f"the reply {reply.id} names no turn")
        return [self.turn(turn) for turn in named]

    def forget(self, turn: str) -> None:
        """Drop a turn's state and its events to come."""
        assembly = self._turns.pop(turn, None)
        if assembly is None or not assembly.over:
            self._forgotten.add(turn)

    def receive(self, frame: str | bytes) -> list[str]:
        """Take a frame; returns the keys with news.

        Raises:
            ProtocolError: the frame cannot be read; the connection is of no more use.
        """
        try:
            messages = self._codec.messages(frame)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{self.url}: unreadable frame: {error}") from error
        news: list[str] = []
        for message in messages:
            news += self._message(message)
        return news

    def fail(self, error: Exception) -> list[str]:
        """The connection ended: whatever waits fails with `error`. Returns the keys with news."""
        if self.failure is None:
            self.failure = error
        news = self._fail_commands(error)
        for turn, assembly in self._turns.items():
            assembly.fail(error)
            news.append(turn)
        return news

    def closed(self, code: int | None, reason: str) -> Exception:
        """What a close frame with `code` and `reason` (None and empty if the connection broke) means to the caller."""
        if code is not None and code >= REFUSED:
            return self._fault or SessionError(_code_of_status(code - REFUSED), reason or "the server refused")
        if code is None:
            return ConnectionFailed(self.url, "the connection was lost")
        if code == 1009:
            return SessionError("payload_too_large", reason or "the message is larger than the server takes")
        return ConnectionFailed(self.url, f"the server closed the connection ({code}{reason and ': '}{reason})")

    def _message(self, message: ServerMessage) -> list[str]:
        match message:
            case Reply():
                return self._answer(message.id, message)
            case ErrorEvent():
                error = SessionError(
                    message.code, message.message, detail=message.detail, retry_after_ms=message.retry_after_ms
                )
                if message.id is not None:
                    return self._answer(message.id, error)
                # The server could not tell which command it read, or refuses the connection.
                self._fault = error
                return self._fail_commands(error)
            case _:
                return self._event(message)

    def _answer(self, command: str, answer: Reply | Exception) -> list[str]:
        sent = self._waiting.pop(command, None)
        if sent is None:
            return []
        if command in self._abandoned:
            self._abandoned.discard(command)
            if isinstance(answer, Reply):
                self._forget_begun(sent, answer)
            return []
        self._answers[command] = (sent, answer)
        return [command]

    def _forget_begun(self, sent: Command | None, reply: Reply) -> None:
        if isinstance(sent, TurnCreate | SessionRegenerate):
            for turn in _turns_named(reply):
                self.forget(turn)

    def _event(self, event: TurnEvent) -> list[str]:
        if event.turn in self._forgotten:
            if isinstance(event, TurnEnded):
                self._forgotten.discard(event.turn)
            return []
        assembly = self.turn(event.turn)
        try:
            assembly.apply(event)
        except ProtocolError as error:
            assembly.fail(error)
        return [event.turn]

    def _fail_commands(self, error: Exception) -> list[str]:
        news = []
        for command in list(self._waiting):
            news += self._answer(command, error)
        return news


def _turns_named(reply: Reply) -> list[str]:
    return reply.turn_ids or ([reply.turn] if reply.turn is not None else [])


def _code_of_status(status: int) -> str:
    return next((code for code, rule in ERROR_RULES.items() if rule.status == status), "bad_request")
