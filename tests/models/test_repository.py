from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from tokenspeed.models import repository
from tokenspeed.models.repository import ModelNotFoundError, resolve


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/model") == tmp_path / "model"


def test_a_repository_is_fetched_without_its_other_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(repository, "snapshot_download", fetch)
    assert resolve("someone/some-model") == tmp_path
    assert asked == [("someone/some-model", ["*.json", "*.safetensors", "*.jinja", "*.txt"])]


def missing() -> RepositoryNotFoundError:
    response = httpx.Response(404, request=httpx.Request("GET", "https://hub.example/api"))
    return RepositoryNotFoundError("404", response=response)


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (LocalEntryNotFoundError("offline"), "cannot be fetched and is not in the local cache"),
        (OSError("no route"), "cannot be fetched and is not in the local cache"),
        (missing(), "no such repository in the hub"),
    ],
)
def test_a_repository_that_cannot_be_fetched(error: Exception, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*args: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(repository, "snapshot_download", fetch)
    with pytest.raises(ModelNotFoundError, match=complaint) as caught:
        resolve("someone/some-model")
    assert caught.value.code == "model_not_found"


def test_a_mistyped_path_is_no_repository(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no such directory, and it is not a repository id"):
        resolve(str(tmp_path / "absent"))
