"""Sampling of a turn: its own options, then the session's, then the checkpoint's."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from tokenspeed.client.protocol.commands import Sampling
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.config.sampling import MAX_BIASES, SamplingParams

_ID_LISTS = ("stop_token_ids", "forced_token_ids")
_ID_DIGITS = 10


def checkpoint_sampling(directory: Path) -> Sampling:
    """The defaults in a model directory's `generation_config.json`; `do_sample: false` is greedy.

    Raises:
        ValueError: the file cannot be read, or a value in it is out of range.
    """
    path = directory / "generation_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Sampling()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if config.get("do_sample") is False:
        return Sampling(temperature=0.0)
    names = ("temperature", "top_k", "top_p", "min_p")
    try:
        defaults = msgspec.convert({name: config[name] for name in names if name in config}, Sampling)
        _params(defaults).check()
    except (msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return defaults


def resolve(layers: list[Sampling | None], vocab_size: int) -> SamplingParams:
    """The parameters of the first layer that sets each, else the defaults of `SamplingParams`.

    Raises:
        SessionError: `bad_request`, naming the field, its value and what is allowed.
    """
    chosen: dict[str, Any] = {}
    for name in Sampling.__struct_fields__:
        values = [getattr(layer, name) for layer in layers if layer is not None]
        chosen[name] = next((value for value in values if value is not None), None)
    try:
        params = _params(Sampling(**chosen))
        params.check()
        for name in _ID_LISTS:
            _check_ids(name, getattr(params, name), vocab_size)
        _check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], vocab_size)
        for stop in params.stop:
            stop.encode()
    except UnicodeEncodeError as error:
        raise SessionError("bad_request", "a stop string is not valid Unicode: it has a lone surrogate") from error
    except ValueError as error:
        raise SessionError("bad_request", str(error)) from error
    return params


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{name} has {token_id}; ids are between 0 and {vocab_size - 1}")


def _params(sampling: Sampling) -> SamplingParams:
    given = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    chosen = {name: value for name, value in given.items() if value is not None}
    for name in (*_ID_LISTS, "stop"):
        if name in chosen:
            chosen[name] = tuple(chosen[name])
    if "logit_bias" in chosen:
        if len(chosen["logit_bias"]) > MAX_BIASES:
            raise ValueError(f"logit_bias has {len(chosen['logit_bias'])} entries; at most {MAX_BIASES} are allowed")
        chosen["logit_bias"] = tuple(_bias(key, value) for key, value in chosen["logit_bias"].items())
    return SamplingParams(**chosen)


def _bias(key: str, value: float) -> tuple[int, float]:
    if not (key.isascii() and key.isdecimal() and len(key) <= _ID_DIGITS):
        raise ValueError(f"logit_bias has the key {key[:40]!r}; keys are token ids in decimal")
    return int(key), value
