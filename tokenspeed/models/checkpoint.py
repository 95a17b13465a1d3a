"""A checkpoint's tensors on disk: one safetensors file, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tokenspeed.config.model import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class CheckpointError(ModelError):
    """A checkpoint that is unreadable, incomplete, or not of the model's shape."""

    code = "bad_checkpoint"


class Checkpoint:
    """The safetensors files of a directory.

    Attributes:
        names: {file: tensor names in it}.

    Raises:
        CheckpointError: if a file is missing, unreadable or truncated, or lacks a tensor that the index says it has.
    """

    def __init__(self, directory: Path) -> None:
        self.names: dict[Path, list[str]] = {}
        index = directory / INDEX
        expected: dict[Path, set[str]] = {}
        if index.exists():
            for name, file in _weight_map(index).items():
                expected.setdefault(directory / file, set()).add(name)
        elif (directory / SINGLE).exists():
            expected[directory / SINGLE] = set()
        else:
            raise CheckpointError(f"{directory}: it holds neither {SINGLE} nor {INDEX}")
        for path in sorted(expected):
            try:
                with safe_open(path, framework="pt") as file:
                    self.names[path] = list(file.keys())
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: cannot be read: {error}") from error
            absent = sorted(expected[path].difference(self.names[path]))
            if absent:
                raise CheckpointError(f"{path}: {INDEX} says that it holds {absent[0]}, which it does not")

    def __len__(self) -> int:
        return sum(len(names) for names in self.names.values())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its name, file by file; the tensors are views of mapped files, read when copied."""
        for path, names in self.names.items():
            with safe_open(path, framework="pt") as file:
                for name in names:
                    yield name, file.get_tensor(name)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{index}: cannot be read: {error}") from error
    except (KeyError, TypeError):
        raise CheckpointError(f"{index}: it has no weight_map") from None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map does not map names to files")
    return weight_map
