"""The two forms of a frame, which is one object or an array of them: JSON in text frames, msgpack in binary ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import msgspec

from tokenspeed.client.protocol.commands import Command
from tokenspeed.client.protocol.events import ServerMessage
from tokenspeed.client.protocol.given import GIVEN_COMMAND

SESSIONS_PATH = "/v1/sessions/ws"

Encoding = Literal["msgpack", "json"]

_MESSAGE_TYPES = frozenset(message.__struct_config__.tag for message in get_args(ServerMessage))


class _Envelope(msgspec.Struct):
    type: str


class _Identity(msgspec.Struct):
    id: str


class Codec:
    """One subprotocol: the same structs, in one form.

    Attributes:
        subprotocol: its name in the websocket's handshake.
        binary: whether its frames are binary ones.
    """

    def __init__(
        self,
        subprotocol: str,
        binary: bool,
        encode: Callable[[Any], bytes],
        decoder: Callable[[Any], Any],
        is_array: Callable[[bytes], bool],
    ) -> None:
        """
        Args:
            decoder: makes a decoder of a type.
            is_array: whether a frame begins like an array.
        """
        self.subprotocol = subprotocol
        self.binary = binary
        self._encode = encode
        self._is_array = is_array
        self._command = decoder(GIVEN_COMMAND)
        self._messages = decoder(ServerMessage | list[ServerMessage])
        self._message = decoder(ServerMessage)
        self._raws = decoder(list[msgspec.Raw])
        self._raw = decoder(msgspec.Raw)
        self._envelope = decoder(_Envelope)
        self._identity = decoder(_Identity)

    def encode(self, message: msgspec.Struct | Sequence[msgspec.Struct]) -> str | bytes:
        """A frame, as the websocket sends it."""
        data = self._encode(message)
        return data if self.binary else data.decode()

    def messages(self, frame: str | bytes) -> list[ServerMessage]:
        """The replies and events of a server's frame; those of types that this version does not know are left out.

        Raises:
            msgspec.DecodeError: a message of a known type that does not fit it, or not this form at all.
        """
        try:
            decoded = self._messages.decode(frame)
        except msgspec.ValidationError:
            return [self._message.decode(raw) for raw in self.split(frame) if self._known(raw)]
        return decoded if isinstance(decoded, list) else [decoded]

    def command(self, part: bytes) -> Command:
        """A client's command. Raises `msgspec.DecodeError` (`ValidationError` included)."""
        command: Command = self._command.decode(part)
        return command

    def id_of(self, part: bytes) -> str | None:
        """The id of what may be a command; None if it has none that can be read."""
        try:
            identity: str = self._identity.decode(part).id
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return identity

    def split(self, frame: str | bytes) -> list[bytes]:
        """The objects of a frame, not yet decoded. Raises `msgspec.DecodeError` if it is not of this form."""
        data = frame.encode() if isinstance(frame, str) else frame
        raws = self._raws.decode(data) if self._is_array(data) else [self._raw.decode(data)]
        return [bytes(raw) for raw in raws]

    def _known(self, raw: bytes) -> bool:
        return self._envelope.decode(raw).type in _MESSAGE_TYPES


def _begins_json_array(data: bytes) -> bool:
    return data.lstrip(b" \t\r\n")[:1] == b"["


def _begins_msgpack_array(data: bytes) -> bool:
    return data[:1] != b"" and (data[0] >> 4 == 0x9 or data[0] in (0xDC, 0xDD))


JSON = Codec("tokenspeed.v1.json", False, msgspec.json.Encoder().encode, msgspec.json.Decoder, _begins_json_array)
MSGPACK = Codec(
    "tokenspeed.v1.msgpack", True, msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder, _begins_msgpack_array
)
CODECS: dict[Encoding, Codec] = {"msgpack": MSGPACK, "json": JSON}


def codec_of(encoding: str) -> Codec:
    """Raises ValueError on a name that is none."""
    for name, codec in CODECS.items():
        if name == encoding:
            return codec
    raise ValueError(f"the encoding is {encoding!r}; it must be one of {', '.join(CODECS)}")
