"""The demo as a newcomer runs it, and that its checks can fail."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tokenspeed.cli.demo import TOOLS, TURNS, Row, checks
from tokenspeed.client import FunctionCallItem, MessageItem, Reused, Timings, Turn, Usage


def test_the_demo(command_line: list[str], tmp_path: Path) -> None:
    ended = subprocess.run([*command_line, "demo"], capture_output=True, text=True, cwd=tmp_path, timeout=180)
    assert (ended.returncode, ended.stderr) == (0, "loading tokenspeed-pocket\n")
    out = ended.stdout
    assert "ok: every turn computed at most its new tokens + 1" in out
    assert "FAILED" not in out
    for number, (text, _) in enumerate(TURNS, 1):
        assert f"{number:>4}  {text}" in out
    rows = [line for line in out.splitlines() if line.startswith("│")]
    assert len(rows) >= 13
    for row in rows:
        label, prompt, reused, new, computed = (cell.strip() for cell in row.split("│")[1:6])
        assert int(prompt) == int(reused) + int(computed)
        assert int(computed) <= int(new) + 1, label


def row(
    label: str,
    prompt: int,
    computed: int,
    new: int,
    parent: str | None,
    wanted: str = "",
    said: str = "",
    called: str = "",
) -> Row:
    items = [FunctionCallItem("c", called, "{}")] if called else [MessageItem("assistant", said)]
    usage = Usage(prompt, Reused(device=prompt - computed), computed)
    turn = Turn("t", "s", parent, items, "completed", "stop", usage, Timings())
    return Row(label, wanted, turn, new)


def passed(*changed: Row) -> list[bool]:
    """The checks' results on rows that are right but for those that are given."""
    rows = {
        "1": row("1", 10, 10, 10, None),
        "fork": row("fork", 20, 6, 5, "p"),
        "9": row("9", 20, 6, 5, "p"),
        **{tool.__name__: row(tool.__name__, 20, 6, 5, "p", called=tool.__name__) for tool in TOOLS},
        **{str(number): row(str(number), 20, 6, 5, "p", "x", "x") for number in (10, 11, 12)},
    }
    rows.update({changed_row.label: changed_row for changed_row in changed})
    return [result for _, result in checks(list(rows.values()))]


def test_its_checks_fail_where_a_promise_is_broken() -> None:
    assert passed() == [True] * 5
    assert passed(row("fork", 20, 7, 5, "p")) == [False, True, True, True, True]
    assert passed(row("fork", 20, 6, 5, "other")) == [True, False, True, True, True]
    assert passed(row("add", 20, 6, 5, "p", said="no tool")) == [True, True, False, True, True]
    wrong = [row(label, 20, 6, 5, "p", "x", "y") for label in ("10", "11")]
    assert passed(wrong[0]) == [True] * 5
    assert passed(*wrong) == [True, True, True, False, True]
