"""Who may talk to the server: API keys, browsers' origins, and where a server without keys may listen."""

from __future__ import annotations

import hashlib
import hmac
import socket
from collections.abc import Collection, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from tokenspeed.client.protocol.errors import SessionError

LOCAL_TENANT = "local"
"""Whose sessions they are where the server has no keys."""


class ApiKeys:
    """Which tenant a key belongs to. Keys are compared in constant time and never kept in clear.

    Args:
        keys: tenant by key; empty for a server that only this machine reaches.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._tenants = [(_digest(key), tenant) for key, tenant in keys.items()]

    @classmethod
    def parse(cls, pairs: Collection[str]) -> ApiKeys:
        """From `TENANT=KEY` texts; several keys may belong to one tenant.

        Raises:
            ValueError: a text of another form, or one key for two tenants.
        """
        keys: dict[str, str] = {}
        for pair in pairs:
            tenant, _, key = pair.partition("=")
            if not tenant or not key:
                raise ValueError("an API key is given as TENANT=KEY")
            if keys.setdefault(key, tenant) != tenant:
                raise ValueError(f"the tenants {keys[key]} and {tenant} have the same API key")
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._tenants)

    @property
    def tenants(self) -> list[str]:
        return sorted({tenant for _, tenant in self._tenants}) or [LOCAL_TENANT]

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an `Authorization` header.

        Raises:
            SessionError: `unauthorized`.
        """
        if not self._tenants:
            return LOCAL_TENANT
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise SessionError("unauthorized", "an API key is needed: Authorization: Bearer KEY")
        given = _digest(token.strip())
        found = None
        for digest, tenant in self._tenants:
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None:
            raise SessionError("unauthorized", "the API key is not known")
        return found


def check_origin(origin: str | None, host: str | None, allowed: Collection[str], local_only: bool) -> None:
    """Let in programs (which send no origin), pages that this server's own address served, and `allowed` origins.

    `local_only`: a server without keys is reached by names of this machine only; otherwise a page could point a name
    of its own at it and pass for the same origin.

    Raises:
        SessionError: `unauthorized`, naming the origin or the host.
    """
    if local_only and host is not None and not _is_loopback_name(urlsplit(f"//{host}").hostname or ""):
        raise SessionError("unauthorized", f"the host {host} is not a name of this machine")
    if origin is None or origin in allowed:
        return
    if host is None or urlsplit(origin).netloc.lower() != host.lower():
        raise SessionError("unauthorized", f"the origin {origin} is not allowed")


def is_loopback(host: str) -> bool:
    """Whether every address of `host` is one that only this machine reaches. Raises OSError on an unknown name."""
    addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return all(ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def _is_loopback_name(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
