"""Sessions for LLM agents: an inference engine and its SDK.

Importing this package imports neither torch nor the engine; each public name is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenspeed.client import AsyncClient, Client, SessionError
    from tokenspeed.config.sampling import SamplingParams
    from tokenspeed.engine.engine import Engine

__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "tokenspeed.client",
    "Client": "tokenspeed.client",
    "SessionError": "tokenspeed.client",
    "Engine": "tokenspeed.engine.engine",
    "SamplingParams": "tokenspeed.config.sampling",
}

__all__ = ["AsyncClient", "Client", "Engine", "SamplingParams", "SessionError", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tokenspeed' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tokenspeed"):
            raise
        message = f"{name} needs {error.name}: pip install 'tokenspeed-sessions[server]'"
        raise ModuleNotFoundError(message, name=error.name) from error


def __dir__() -> list[str]:
    return sorted(__all__)
