"""Where the server is and how a client introduces itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from tokenspeed.client.protocol.codec import MSGPACK, SESSIONS_PATH, Codec, codec_of

DEFAULT_BASE_URL = "http://localhost:8000"


@dataclass(frozen=True, slots=True)
class Address:
    """A server's base URL and the key to it.

    Attributes:
        base_url: `http://…` or `https://…`, without a slash at its end.
        api_key: sent as a bearer token; None sends none.
        codec: the form of the websocket's frames.
    """

    base_url: str
    api_key: str | None
    codec: Codec = MSGPACK

    @classmethod
    def of(cls, base_url: str | None, api_key: str | None, encoding: str = "msgpack") -> Address:
        """What was given, else TOKENSPEED_BASE_URL and TOKENSPEED_API_KEY, else a server on this machine.

        Raises:
            ValueError: the URL is not one of http, https, ws or wss with a host; or there is no such encoding.
        """
        url = base_url or os.environ.get("TOKENSPEED_BASE_URL") or DEFAULT_BASE_URL
        parts = urlsplit(url)
        scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
        if scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url is {url!r}; it must look like {DEFAULT_BASE_URL}")
        base = urlunsplit((scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
        return cls(base, api_key or os.environ.get("TOKENSPEED_API_KEY") or None, codec_of(encoding))

    @property
    def websocket_url(self) -> str:
        return "ws" + self.base_url.removeprefix("http") + SESSIONS_PATH

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def proxy(self) -> Literal[True] | None:
        """What websockets takes for `proxy`: the environment's, but none to this machine."""
        host = urlsplit(self.base_url).hostname or ""
        try:
            local = host == "localhost" or ip_address(host).is_loopback
        except ValueError:
            local = False
        return None if local else True
