"""Host data on its way to a device, and results on their way back, without either side waiting for the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Staging:
    """Copies to and from one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"

    def tensor(self, values: Sequence[Any] | np.ndarray[Any, Any] | Tensor) -> Tensor:
        """The values on the device, once the device's stream gets there.

        The host's side of the copy is a fresh pinned block, which torch hands out again only when the copy is done: one
        kept for all steps would be overwritten by the next step while a copy still reads it.
        """
        host = torch.as_tensor(values)
        return host.pin_memory().to(self._device, non_blocking=True) if self._pinned else host.to(self._device)

    def fetch(self, *tensors: Tensor) -> Fetched:
        """Start copying tensors to the host, behind what the stream has been given."""
        if not self._pinned:
            return Fetched(list(tensors), None)
        hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        there.record()
        return Fetched(hosts, there)


class Fetched:
    """Tensors that are on their way to the host."""

    def __init__(self, hosts: list[Tensor], there: torch.cuda.Event | None) -> None:
        self._hosts = hosts
        self._there = there

    def wait(self) -> list[Tensor]:
        """The tensors, on the host."""
        if self._there is not None:
            self._there.synchronize()
        return self._hosts
