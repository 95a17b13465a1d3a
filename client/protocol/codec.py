"""The JSON subprotocol: a frame is one object or an array of objects, in text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenspeed.client.protocol.commands import Command
from tokenspeed.client.protocol.events import ServerMessage

SUBPROTOCOL_JSON = "tokenspeed.v1.json"
SESSIONS_PATH = "/v1/sessions/ws"


class _Envelope(msgspec.Struct):
    type: str


_encoder = msgspec.json.Encoder()
_commands: msgspec.json.Decoder[Command | list[Command]] = msgspec.json.Decoder(Command | list[Command])
_messages: msgspec.json.Decoder[ServerMessage | list[ServerMessage]] = msgspec.json.Decoder(
    ServerMessage | list[ServerMessage]
)
_message: msgspec.json.Decoder[ServerMessage] = msgspec.json.Decoder(ServerMessage)
_raws = msgspec.json.Decoder(list[msgspec.Raw])
_raw = msgspec.json.Decoder(msgspec.Raw)
_envelope = msgspec.json.Decoder(_Envelope)
_MESSAGE_TYPES = frozenset(["reply", "error", "turn.started", "turn.progress", "turn.delta", "turn.item", "turn.ended"])


def encode(message: msgspec.Struct | Sequence[msgspec.Struct]) -> str:
    return _encoder.encode(message).decode()


def decode_commands(frame: str | bytes) -> list[Command]:
    """The commands of a client's frame. Raises `msgspec.DecodeError` (`ValidationError` included)."""
    decoded = _commands.decode(frame)
    return decoded if isinstance(decoded, list) else [decoded]


def decode_messages(frame: str | bytes) -> list[ServerMessage]:
    """The replies and events of a server's frame; those of types that this version does not know are left out.

    Raises:
        msgspec.DecodeError: a message of a known type that does not fit it, or no JSON at all.
    """
    try:
        decoded = _messages.decode(frame)
    except msgspec.ValidationError:
        return [_message.decode(raw) for raw in split(frame) if _envelope.decode(raw).type in _MESSAGE_TYPES]
    return decoded if isinstance(decoded, list) else [decoded]


def split(frame: str | bytes) -> list[msgspec.Raw]:
    """The objects of a frame, not yet decoded. Raises `msgspec.DecodeError` if it is no JSON."""
    data = frame.encode() if isinstance(frame, str) else frame
    if data.lstrip()[:1] == b"[":
        return _raws.decode(data)
    return [_raw.decode(data)]
