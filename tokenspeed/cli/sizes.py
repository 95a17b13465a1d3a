"""Sizes in bytes, as people write them."""

from __future__ import annotations

import os
import re

from tokenspeed.cli.errors import CommandError

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of `512MiB`, `2GiB`, `1.5g` or a plain number; every unit is a power of 1,024.

    Raises:
        CommandError: the text is no size, or less than a byte.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size < 1:
        raise CommandError(f"{text!r} is no size; write one like 512MiB or 2GiB")
    return size


def memory_bytes() -> int:
    """Of this machine, in all."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def show_size(size_bytes: float) -> str:
    """`size_bytes` in the largest unit that leaves at least one of it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.1f} {unit}" if unit != "B" else f"{size_bytes:.0f} B"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
