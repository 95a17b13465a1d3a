"""What is in the distribution, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_of_the_tree_is_distributed() -> None:
    homes = PROJECT["tool"]["setuptools"]["package-dir"]
    found = set()
    for package, folder in homes.items():
        for marker in (ROOT / folder).rglob("__init__.py"):
            below = marker.parent.relative_to(ROOT / folder).parts
            found.add(".".join((package, *below)))
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_folder_with_modules_is_a_package() -> None:
    folders = PROJECT["tool"]["setuptools"]["package-dir"].values()
    for folder in folders:
        for module in (ROOT / folder).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), module


@pytest.mark.parametrize("statement", ["import tokenspeed", "from tokenspeed import AsyncClient, Client, SessionError"])
def test_importing_the_client_loads_neither_torch_nor_the_engine(statement: str) -> None:
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd="/")
    loaded = set(shown.stdout.split())
    # httpx itself imports rich where it is installed.
    heavy = {"torch", "numpy", "zmq", "litestar", "jinja2", "tokenizers", "safetensors", "typer"}
    rooms = ["cache", "config", "engine", "execution", "kernels", "models", "scheduler", "server", "sessions", "cli"]
    assert "tokenspeed" in loaded
    assert not loaded & heavy
    assert not loaded & {f"tokenspeed.{room}" for room in rooms}


def test_the_client_needs_three_libraries() -> None:
    names = {requirement.split(">")[0] for requirement in PROJECT["project"]["dependencies"]}
    assert names == {"httpx", "websockets", "msgspec"}


def test_unknown_names_are_attribute_errors() -> None:
    import tokenspeed

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tokenspeed.nothing  # noqa: B018


def test_the_shipped_model_is_small() -> None:
    pocket = ROOT / "tokenspeed" / "pocket"
    assert sum(file.stat().st_size for file in pocket.iterdir() if file.is_file()) <= 16 * 2**20
