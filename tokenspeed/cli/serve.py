"""`tokenspeed serve`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from tokenspeed.cli.errors import CommandError
from tokenspeed.cli.loading import LoadingBar
from tokenspeed.cli.running import Started, engine_config, listen, serve
from tokenspeed.cli.sizes import memory_bytes, parse_size, show_size
from tokenspeed.config.engine import EngineConfig
from tokenspeed.config.model import ModelConfig
from tokenspeed.server.access import ApiKeys
from tokenspeed.sessions.sharing import shared_prefix


def shared(config: EngineConfig, preambles: Sequence[Path]) -> EngineConfig:
    """The settings with preambles that all tenants may reuse. Raises CommandError for a file that is no preamble."""
    try:
        prefixes = tuple(shared_prefix(Path(config.model), file) for file in preambles)
    except ValueError as error:
        raise CommandError(str(error)) from None
    return msgspec.structs.replace(config, shared_prefixes=prefixes)


def _cache_bytes(cache: str, device: str) -> int:
    size, memory = parse_size(cache), memory_bytes()
    if size > memory and (device == "cpu" or (device == "auto" and not _has_gpu())):
        raise CommandError(f"--cache {cache} is more than the {show_size(memory)} of memory that this machine has")
    return size


def _has_gpu() -> bool:
    import torch  # slow, and of no use to this process otherwise

    return torch.cuda.is_available()


def _lowered_context(config: EngineConfig, max_context: int) -> str | None:
    """What to say if the cache does not hold the context that was asked for, or that the model has."""
    wanted = config.max_context or ModelConfig.read(Path(config.model)).max_positions
    if max_context >= wanted:
        return None
    return f"the context is {max_context} tokens, which is what the cache holds; for {wanted} give a larger --cache"


def run(
    model: str | None,
    *,
    host: str,
    port: int,
    api_keys: Sequence[str],
    origins: Sequence[str],
    cache: str | None,
    shared_preambles: Sequence[Path],
    log_level: str,
    **settings: Any,
) -> None:
    """Serve until SIGINT or SIGTERM. `settings` are the engine's, by `EngineConfig`'s names.

    Raises:
        CommandError: what the user can mend.
    """
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        keys = ApiKeys.parse(api_keys)
    except ValueError as error:
        raise CommandError(str(error)) from None
    cache_bytes = _cache_bytes(cache, settings["device"]) if cache is not None else None
    listener = listen(host, port, keys)
    config = shared(engine_config(model, cache_bytes=cache_bytes, **settings), shared_preambles)
    named = model is not None and not Path(model).expanduser().is_dir()
    console = Console(highlight=False, soft_wrap=True)
    with LoadingBar(model or "tokenspeed-pocket") as bar:

        def started(at: Started) -> None:
            bar.__exit__(None, None, None)
            console.print(
                f"ready: {at.info.model} ({at.info.device}, {at.info.dtype}) at {at.url} "
                f"(engine {at.engine_s:.1f} s, chat format {at.format_s:.1f} s)",
                markup=False,
            )
            lowered = _lowered_context(config, at.info.max_context)
            if lowered is not None:
                console.print(lowered, markup=False)

        asyncio.run(
            serve(
                config,
                listener,
                keys,
                started,
                model_name=model if named else None,
                origins=origins,
                progress=bar,
                signals=True,
            )
        )
