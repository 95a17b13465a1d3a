"""A small engine to measure, and the script that measures a large one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tokenspeed.bench import bound
from tokenspeed.config.engine import EngineConfig
from tokenspeed.engine.core import EngineCore
from tokenspeed.models.random_weights import tiny_checkpoint

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "decode.py"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts of four layers."""
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture
def start(tiny: Path) -> Callable[..., EngineCore]:
    torch.set_num_threads(1)
    return lambda model=tiny, **options: EngineCore(
        EngineConfig(model=str(model), **({"cache_bytes": 8 << 20, "page_size": 8} | options))
    )


@pytest.fixture(autouse=True)
def short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of this machine do not matter here."""
    monkeypatch.setitem(bound.STREAM_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(bound.SIDE, "cpu", 64)


@pytest.fixture
def script() -> ModuleType:
    """benchmarks/decode.py, which expects a GPU."""
    spec = importlib.util.spec_from_file_location("decode_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
