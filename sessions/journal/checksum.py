"""Checksums of rows, and of all rows of an owner, so that damage is seen and not read."""

from __future__ import annotations

import hashlib

CHECKSUM_BYTES = 16
_MODULUS = 2 ** (8 * CHECKSUM_BYTES)


def checksum(owner: str, kind: str, row_id: str, payload: bytes) -> bytes:
    """Of a row: 16 bytes."""
    digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
    for part in (owner.encode(), kind.encode(), row_id.encode(), payload):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


class Tally:
    """How many rows there are, and the sum of their checksums: it shows rows that are missing, doubled or stale,
    each of which would be sound by itself."""

    def __init__(self, count: int = 0, total: bytes = bytes(CHECKSUM_BYTES)) -> None:
        self.count = count
        self._total = int.from_bytes(total, "little")

    @property
    def total(self) -> bytes:
        return self._total.to_bytes(CHECKSUM_BYTES, "little")

    def copy(self) -> Tally:
        return Tally(self.count, self.total)

    def add(self, row: bytes) -> None:
        self.count += 1
        self._total = (self._total + int.from_bytes(row, "little")) % _MODULUS

    def take(self, row: bytes) -> None:
        self.count -= 1
        self._total = (self._total - int.from_bytes(row, "little")) % _MODULUS
