"""`tokenspeed serve`: what it says, how it ends, and what it refuses in one line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import tokenspeed.pocket
from tokenspeed.client import Client, SessionError

Command = Callable[..., str]


def test_it_says_when_it_is_ready_and_is(served: Any) -> None:
    assert "pocket (cpu, float32) at http://127.0.0.1:" in served.ready
    assert httpx.get(f"{served.url}/health/ready").json()["status"] == "ready"


def test_a_key_opens_it(served: Any) -> None:
    with Client(served.url, "wrong") as client, pytest.raises(SessionError, match="unauthorized"):
        client.session()
    with Client(served.url, "right") as client, client.session(temperature=0, max_tokens=20) as session:
        turn = session.turn("Hello!")
        assert turn.usage.prompt == turn.usage.reused.total + turn.usage.computed > 0


def test_sigterm_ends_it_and_its_engine(start: Callable[..., Any]) -> None:
    server = start("--max-context", "64", "--cache", "64MiB", "--max-sequences", "2", "--dtype", "float64")
    assert "float64" in server.ready
    with Client(server.url) as client, client.session() as session:
        with pytest.raises(SessionError, match="maximum context length is 64 tokens") as caught:
            session.turn("word " * 100)
        assert caught.value.code == "context_length_exceeded"
        assert session.turn("Hello!", max_tokens=4).usage.remaining < 64
    engines = server.children()
    assert engines
    code, errors = server.end(signal.SIGTERM)
    assert code == 0
    assert "Traceback" not in errors
    assert not any(alive(pid) for pid in engines)


def test_a_signal_while_the_weights_load_ends_it_too(tmp_path: Path, command_line: list[str]) -> None:
    """SIGINT as Ctrl-C sends it: to the whole group."""
    process = subprocess.Popen(
        [*command_line, "serve", "--port", "0"], stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "loading tokenspeed-pocket\n"
    time.sleep(0.7)
    engines = children_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert not any(alive(pid) for pid in engines)


def test_an_engine_that_dies_comes_back_and_one_that_cannot_ends_the_server(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    model = pocket_copy(tmp_path)
    server = start(str(model), "--log-level", "error")
    with Client(server.url) as client:
        session = client.session(temperature=0, max_tokens=4)
        expected = session.turn("Hello!").text
        (engine,) = server.children()
        os.kill(engine, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while not client.ready() or server.children() == [engine]:
            assert time.monotonic() < deadline, "the engine did not come back"
            time.sleep(0.1)
        session.rewind("start")
        assert session.turn("Hello!").text == expected
        (model / "model.safetensors").unlink()
        os.kill(server.children()[0], signal.SIGKILL)
        _, errors = server.process.communicate(timeout=60)
        assert server.process.returncode == 1
        assert "model.safetensors" in errors
        assert errors.splitlines()[-1] == "error: the engine's process has ended"


def test_options_of_the_engine(start: Callable[..., Any]) -> None:
    """Chunks, queue and reuse change what a turn costs, never what it says."""
    answers = []
    for options in ([], ["--no-prefix-cache", "--prefill-chunk", "7", "--max-queue", "1"]):
        server = start("--dtype", "float64", *options)
        with Client(server.url) as client, client.session(temperature=0, max_tokens=5) as session:
            texts = [session.turn("My name is Ines, and I like the colour green.").text]
            second = session.turn("What is my name?")
            assert (second.usage.reused.total == 0) == bool(options)
            assert second.miss_reason == ("off" if options else None)
            answers.append([*texts, second.text])
    assert answers[0] == answers[1]


def test_a_context_that_the_cache_does_not_hold_is_said(start: Callable[..., Any]) -> None:
    server = start("--cache", "16MiB", "--dtype", "float64")
    said = server.process.stdout.readline()
    with Client(server.url) as client, client.session() as session:
        context = session.get().remaining
    assert said.startswith(f"the context is {context} tokens, which is what the cache holds; for ")
    roomy = start("--max-context", "64", "--dtype", "float64")
    roomy.process.send_signal(signal.SIGTERM)
    assert roomy.process.communicate(timeout=30)[0] == ""


def test_the_version(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    command("--version", code=0)
    assert capsys.readouterr().out == f"tokenspeed {tokenspeed.__version__}\n"


def test_a_port_in_use(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = command("serve", "--port", str(port))
    assert said == f"error: port {port} on 127.0.0.1 is in use: stop what uses it, or give another --port"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "error: without an API key the server listens on this machine only, not on 0.0.0.0"),
        (["--api-key", "right"], "error: an API key is given as TENANT=KEY"),
        (["--port", "0", "--shared-preamble", "/no/such/file"], "error: /no/such/file: "),
        (["--cache", "much"], "error: 'much' is no size; write one like 512MiB or 2GiB"),
        (["--cache", "500TiB"], "error: --cache 500TiB is more than the "),
        (["--port", "0", "/no/such/model"], "error: /no/such/model: there is no such directory"),
    ],
)
def test_what_cannot_work_is_one_line(command: Command, arguments: list[str], said: str) -> None:
    line = command("serve", *arguments)
    assert line.startswith(said)
    assert "\n" not in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "70000"],
        ["--prefill-chunk", "0"],
        ["--max-queue", "-1"],
        ["--dtype", "int3"],
        ["--max-context", "1"],
        ["--nonsense"],
    ],
)
def test_a_wrong_option_is_a_usage_error(command: Command, arguments: list[str]) -> None:
    command("serve", *arguments, code=2)


def pocket_copy(directory: Path) -> Path:
    shutil.copytree(tokenspeed.pocket.DIRECTORY, directory / "model", ignore=shutil.ignore_patterns("__pycache__"))
    return directory / "model"


def test_an_unknown_architecture(command: Command, tmp_path: Path) -> None:
    model = pocket_copy(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    said = command("serve", "--port", "0", str(model))
    assert said.startswith(f"error: {model}/config.json")
    assert "llama" in said


def test_a_damaged_checkpoint(command: Command, tmp_path: Path) -> None:
    model = pocket_copy(tmp_path)
    (model / "model.safetensors").write_bytes(b"\0" * 100)
    assert "model.safetensors" in command("serve", "--port", "0", str(model))


def test_a_template_that_fails(command: Command, tmp_path: Path) -> None:
    model = pocket_copy(tmp_path)
    (model / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    said = command("serve", "--port", "0", str(model))
    assert said.startswith(f"error: {model}: ")
    assert "template" in said


@pytest.mark.parametrize("missing", ["typer", "uvicorn"])
def test_without_the_extra_there_is_a_hint(missing: str, tmp_path: Path) -> None:
    script = f"import sys; sys.modules[{missing!r}] = None; sys.argv[1:] = ['serve', '--port', '0']; "
    script += "from tokenspeed.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr == (
        f"tokenspeed: {missing} is not installed; the command line needs pip install 'tokenspeed-sessions[server]'\n"
    )


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
