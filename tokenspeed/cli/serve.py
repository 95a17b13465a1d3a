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
from tokenspeed.cli.sizes import parse_size
from tokenspeed.config.engine import EngineConfig
from tokenspeed.server.access import ApiKeys
from tokenspeed.sessions.sharing import shared_prefix


def shared(config: EngineConfig, preambles: Sequence[Path]) -> EngineConfig:
    """The settings with preambles that all tenants may reuse. Raises CommandError for a file that is no preamble."""
    try:
        prefixes = tuple(shared_prefix(Path(config.model), file) for file in preambles)
    except ValueError as error:
        raise CommandError(str(error)) from None
    return msgspec.structs.replace(config, shared_prefixes=prefixes)


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
    cache_bytes = parse_size(cache) if cache is not None else None
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
