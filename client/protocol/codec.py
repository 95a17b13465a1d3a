"""The JSON subprotocol: a frame is one object or an array of objects, in text."""

from __future__ import annotations

import msgspec

from tokenspeed.client.protocol.commands import Command
from tokenspeed.client.protocol.events import ServerMessage

SUBPROTOCOL_JSON = "tokenspeed.v1.json"
SESSIONS_PATH = "/v1/sessions/ws"

_encoder = msgspec.json.Encoder()
_commands = msgspec.json.Decoder(Command | list[Command])  # type: ignore[operator]
_messages = msgspec.json.Decoder(ServerMessage | list[ServerMessage])  # type: ignore[operator]


def encode(message: msgspec.Struct | list[msgspec.Struct]) -> str:
    return _encoder.encode(message).decode()


def decode_commands(frame: str | bytes) -> list[Command]:
    """The commands of a client's frame. Raises `msgspec.DecodeError` (`ValidationError` included)."""
    decoded = _commands.decode(frame)
    return decoded if isinstance(decoded, list) else [decoded]


def decode_messages(frame: str | bytes) -> list[ServerMessage]:
    """The replies and events of a server's frame."""
    decoded = _messages.decode(frame)
    return decoded if isinstance(decoded, list) else [decoded]
