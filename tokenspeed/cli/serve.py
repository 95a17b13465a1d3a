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
from tokenspeed.sessions.journal.directory import default_directory, tokens_fingerprint
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


def _directory(config: EngineConfig, model_name: str | None, data_dir: Path | None) -> Path:
    """Where sessions are kept."""
    if data_dir is not None:
        return data_dir.expanduser().absolute()
    directory = Path(config.model)
    try:
        return default_directory(model_name or directory.name, tokens_fingerprint(directory))
    except OSError as error:
        raise CommandError(f"{directory / 'tokenizer.json'} cannot be read: {error.strerror or error}") from None


def run(
    model: str | None,
    *,
    host: str,
    port: int,
    api_keys: Sequence[str],
    origins: Sequence[str],
    cache: str | None,
    shared_preambles: Sequence[Path],
    data_dir: Path | None,
    journal: str | None,
    no_journal: bool,
    log_level: str,
    **settings: Any,
) -> None:
    """Serve until SIGINT or SIGTERM. `settings` are the engine's, by `EngineConfig`'s names.

    Args:
        data_dir: where sessions are kept; if left out, in the user's data directory, by model.
        journal: the address of a PostgreSQL database to keep them in instead.
        no_journal: keep them in memory only.

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
    if no_journal:
        kept_in: Path | str | None = None
    else:
        kept_in = journal or _directory(config, model if named else None, data_dir)
    console = Console(highlight=False, soft_wrap=True)
    with LoadingBar(model or "tokenspeed-pocket") as bar:

        def started(at: Started) -> None:
            bar.__exit__(None, None, None)
            console.print(
                f"ready: {at.info.model} ({at.info.device}, {at.info.dtype}) at {at.url} "
                f"(engine {at.engine_s:.1f} s, chat format {at.format_s:.1f} s)"
                + (f"; {at.sessions} session{'' if at.sessions == 1 else 's'} in {at.kept_in}" if at.kept_in else ""),
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
                kept_in=kept_in,
                origins=origins,
                progress=bar,
                signals=True,
            )
        )
