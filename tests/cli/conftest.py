"""Servers as people start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "tokenspeed"]


def environment() -> dict[str, str]:
    """Without a person's own settings, and gentle to a machine that others use too."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TOKENSPEED_")}
    return {**kept, "OMP_NUM_THREADS": "1", "TERM": "xterm", "NO_COLOR": "1"}


class Served:
    """A `tokenspeed serve` process that has said that it is ready."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--port", "0", "--threads", "1", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=directory,
            env={**environment(), "XDG_DATA_HOME": tempfile.mkdtemp(dir=directory)},
        )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        found = re.search(r"http://[\w.:]+:\d+", self.ready)
        assert found is not None, self.process.communicate(timeout=10)
        self.url = found[0]

    def children(self) -> list[int]:
        """Processes that the server has started."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]

    def end(self, signal: int) -> tuple[int, str]:
        """Its exit code and what it wrote to stderr."""
        self.process.send_signal(signal)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.fixture(autouse=True)
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Not a person's own sessions."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server with the pocket model and a key, for all tests that do not end it."""
    server = Served(tmp_path_factory.mktemp("served"), "--api-key", "red=right")
    yield server
    if server.process.poll() is None:
        server.process.kill()
        server.process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts a server of the test's own."""
    servers: list[Served] = []

    def start(*options: str) -> Served:
        servers.append(Served(tmp_path, *options))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How a test starts the command in a process of its own, in a clean environment."""
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    return COMMAND


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a command line that must fail, in this process; returns what it says and checks its exit code."""

    def run(*arguments: str, code: int = 1) -> str:
        from tokenspeed.cli import main

        monkeypatch.setattr(sys, "argv", ["tokenspeed", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        if isinstance(caught.value.code, str):
            assert code == 1
            return caught.value.code
        assert caught.value.code == code
        return ""

    return run
