"""Decode steps recorded as CUDA graphs, one per batch bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tokenspeed.execution.staging import Staging

Outcome = TypeVar("Outcome")


def buckets(most: int) -> list[int]:
    """The sizes that steps are recorded for: powers of two, and `most` itself."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return [*sizes, most] if most > 1 else sizes


class DecodeGraphs(Generic[Outcome]):
    """Recorded steps, by how many places they run.

    A recording reads and writes the same memory every time: what it returns holds until the next replay.
    """

    def __init__(self, staging: Staging, idle_place: int, device: torch.device) -> None:
        self._staging = staging
        self._idle_place = idle_place
        self._device = device
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Outcome]] = {}
        self._placed: dict[int, list[int]] = {}  # what each recording's places hold
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, size: int, step: Callable[[Tensor], Outcome]) -> None:
        """Record `step`, a function of places [size] that does not wait for the device."""
        places = torch.full((size,), self._idle_place, dtype=torch.int64, device=self._device)
        # Outside of the recording first: kernels are compiled and libraries set up as they are first called.
        step(places)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outcome = step(places)
        self._recorded[size] = graph, places, outcome
        self._placed[size] = [self._idle_place] * size

    def run(self, at: Sequence[int]) -> Outcome:
        """The step of places `at`, in the smallest recording that holds them; its further entries are idle."""
        size = min(size for size in self._recorded if size >= len(at))
        graph, places, outcome = self._recorded[size]
        wanted = [*at, *[self._idle_place] * (size - len(at))]
        if wanted != self._placed[size]:
            places.copy_(self._staging.tensor(wanted), non_blocking=True)
            self._placed[size] = wanted
        graph.replay()
        return outcome
