"""A server that ends under load, by force or in order, and is started again on the same directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "crashes.py"


@pytest.mark.parametrize("options", [("--points", "4", "--seed", "1"), ("--points", "2", "--seed", "2", "--orderly")])
def test_what_was_acknowledged_is_there_and_goes_on(tmp_path: Path, options: tuple[str, ...]) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-P", str(SCRIPT), *options, "--output", str(figures)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(figures.read_text())
    assert found["turns_lost"] == 0
    assert found["turns_acknowledged"] > 0
    assert found["turns_compared_with_an_uninterrupted_run"] > 0
