"""One server a directory, and nobody else reads it."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tokenspeed.sessions.journal.directory import DataDirectory, default_directory, tokens_fingerprint
from tokenspeed.sessions.journal.store import JournalError

HOLD = """
import sys, pathlib
from tokenspeed.sessions.journal.directory import DataDirectory
held = DataDirectory(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_another_servers_directory_is_refused_by_pid(tmp_path: Path) -> None:
    home = tmp_path / "some" / "where"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(home)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(JournalError, match=f"{home} is in use by the server with pid {holder.pid}$"):
        DataDirectory(home)
    holder.kill()  # its hold ends with it, whatever it had no time for
    holder.communicate()
    held = DataDirectory(home)
    assert held.journal == home / "journal.db"
    with pytest.raises(JournalError, match="is in use"):
        DataDirectory(home)
    held.close()
    DataDirectory(home).close()
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "lock").stat().st_mode) == 0o600


def test_what_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(JournalError, match=f"{path} cannot hold sessions: "):
            DataDirectory(path)


def test_the_default_is_the_users_and_the_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    tokens = "0123456789abcdef"
    assert default_directory("some/model: v1", tokens) == Path("/data/tokenspeed/sessions/some-model-v1-0123456789ab")
    assert default_directory("../..", tokens) == Path("/data/tokenspeed/sessions/model-0123456789ab")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    for system, below in (("linux", ".local/share"), ("darwin", "Library/Application Support")):
        monkeypatch.setattr(sys, "platform", system)
        assert default_directory("m", tokens) == tmp_path / below / "tokenspeed/sessions/m-0123456789ab"


def test_the_fingerprint_is_of_tokenizer_and_template(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"tokenizer\.json"):
        tokens_fingerprint(tmp_path)
    seen = set()
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        for content in ("a", "b"):
            (tmp_path / name).write_text(content)
            seen.add(tokens_fingerprint(tmp_path))
    assert len(seen) == 6
    (tmp_path / "model.safetensors").write_text("x")
    assert tokens_fingerprint(tmp_path) in seen
