"""What a client sends, from bytes to commands: bounded before it is decoded, and never fatal."""

from __future__ import annotations

import re

import msgspec

from tokenspeed.client.protocol.codec import split
from tokenspeed.client.protocol.commands import Command
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import ErrorEvent

MAX_DEPTH = 64

# A string, to its closing quote or to the end: every quote begins a match, so the scan is linear on any input.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_ALL_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_CURLY_TO_SQUARE = bytes.maketrans(b"{}", b"[]")

_command: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


class _Identity(msgspec.Struct):
    id: str


_identity = msgspec.json.Decoder(_Identity)


def read_frame(frame: str | bytes, max_bytes: int) -> list[Command | ErrorEvent]:
    """The commands of a text frame in order; in the place of one that cannot be taken, the error that answers it."""
    if isinstance(frame, bytes):
        return [error_event(SessionError("bad_request", "this subprotocol takes text frames"))]
    data = frame.encode()
    try:
        check_bytes(data, max_bytes)
        parts = split(data)
    except SessionError as error:
        return [error_event(error)]
    except msgspec.DecodeError as error:
        return [error_event(SessionError("bad_request", f"the frame is not JSON: {error}"))]
    return [_read(bytes(part)) for part in parts]


def check_bytes(data: bytes, max_bytes: int) -> None:
    """Refuse JSON that is too large or nested too deep, without decoding it; the time is linear in its size.

    Raises:
        SessionError: `payload_too_large`, or `bad_request` for the depth.
    """
    if len(data) > max_bytes:
        raise SessionError(
            "payload_too_large",
            f"the message has {len(data)} bytes; at most {max_bytes} are taken",
            detail={"bytes": len(data), "max_bytes": max_bytes},
        )
    if exceeds_depth(data, MAX_DEPTH):
        raise SessionError(
            "bad_request", f"the message is nested more than {MAX_DEPTH} deep", detail={"max_depth": MAX_DEPTH}
        )


def exceeds_depth(data: bytes, limit: int) -> bool:
    """Whether JSON text is nested deeper than `limit`. Text with brackets that match nothing counts each of them."""
    brackets = _STRING.sub(b"", data).translate(_CURLY_TO_SQUARE, _ALL_BUT_BRACKETS)
    # Each round takes the innermost pairs away, so balanced brackets are gone after as many rounds as they are deep.
    for _ in range(limit):
        inner = brackets.replace(b"[]", b"")
        if len(inner) == len(brackets):
            break
        brackets = inner
    return len(brackets) > limit or b"[]" in brackets


def error_event(error: SessionError, command: str | None = None) -> ErrorEvent:
    """`error` as the answer to a command, or as a fault of the connection."""
    return ErrorEvent(
        error.code,
        error.message,
        error.retry,
        id=command,
        retry_after_ms=error.retry_after_ms,
        detail=error.detail,
    )


def _read(part: bytes) -> Command | ErrorEvent:
    try:
        return _command.decode(part)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return error_event(SessionError("bad_request", f"the command cannot be read: {error}"), _id_of(part))


def _id_of(part: bytes) -> str | None:
    try:
        return _identity.decode(part).id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
