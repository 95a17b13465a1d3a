"""The demo as a newcomer runs it, and that its checks can fail."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tokenspeed.cli.demo import TURNS, Row, checks
from tokenspeed.client import FunctionCallItem, Reused, Timings, Turn, Usage


def test_the_demo(command_line: list[str], tmp_path: Path) -> None:
    ended = subprocess.run([*command_line, "demo"], capture_output=True, text=True, cwd=tmp_path, timeout=180)
    assert (ended.returncode, ended.stderr) == (0, "loading tokenspeed-pocket\n")
    out = ended.stdout
    assert "ok: every turn computed at most its new tokens + 1" in out
    assert "FAILED" not in out
    for number, text in enumerate(TURNS, 1):
        assert f"{number:>4}  {text}" in out
    rows = [line for line in out.splitlines() if line.startswith("│")]
    assert len(rows) >= 13
    for row in rows:
        label, prompt, reused, new, computed = (cell.strip() for cell in row.split("│")[1:6])
        assert int(prompt) == int(reused) + int(computed)
        assert int(computed) <= int(new) + 1, label


def row(label: str, prompt: int, computed: int, new: int, parent: str | None, called: str | None = "add") -> Row:
    items = [FunctionCallItem("c", called, "{}")] if called else []
    usage = Usage(prompt, Reused(device=prompt - computed), computed)
    turn = Turn("t", "s", parent, items, "completed", "stop", usage, Timings())
    return Row(label, "said", "answered", turn, new)


def passed(*rows: Row) -> list[bool]:
    return [result for _, result in checks(rows)]


def test_its_checks_fail_where_a_promise_is_broken() -> None:
    first, fork, ninth = row("1", 10, 10, 10, None), row("fork", 20, 6, 5, "p"), row("9", 20, 6, 5, "p")
    assert passed(first, fork, ninth) == [True, True, True, True]
    assert passed(first, row("fork", 20, 7, 5, "p"), ninth)[0] is False
    assert passed(first, row("fork", 20, 6, 5, "other"), ninth)[1] is False
    quiet = [row(label, 20, 6, 5, "p", called=None) for label in ("1", "fork", "9")]
    assert passed(*quiet)[2] is False
