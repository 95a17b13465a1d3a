"""For every test: one thread of arithmetic a process, in the engines that tests start too, as many run side by side.
And the tables of `docs/message-shapes.md`, which tests compare with what happens."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

PAGE = Path(__file__).parent.parent / "docs" / "message-shapes.md"


@dataclass(frozen=True)
class Outcome:
    """`error` is the HTTP status and the code of a refusal; `merged`: the results come first, in the calls' order."""

    error: tuple[int, str] | None
    merged: bool


@dataclass(frozen=True)
class Content:
    """A row about contents. `words`: the text that is rendered, or what the refusal says."""

    after: str
    input: str
    outcome: Outcome
    words: str


class Shapes:
    """The tables.

    Attributes:
        letters: of the items.
        before: of each place where a session stands, what is written before the input.
    """

    def __init__(self, page: str) -> None:
        self._written = {name: text for name, _, text in _rows(page, "Items") for name in _codes(name)}
        self._written = {name: _plain(text) for name, text in self._written.items()}
        self.letters = "".join(name for name in self._written if len(name) == 1)
        self.before = {_plain(after): _plain(before) for after, _, before in _rows(page, "Where the session stands")}
        self.prompt = self._written["prompt"]
        self._rules = [
            (_codes(after), re.compile(_plain(pattern)), _outcome(outcome))
            for after, _, pattern, outcome in _rows(page, "Sequences")
        ]
        self.contents = [
            Content(_plain(after), _plain(given), _outcome(outcome), _plain(words))
            for after, given, outcome, words in _rows(page, "Contents")
        ]

    def outcome(self, after: str, sequence: str) -> Outcome:
        """What becomes of items with these letters: the first rule that fits."""
        return next(
            outcome
            for places, pattern, outcome in self._rules
            if (after in places or not places) and pattern.fullmatch(sequence)
        )

    def written(self, after: str, sequence: str, texts: list[str]) -> str:
        """The whole input, if it is not refused."""
        items = list(zip(sequence, texts, strict=True))
        if self.outcome(after, sequence).merged:
            items.sort(key=lambda item: item[0] if item[0] in "12" else "3")
        written = self.before[after] if items else ""
        for is_result, run in itertools.groupby(items, lambda item: item[0] in "12"):
            text = "".join(self._written[letter].replace("TEXT", text) for letter, text in run)
            written += self._written["results"].replace("RESULTS", text) if is_result else text
        return written


def _rows(page: str, title: str) -> list[list[str]]:
    section = page.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def _codes(cell: str) -> list[str]:
    return re.findall("`([^`]*)`", cell)


def _plain(cell: str) -> str:
    """What a cell says in code."""
    return "".join(_codes(cell)).replace("\\|", "|").replace("↵", "\n")


def _outcome(cell: str) -> Outcome:
    if cell[:1].isdigit():
        return Outcome((int(cell[:3]), _plain(cell)), False)
    assert cell.startswith(("rendered", "merged")), cell
    return Outcome(None, cell.startswith("merged"))


@cache
def read_shapes() -> Shapes:
    return Shapes(PAGE.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def shapes() -> Shapes:
    return read_shapes()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "content_shape" in metafunc.fixturenames:
        contents = read_shapes().contents
        metafunc.parametrize("content_shape", contents, ids=range(len(contents)))
