"""What a client sends, from bytes to commands: bounded before it is decoded, and never fatal."""

from __future__ import annotations

import msgspec

from tokenspeed.client.protocol.codec import MSGPACK, Codec
from tokenspeed.client.protocol.commands import Command
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.events import ErrorEvent
from tokenspeed.server.bounds import check_commands, check_json, check_msgpack, check_size


def read_frame(codec: Codec, frame: str | bytes, max_bytes: int) -> list[Command | ErrorEvent]:
    """The commands of a frame in order; in the place of one that cannot be taken, the error that answers it."""
    if isinstance(frame, bytes) != codec.binary:
        kind = "binary" if codec.binary else "text"
        return [error_event(SessionError("bad_request", f"the subprotocol {codec.subprotocol} takes {kind} frames"))]
    data = frame.encode() if isinstance(frame, str) else frame
    try:
        check_size(data, max_bytes)
        if codec is MSGPACK:
            check_msgpack(data)
        else:
            check_json(data)
        parts = codec.split(data)
        check_commands(len(parts))
    except SessionError as error:
        return [error_event(error)]
    except msgspec.DecodeError as error:
        return [error_event(SessionError("bad_request", f"the frame cannot be read: {error}"))]
    return [_read(codec, part) for part in parts]


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


def _read(codec: Codec, part: bytes) -> Command | ErrorEvent:
    try:
        return codec.command(part)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return error_event(SessionError("bad_request", f"the command cannot be read: {error}"), codec.id_of(part))
