"""Frames between the engine's process and its client: msgpack arrays of tagged structs, over one ZeroMQ pair."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenspeed.config.engine import EngineConfig
from tokenspeed.engine.messages import EngineCommand, EngineEvent, EngineInfo, EngineStats


class Start(msgspec.Struct, tag="start"):
    """The first message to the worker."""

    config: EngineConfig


class AskStats(msgspec.Struct, tag="ask_stats"):
    """Answered by one `EngineStats`, in order."""


class AskResidency(msgspec.Struct, tag="ask_residency"):
    """Answered by one `Residency`, in order."""

    turns: list[str]


class Residency(msgspec.Struct, tag="residency"):
    """The length whose state is kept, by lineage asked for."""

    lengths: list[int]


class Shutdown(msgspec.Struct, tag="shutdown"):
    """End the process."""


class Loading(msgspec.Struct, tag="loading"):
    """`done` of `total` steps of a phase of the start are done."""

    phase: str
    done: int
    total: int


class Ready(msgspec.Struct, tag="ready"):
    info: EngineInfo


class Fatal(msgspec.Struct, tag="fatal"):
    """The engine ends. `code` is of the error that ended it."""

    code: str
    message: str


ToWorker = Start | EngineCommand | AskStats | AskResidency | Shutdown
FromWorker = Loading | Ready | Fatal | EngineStats | Residency | EngineEvent

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(list[ToWorker])
_from_worker = msgspec.msgpack.Decoder(list[FromWorker])


def encode(messages: Sequence[ToWorker] | Sequence[FromWorker]) -> bytes:
    return _encoder.encode(messages)


def decode_to_worker(frame: bytes) -> list[ToWorker]:
    return _to_worker.decode(frame)


def decode_from_worker(frame: bytes) -> list[FromWorker]:
    return _from_worker.decode(frame)
