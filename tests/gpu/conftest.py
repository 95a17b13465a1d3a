"""Tests of a whole engine on a GPU. Without one they are skipped; `--device cpu` runs them on the CPU, where most of
them mean something too:

    pytest tests/gpu -n 4 --dist loadgroup
    pytest tests/gpu --device cpu
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tokenspeed.kernels.registry import compilations
from tokenspeed.models.random_weights import tiny_checkpoint

DENSE = "qwen3_5_text"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cuda", help="torch's name of the device for tests/gpu")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    # Not an option where tests/gpu is collected along with other tests.
    device = torch.device(pytestconfig.getoption("device", "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return device


@pytest.fixture(autouse=True)
def needs_the_device(device: torch.device) -> None:
    torch.set_num_threads(1)


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """For what only a GPU has."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device


def neighbour(path: str) -> ModuleType:
    """A module of the tests beside this folder."""
    name = "gpu_tests_use_" + Path(path).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent.parent / path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def reuse() -> ModuleType:
    """`tests/engine/test_reuse_machine.py`."""
    return neighbour("engine/test_reuse_machine.py")


@pytest.fixture(scope="session")
def sampling_options() -> ModuleType:
    """`tests/engine/test_sampling_options.py`."""
    return neighbour("engine/test_sampling_options.py")


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense hybrid of four layers: no router, which could choose otherwise for a rounding."""
    return tiny_checkpoint(tmp_path_factory.mktemp("dense"), seed=3, model_type=DENSE)


@pytest.fixture(scope="session")
def make_lab(device: torch.device) -> Callable[..., Any]:
    """The `Lab` of `tests/engine`, on the device, with a step in flight."""
    lab = neighbour("engine/conftest.py").Lab

    def make(model: Path, **options: Any) -> Any:
        settings = {"device": str(device), "dtype": "float32", "depth": 1, "page_size": 16, "prefill_chunk": 64}
        return lab(model, **(settings | options))

    return make


SHARED = {"max_sequences": 9, "pages": 1200, "rows": 600, "max_context": 512, "forced_tokens": True}
"""Nine sequences: buckets of 1, 2, 4, 8 and 9."""


@pytest.fixture(scope="session")
def engine(make_lab: Callable[..., Any], dense: Path) -> Any:
    return make_lab(dense, **SHARED)


@pytest.fixture(scope="session")
def mixture(make_lab: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tiny_checkpoint(tmp_path_factory.mktemp("mixture"), seed=3, model_type="qwen3_5_moe_text")
    return make_lab(directory, dtype="bfloat16", **SHARED)


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine for many tests, at rest and empty: `engine`, or the one that the parameter names. Nothing may be
    compiled or recorded for what they do."""
    engine = request.getfixturevalue(getattr(request, "param", "engine"))
    core = engine.core
    core.scheduler.cache.evict_all()
    compiled, graphs = compilations(), core.executor._graphs
    recorded = dict(graphs._recorded) if graphs is not None else {}
    yield engine
    assert compilations() == compiled, "a kernel was compiled late"
    assert core.executor._graphs is graphs
    assert graphs is None or graphs._recorded == recorded
    core.guide = core.on_tick = None
