"""What is checked of a client's bytes before anything is decoded or allocated: size, depth, the width of numbers."""

from __future__ import annotations

import re
import struct
from math import isfinite

from tokenspeed.client.protocol.errors import SessionError

MAX_DEPTH = 64
MAX_COMMANDS = 1024
"""Of one frame: each is answered, if only by an error."""
MAX_VALUES = 2**20
"""Of one msgpack message, which is checked value by value."""

_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1  # what msgpack can say, so that every subprotocol can repeat it

# A string, to its closing quote or to the end: every quote begins a match, so the scan is linear on any input.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_ALL_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_CURLY_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_LONG_INTEGER = re.compile(rb"(?<![\d.eE+-])-?\d{19,}+(?![.eE])")


def check_commands(count: int) -> None:
    """Raises: SessionError `bad_request`."""
    if count > MAX_COMMANDS:
        raise SessionError("bad_request", f"the frame has {count} commands; at most {MAX_COMMANDS} are taken")


def check_size(data: bytes, max_bytes: int) -> None:
    """Raises: SessionError `payload_too_large`."""
    if len(data) > max_bytes:
        raise SessionError(
            "payload_too_large",
            f"the message has {len(data)} bytes; at most {max_bytes} are taken",
            detail={"bytes": len(data), "max_bytes": max_bytes},
        )


def check_json(data: bytes) -> None:
    """Refuse JSON text that is nested too deep or has an integer of more than 64 bits; the time is linear in its size.

    Raises:
        SessionError: `bad_request`.
    """
    bare = _STRING.sub(b'""', data)
    if exceeds_depth(bare, MAX_DEPTH):
        raise _too_deep()
    for found in _LONG_INTEGER.finditer(bare):
        digits = found[0]
        if len(digits) > 20 or not _INT_MIN <= int(digits) <= _INT_MAX:
            raise SessionError("bad_request", f"an integer has {len(digits.lstrip(b'-'))} digits; at most 64 bits fit")


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


def check_msgpack(data: bytes) -> None:
    """Refuse msgpack that is nested too deep, that announces more than it holds, or that says what JSON cannot: binary
    data, extensions, keys that are no strings, numbers that are not finite.

    Raises:
        SessionError: `bad_request`.
    """
    size, at, values = len(data), 0, 0
    # Values still to come in the innermost container, and of the containers around it. In a map an even number of
    # them means that a key comes next.
    left, is_map = 1, False
    around: list[tuple[int, bool]] = []
    promised = 1  # the sum over all of them; each takes a byte at least
    while True:
        while left == 0:
            if not around:
                return
            left, is_map = around.pop()
        if promised > size - at:
            raise SessionError("bad_request", "the message is not msgpack: it ends before the values that it announces")
        values += 1
        if values > MAX_VALUES:
            raise SessionError("bad_request", f"the message has more than {MAX_VALUES} values")
        first = data[at]
        is_key = is_map and left % 2 == 0
        left, promised = left - 1, promised - 1
        kind, header, amount = _KINDS[first]
        if kind == "text" or kind == "list" or kind == "map":
            body = at + 1 + header
            length = int.from_bytes(data[at + 1 : body], "big") if header else amount
            if kind == "text":
                at = body + length
                continue
            if is_key:
                raise _bad_key()
            at, inner = body, 2 * length if kind == "map" else length
            around.append((left, is_map))
            if len(around) > MAX_DEPTH:
                raise _too_deep()
            left, is_map, promised = inner, kind == "map", promised + inner
            continue
        if kind == "other":
            raise SessionError(
                "bad_request", f"the message has a value of the msgpack type {first:#04x}, not of JSON's"
            )
        if is_key:
            raise _bad_key()
        if kind == "float":
            number = data[at + 1 : at + 1 + amount]
            if len(number) == amount and not isfinite(struct.unpack(">f" if amount == 4 else ">d", number)[0]):
                raise SessionError("bad_request", "the message has a number that is not finite")
        at += 1 + amount


def _kind(first: int) -> tuple[str, int, int]:
    """Of a value's first byte: what it begins, the bytes that hold its length, and its length where there are none."""
    if first <= 0x7F or first >= 0xE0 or first in (0xC0, 0xC2, 0xC3):
        return "flat", 0, 0
    if first <= 0x8F:
        return "map", 0, first & 0xF
    if first <= 0x9F:
        return "list", 0, first & 0xF
    if first <= 0xBF:
        return "text", 0, first & 0x1F
    if first in (0xCA, 0xCB):
        return "float", 0, 4 if first == 0xCA else 8
    if 0xCC <= first <= 0xD3:
        return "flat", 0, 1 << (first & 3)
    if 0xD9 <= first <= 0xDB:
        return "text", 1 << (first - 0xD9), 0
    if 0xDC <= first <= 0xDF:
        return ("list" if first <= 0xDD else "map"), 2 if first % 2 == 0 else 4, 0
    return "other", 0, 0


_KINDS = [_kind(first) for first in range(256)]


def _too_deep() -> SessionError:
    return SessionError(
        "bad_request", f"the message is nested more than {MAX_DEPTH} deep", detail={"max_depth": MAX_DEPTH}
    )


def _bad_key() -> SessionError:
    return SessionError("bad_request", "the message has a key that is no string")
