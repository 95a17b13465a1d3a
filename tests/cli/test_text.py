from __future__ import annotations

import io

import pytest
from rich.console import Console

from tokenspeed.cli.text import StreamPrinter, printable
from tokenspeed.client import Delta


def shown(*deltas: Delta, terminal: bool = False) -> str:
    out = io.StringIO()
    colours = "standard" if terminal else None
    printer = StreamPrinter(Console(file=out, force_terminal=terminal, color_system=colours, width=20))
    for delta in deltas:
        printer.show(delta)
    printer.end()
    return out.getvalue()


ANSWER = (
    Delta("reasoning", "They ", 0, "t"),
    Delta("reasoning", "ask.", 0, "t"),
    Delta("text", "\n\nA long answer that ", 1, "t"),
    Delta("text", "is not wrapped.", 1, "t"),
    Delta("arguments", '{"a":', 2, "t", "add", "c"),
    Delta("arguments", "1}", 2, "t"),
    Delta("text", "[bold]plain[/bold]", 0, "t2"),
)


def test_each_item_has_a_line_of_its_own() -> None:
    assert shown(*ANSWER) == (
        'thinking: They ask.\nA long answer that is not wrapped.\ncalls add {"a":1}\n[bold]plain[/bold]\n'
    )


def test_reasoning_is_dimmed_on_a_terminal() -> None:
    out = shown(*ANSWER, terminal=True)
    assert "\x1b[2mthinking: \x1b[0m" in out
    assert "A long answer that is" in out


def test_an_empty_thought_takes_no_line() -> None:
    assert shown(Delta("reasoning", "\n\n", 0, "t"), Delta("text", "Hi", 1, "t")) == "Hi\n"
    assert shown() == ""


@pytest.mark.parametrize("evil", ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\r", "\b\b"])
def test_a_model_cannot_steer_the_terminal(evil: str) -> None:
    out = shown(Delta("text", f"a{evil}b", 0, "t"), Delta("arguments", "{}", 1, "t", f"x{evil}"))
    assert not set(out) & set("\x1b\x07\x9b\r\b")
    assert printable("a\tb\nc") == "a\tb\nc"
