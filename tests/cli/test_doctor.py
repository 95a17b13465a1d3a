from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tokenspeed.cli import doctor, main
from tokenspeed.cli.sizes import parse_size, show_size


def test_it_tells_what_there_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tokenspeed", "doctor"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code
    out = capsys.readouterr().out
    for word in ("tokenspeed  ", "python  ", "torch  ", "litestar  ", " cores, ", "memory free", "nothing wrong found"):
        assert word in out
    assert "gated_delta_prefill" in out


def test_the_other_distribution_of_that_name_is_reported(
    monkeypatch: pytest.MonkeyPatch, command: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    version = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: "9.9" if name == "tokenspeed" else version(name))
    assert command("doctor").startswith("error: the distribution tokenspeed 9.9 is installed, too.")
    assert "nothing wrong" not in capsys.readouterr().out


def test_a_device_that_is_none(command: Callable[..., str]) -> None:
    assert command("doctor", "--device", "abacus") == "error: 'abacus' is no device that torch knows"


def test_free_memory_is_less_than_there_is() -> None:
    import os

    assert 0 < doctor.free_memory_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("512MiB", 2**29), ("2g", 2**31), ("1.5 KB", 1536), ("3T", 3 * 2**40), ("10b", 10)],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**31, "2.0 GiB")])
def test_sizes_as_they_are_shown(size: int, text: str) -> None:
    assert show_size(size) == text
