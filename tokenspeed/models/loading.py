"""Filling a model: from a checkpoint, strictly, or with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tokenspeed.config.model import ModelConfig
from tokenspeed.kernels.registry import Operators
from tokenspeed.models.checkpoint import Checkpoint, CheckpointError
from tokenspeed.models.qwen35 import Qwen35
from tokenspeed.models.qwen35_weights import table_name
from tokenspeed.models.random_weights import random_names, random_tensors
from tokenspeed.models.weights import Parameter, Shard, Source

LoadFormat = Literal["auto", "dummy"]
Progress = Callable[[int, int], None]
"""Called with the tensors loaded so far and their total."""

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load_model(
    directory: Path,
    ops: Operators,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> Qwen35:
    """The model of a Hugging Face directory, ready to run.

    Args:
        load_format: "auto" reads the directory's safetensors; "dummy" needs its config.json alone and draws the weights
            from `seed`.

    Raises:
        ConfigError: from config.json.
        CheckpointError: naming the tensors or the file that are wrong.
    """
    config = ModelConfig.read(directory)
    model = Qwen35(config, ops, dtype, device)
    if load_format == "dummy":
        tensors, total = random_tensors(config, seed, dtype, device), len(random_names(config))
    else:
        checkpoint = Checkpoint(directory)
        tensors, total = checkpoint.tensors(), len(checkpoint)
    try:
        fill(model.parameters, model.table, config, tensors, total=total, progress=progress)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    return model


def fill(
    parameters: dict[str, Tensor],
    table: Sequence[Parameter],
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    shard: Shard | None = None,
    total: int = 0,
    progress: Progress | None = None,
) -> None:
    """Copies one rank's share of every checkpoint tensor into the parameters.

    Args:
        parameters: of `allocate(table, shard, …)`; changed in place.
        tensors: every tensor of the checkpoint with its name, whole.
        total: their number, for `progress`.

    Raises:
        CheckpointError: naming every tensor that is missing, unexpected, filled twice, or of the wrong shape or type.
    """
    shard = shard or Shard()
    targets = {source.name: (entry, source) for entry in table for source in entry.sources}
    filled: set[tuple[str, str, int]] = set()
    wrong: list[str] = []
    for done, (name, tensor) in enumerate(tensors, start=1):
        known = table_name(name, config)
        if known is not None:
            complaint = _place(parameters, targets.get(known), tensor, shard, filled)
            if complaint:
                wrong.append(f"{name} {complaint}")
        if progress is not None:
            progress(done, total)
    wrong += [f"{name} is missing" for name in _missing(table, filled)]
    if wrong:
        more = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise CheckpointError("; ".join(wrong[:10]) + more)


def _place(
    parameters: dict[str, Tensor],
    target: tuple[Parameter, Source] | None,
    tensor: Tensor,
    shard: Shard,
    filled: set[tuple[str, str, int]],
) -> str | None:
    """Copies one tensor; what is wrong with it, or None."""
    if target is None:
        return "is unexpected"
    entry, source = target
    cells = _cells(entry, source)
    if not filled.isdisjoint(cells):
        return f"fills {entry.name} a second time"
    filled.update(cells)  # even if it is wrong: then it is not missing too
    shape = entry.source_shape(source)
    if tuple(tensor.shape) != shape:
        return f"has the shape {list(tensor.shape)} instead of {list(shape)}"
    if tensor.dtype not in FLOATING:
        return f"has the type {tensor.dtype}, which is not a plain floating-point type"
    entry.fill(parameters[entry.name], source, tensor, shard)
    return None


def _cells(entry: Parameter, source: Source) -> set[tuple[str, str, int]]:
    """What a source fills of a parameter: parts, by entry of the first axis where sources may fill one entry each."""
    by_entry = any(other.index is not None for other in entry.sources)
    if source.index is not None:
        entries = range(source.index, source.index + 1)
    else:
        entries = range(entry.before[0] if by_entry else 1)
    return {(entry.name, part, index) for part in source.parts for index in entries}


def _missing(table: Sequence[Parameter], filled: set[tuple[str, str, int]]) -> list[str]:
    """Names of the sources that would fill what is not: the whole one where nothing of a parameter is filled."""
    names = []
    for entry in table:
        needed = set().union(*(_cells(entry, source) for source in entry.sources)) - filled
        untouched = [source for source in entry.sources if source.index is None]
        pieces = [source for source in entry.sources if source.index is not None]
        partly = pieces and any(_cells(entry, source) & filled for source in pieces)
        for source in pieces if partly else untouched:
            if needed & _cells(entry, source):
                names.append(source.name)
    return names
