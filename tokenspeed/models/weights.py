"""The declarative table of a model's weights: parameters, the checkpoint tensors that fill them, and their shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenspeed.config.model import ModelError


class ShardError(ModelError):
    """A model that cannot be split over so many ranks."""

    code = "bad_shard"


@dataclass(frozen=True)
class Shard:
    """One rank's share of a model."""

    rank: int = 0
    world: int = 1


@dataclass(frozen=True)
class Part:
    """A run of `units` equal units (heads, channels, vocabulary ids) of `width` rows along a parameter's split axis.

    `replicated`: with more ranks than units, each unit lives on several ranks (KV heads do).
    """

    name: str
    units: int
    width: int = 1
    replicated: bool = False

    @property
    def rows(self) -> int:
        return self.units * self.width

    def local(self, shard: Shard) -> tuple[int, int]:
        """First row and number of rows of this part that the rank holds.

        Raises:
            ShardError: if the units do not divide.
        """
        if self.units % shard.world == 0:
            units, first = self.units // shard.world, shard.rank * (self.units // shard.world)
        elif self.replicated and shard.world % self.units == 0:
            units, first = 1, shard.rank // (shard.world // self.units)
        else:
            raise ShardError(f"{self.units} {self.name} cannot be split over {shard.world} ranks")
        return first * self.width, units * self.width


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor that fills the named parts of a parameter, in this order along the split axis.

    `index` is the entry of the parameter's first axis that it fills (an expert), None for all. `squeeze` is an axis of
    length 1 that the checkpoint's tensor has and the parameter has not.
    """

    name: str
    parts: tuple[str, ...]
    index: int | None = None
    squeeze: int | None = None


@dataclass(frozen=True)
class Parameter:
    """A tensor of the model.

    Attributes:
        name: its name in the model.
        parts: what stands along the split axis, in order; ranks join their pieces of each.
        sources: the checkpoint tensors that may fill it; alternatives cover the same parts.
        before, after: lengths of the axes before and after the split axis.
        whole: every rank holds all of it.
        exact: kept in promote(float32, model's type) whatever the model's type.
    """

    name: str
    parts: tuple[Part, ...]
    sources: tuple[Source, ...]
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    whole: bool = False
    exact: bool = False
    places: dict[str, Part] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {part.name: part for part in self.parts})

    def shape(self, shard: Shard) -> tuple[int, ...]:
        """Shape on one rank."""
        return (*self.before, sum(self.span(part, shard)[1] for part in self.parts), *self.after)

    def span(self, part: Part, shard: Shard) -> tuple[int, int]:
        return (0, part.rows) if self.whole else part.local(shard)

    def source_shape(self, source: Source) -> tuple[int, ...]:
        """Shape that the checkpoint's tensor must have."""
        before = self.before if source.index is None else self.before[1:]
        shape = [*before, sum(self.places[name].rows for name in source.parts), *self.after]
        if source.squeeze is not None:
            shape.insert(source.squeeze, 1)
        return tuple(shape)

    def fill(self, target: Tensor, source: Source, tensor: Tensor, shard: Shard) -> None:
        """Copies the rank's pieces of a checkpoint tensor to their places in `target` (shape `shape(shard)`)."""
        if source.squeeze is not None:
            tensor = tensor.squeeze(source.squeeze)
        if source.index is not None:
            target = target[source.index]
        axis = len(self.before) - (source.index is not None)
        starts: dict[str, int] = {}
        place = 0
        for part in self.parts:
            starts[part.name] = place
            place += self.span(part, shard)[1]
        offset = 0
        for name in source.parts:
            part = self.places[name]
            first, rows = self.span(part, shard)
            target.narrow(axis, starts[name], rows).copy_(tensor.narrow(axis, offset + first, rows))
            offset += part.rows


def allocate(table: Sequence[Parameter], shard: Shard, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Uninitialised tensors for every parameter, by name."""
    exact = torch.promote_types(torch.float32, dtype)
    return {
        entry.name: torch.empty(entry.shape(shard), dtype=exact if entry.exact else dtype, device=device)
        for entry in table
    }


class Parameters:
    """The tensors of one module: `parameters["norm"]` is `<prefix>norm` of the model's."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str = "") -> None:
        self.tensors = tensors
        self.prefix = prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name]

    def under(self, name: str) -> Parameters:
        return Parameters(self.tensors, f"{self.prefix}{name}.")
