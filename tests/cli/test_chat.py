"""The conversation in the terminal: on a terminal, through a pipe, and on somebody else's server."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from tokenspeed.client import Client

COST = r"prompt (\d+) · reused (\d+) · computed (\d+) · output (\d+) · TTFT \d+ ms · [\d.]+ tokens/s"


@pytest.fixture
def terminal(served: Any, command_line: list[str], tmp_path: Path) -> Iterator[Any]:
    child = pexpect.spawn(
        command_line[0],
        [
            *command_line[1:],
            "chat",
            "--url",
            served.url,
            "--api-key",
            "right",
            "--temperature",
            "0",
            "--max-tokens",
            "40",
        ],
        cwd=str(tmp_path),
        encoding="utf-8",
        dimensions=(40, 200),
        timeout=30,
    )
    yield child
    child.close(force=True)


def cost(child: Any) -> tuple[int, int, int, int]:
    child.expect(COST)
    prompt, reused, computed, output = map(int, child.match.groups())
    return prompt, reused, computed, output


def test_a_conversation_on_a_terminal(terminal: Any, served: Any) -> None:
    terminal.expect(r"(sess_\w+) at http://\S+; /help lists the commands")
    first = terminal.match[1]
    terminal.expect("> ")
    terminal.sendline("My name is Ines.")
    one = cost(terminal)
    assert one[0] == one[1] + one[2] > 0
    terminal.sendline("What is my name?")
    two = cost(terminal)
    assert two[0] == two[1] + two[2]
    assert two[2] <= two[0] - one[0] - one[3] + 1
    terminal.sendline("/turns")
    terminal.expect(r"1  My name is Ines\.  →  \S+")
    terminal.expect(r"2  What is my name\?  →  \S+")
    terminal.sendline("/fork")
    terminal.expect(rf"now on (sess_\w+), a fork of {first}")
    branch = terminal.match[1]
    terminal.sendline("/rewind 1")
    terminal.expect("at the end of turn 1")
    terminal.sendline("Thank you!")
    three = cost(terminal)
    assert three[1] >= one[0] + one[3] - 1
    terminal.sendline("/usage")
    terminal.expect(rf"1 turns · prompt {three[0]} · reused {three[1]} \([\d.]+%\) · computed {three[2]}")
    terminal.sendline("/rewind")
    terminal.expect("at the end of turn 1")
    terminal.sendline("/rewind start")
    terminal.expect("at the start")
    terminal.sendline("/turns")
    terminal.expect("no turns yet")
    for wrong, said in (("/rewind 9", "there is no turn 9; there are 0"), ("/dance", "there is no command /dance")):
        terminal.sendline(wrong)
        terminal.expect(said)
    terminal.sendline("/help")
    terminal.expect("/quit +leave")
    terminal.sendline("/quit")
    terminal.expect(pexpect.EOF)
    terminal.wait()
    assert terminal.exitstatus == 0
    with Client(served.url, "right") as client:
        assert len(client.session(id=first).turns()) == 2
        assert client.session(id=branch).turns() == []


def test_ctrl_c_ends_an_answer_and_then_the_conversation(command_line: list[str], served: Any, tmp_path: Path) -> None:
    """An answer that would go on to the end of the context is cut, and the session takes the next turn."""
    with Client(served.url, "right") as client:
        session = client.session(ignore_eos=True, temperature=0)
        child = pexpect.spawn(
            command_line[0],
            [*command_line[1:], "chat", "--url", served.url, "--api-key", "right", "--session", session.id],
            cwd=str(tmp_path),
            encoding="utf-8",
            timeout=30,
        )
        child.expect("> ")
        child.sendline("Hello!")
        child.expect(r"Hello!\s+\S+")  # the echo, and what the answer begins with
        child.sendintr()
        child.expect(r"\(cancelled: cancelled\)")
        prompt, _, _, output = cost(child)
        child.expect("> ")
        child.sendintr()
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 0
        (turn,) = session.turns()
        assert (turn.status, turn.usage.prompt, turn.usage.output) == ("cancelled", prompt, output)
        assert session.get().state == "idle"


def test_through_a_pipe_with_a_server_of_its_own(command_line: list[str], tmp_path: Path) -> None:
    ended = subprocess.run(
        [*command_line, "chat", "--temperature", "0", "--max-tokens", "30", "--instructions", "Be brief."],
        input="Hello!\n/turns\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert (ended.returncode, ended.stderr) == (0, "loading tokenspeed-pocket\n")
    lines = ended.stdout.splitlines()
    assert lines[1] == "> Hello!"
    assert re.fullmatch(COST, lines[3])
    assert lines[5].startswith("  1  Hello!  →  ")
    assert "\x1b" not in ended.stdout


def test_what_fails_in_a_pipe_shows_in_the_exit_status(command_line: list[str], served: Any, tmp_path: Path) -> None:
    ended = subprocess.run(
        [*command_line, "chat", "--url", served.url, "--api-key", "right", "--max-tokens", "1"],
        input=f"{'word ' * 20_000}\nHello!\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert (ended.returncode, ended.stderr) == (1, "error: 1 of the lines could not be answered\n")
    assert "error: context_length_exceeded: the maximum context length is" in ended.stdout
    assert re.search(COST, ended.stdout), "the line after it was answered"


def test_nobody_answers(command: Callable[..., str]) -> None:
    said = command("chat", "--url", "http://127.0.0.1:9")
    assert said.startswith("error: ws://127.0.0.1:9/v1/sessions/ws: cannot connect")


def test_a_wrong_key_and_an_unknown_session(command: Callable[..., str], served: Any) -> None:
    said = command("chat", "--url", served.url, "--api-key", "wrong")
    assert said == "error: unauthorized: the API key is not known"
    said = command("chat", "--url", served.url, "--api-key", "right", "--session", "sess_x")
    assert said == "error: session_not_found: there is no session sess_x"
    assert command("chat", "--url", "nowhere").startswith("error: base_url is 'nowhere'")


@pytest.mark.parametrize("arguments", [["model", "--url", "http://x"], ["--session", "s"]])
def test_options_that_exclude_each_other(command: Callable[..., str], arguments: list[str]) -> None:
    command("chat", *arguments, code=2)
