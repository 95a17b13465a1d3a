from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.bench import bound, decode
from tokenspeed.cli import main

Run = Callable[..., str]
SMALL = ("--context", "60", "--turns", "3", "--new", "15", "--generate", "10")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `tokenspeed bench`, which must succeed; what it printed, without the spaces of its tables."""
    monkeypatch.setitem(bound.STREAM_BYTES, "cpu", 1 << 20)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["tokenspeed", "bench", *arguments, "--threads", "1"])
        with pytest.raises(SystemExit) as caught:
            main()
        assert not caught.value.code
        return " ".join(capsys.readouterr().out.replace("│", " ").split())

    return run


def test_decode(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "decode.json"
    options = ("--context", "40", "--context", "70", "--batch", "2", "--tokens", "8", "--cache", "64MiB")
    out = run("decode", *options, "--output", str(output))
    for words in ("pocket (cpu, float32)", "read-only stream: ", "gate passed: ", "decode, 2 at once", "share"):
        assert words in out
    content = json.loads(output.read_text())
    assert [row["context"] for row in content["rows"]] == [40, 70]
    for row in content["rows"]:
        assert f"{row['tokens_per_s']:,.1f} {row['bound']:,.1f} {row['tokens_per_s'] / row['bound']:.1%}" in out
        assert 2 <= row["experts"] <= 4  # of two tokens


def test_agentic_with_an_engine(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "agentic.json"
    out = run("agentic", *SMALL, "--cache", "64MiB", "--output", str(output))
    for words in ("cache at the start: nothing is shared", "gate passed", "bound", "85 15 69 16 10", "110 15 94 16 10"):
        assert words in out
    assert "hit rate: 63.92% of the prompts came from the cache; the bound is 64.71%" in out
    content = json.loads(output.read_text())
    assert content["hit_rate"] == pytest.approx((69 + 94) / (60 + 85 + 110))
    assert all(row["tokens_per_s_bound"] > 0 for row in content["rows"])


def test_agentic_with_a_server(run: Run, served: Any) -> None:
    out = run("agentic", *SMALL, "--url", served.url, "--api-key", "right", "--conversations", "2")
    assert f"{served.url} by its native API" in out
    assert "agentic workload, 2 side by side" in out
    assert "a first turn reused at most 0 tokens" in out


def test_a_failed_gate_prints_no_figure(
    command: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(bound.STREAM_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(decode, "AGREEMENT", -1.0)
    output = tmp_path / "none.json"
    error = command("bench", "decode", "--context", "40", "--tokens", "8", "--threads", "1", "--output", str(output))
    assert error.startswith("error: nothing was measured: log-probabilities of decode and prefill differ by ")
    assert capsys.readouterr().out == ""
    assert not output.exists()


def test_what_cannot_be_measured_is_said(command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bound.STREAM_BYTES, "cpu", 1 << 20)
    assert "a conversation comes to 64,800 tokens, and this engine's contexts to 32,768" in command("bench", "agentic")
    assert "a context of 40,000 and 150 tokens more do not fit" in command("bench", "decode", "--context", "40000")
    assert "the device 'abacus' cannot be used" in command("bench", "decode", "--device", "abacus")
    assert "nothing/there: there is no such directory" in command("bench", "agentic", "nothing/there")
    assert "cannot be reached" in command("bench", "agentic", "--url", "http://127.0.0.1:9", "--api", "chat")
    assert "is no size" in command("bench", "decode", "--cache", "much")
    command("bench", "agentic", "--api", "morse", code=2)
