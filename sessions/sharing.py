"""Preambles that an operator shares between tenants."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.items import FunctionTool
from tokenspeed.sessions.formats.qwen import QwenFormat
from tokenspeed.sessions.formats.template import ChatTemplate
from tokenspeed.sessions.tokenizer import ChatTokenizer
from tokenspeed.sessions.transcript import Transcript


class SharedPreamble(msgspec.Struct, forbid_unknown_fields=True):
    """The file's content: what a session would be opened with."""

    instructions: str | None = None
    tools: list[FunctionTool] = []


def shared_prefix(model_directory: Path, file: Path) -> bytes:
    """The ids, little-endian int32, that every session with the file's instructions and tools begins with.

    Raises:
        ValueError: the file cannot be read, or the model's chat format cannot write it; the message says why.
    """
    try:
        content = msgspec.json.decode(file.read_bytes(), type=SharedPreamble)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{file}: {error}") from error
    tokenizer = ChatTokenizer(model_directory)
    transcript = Transcript(QwenFormat(ChatTemplate.load(model_directory), tokenizer), tokenizer)
    try:
        ids = transcript.preamble(content.instructions, content.tools).ids
    except SessionError as error:
        raise ValueError(f"{file}: {error.message}") from error
    if not ids:
        raise ValueError(f"{file}: it has neither instructions nor tools")
    if sys.byteorder != "little":
        ids = ids[:]
        ids.byteswap()
    return ids.tobytes()
