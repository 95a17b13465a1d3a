from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.client.protocol.commands import Sampling
from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.config.sampling import SamplingParams
from tokenspeed.sessions.sampling import checkpoint_sampling, resolve


def write(directory: Path, config: Any) -> Path:
    (directory / "generation_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1]}, Sampling(0.6, 20, 0.95)),
        ({"do_sample": False, "temperature": 0.6}, Sampling(temperature=0.0)),
        ({"do_sample": True}, Sampling()),
        ({}, Sampling()),
    ],
)
def test_the_checkpoints_defaults(tmp_path: Path, config: dict[str, Any], expected: Sampling) -> None:
    assert checkpoint_sampling(write(tmp_path, config)) == expected


def test_a_checkpoint_without_defaults(tmp_path: Path) -> None:
    assert checkpoint_sampling(tmp_path) == Sampling()


@pytest.mark.parametrize("config", ["{", {"temperature": "hot"}, {"top_p": 1.5}])
def test_unusable_defaults_say_why(tmp_path: Path, config: Any) -> None:
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        checkpoint_sampling(write(tmp_path, config))


def test_the_first_layer_that_sets_a_field_wins() -> None:
    turn, session, checkpoint = Sampling(temperature=0.0, max_tokens=3), Sampling(0.5, seed=7), Sampling(0.6, 20, 0.9)
    assert resolve([turn, None, session, checkpoint], 100) == SamplingParams(
        temperature=0.0, top_k=20, top_p=0.9, seed=7, max_tokens=3
    )
    assert resolve([None], 100) == SamplingParams()
    assert resolve(
        [Sampling(stop_token_ids=[], ignore_eos=False), Sampling(stop_token_ids=[3], ignore_eos=True)], 9
    ) == (SamplingParams())


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(temperature=-1), "temperature is -1; it must be between 0"),
        (Sampling(temperature=math.nan), "temperature is nan"),
        (Sampling(top_p=0), "top_p is 0"),
        (Sampling(max_tokens=0), "max_tokens is 0; it must be between 1"),
        (Sampling(seed=-1), "seed is -1"),
        (Sampling(stop_token_ids=[100]), "stop_token_ids has 100; ids are between 0 and 99"),
        (Sampling(stop_token_ids=[-1]), "stop_token_ids has -1"),
        (Sampling(stop_token_ids=[0] * 65), "at most 64"),
    ],
)
def test_bad_values_are_named(sampling: Sampling, message: str) -> None:
    with pytest.raises(SessionError, match=message) as caught:
        resolve([sampling], 100)
    assert caught.value.code == "bad_request"
