"""The step channel: device arrays by place, the only link between one step and the next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenspeed.scheduler.plan import Admit

MAX_STOP_IDS = 72


@dataclass
class StepChannel:
    """What the device knows of the turn in each place. All arrays are [places] unless said otherwise.

    Attributes:
        token: int64, the next one to go through the model, at position `length`.
        length: int64, tokens that went through.
        ring: int64 [places, ring rows]; `at`: int64, the index of the state after `length` tokens in it.
        finished: bool; a finished place writes to the sinks.
        limit: int64, the length (with `token`) at which it is finished.
        stop_ids: int64 [places, MAX_STOP_IDS], padded with -1.
        table: int64 [places, pages of a full context], page ids by page index.
        temperature, top_p, min_p: float32; top_k, seed: int64 (the seed's 64 bits).
        forced: int32 [places, positions], the id that a position must get, or -1; None where that is not allowed.
    """

    token: Tensor
    length: Tensor
    ring: Tensor
    at: Tensor
    finished: Tensor
    limit: Tensor
    stop_ids: Tensor
    table: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    forced: Tensor | None

    @classmethod
    def empty(
        cls, places: int, ring: int, page_size: int, max_context: int, device: torch.device, forced: bool
    ) -> StepChannel:
        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def floats() -> Tensor:
            return torch.zeros(places, dtype=torch.float32, device=device)

        return cls(
            token=integers(places),
            length=integers(places),
            ring=integers(places, ring),
            at=integers(places),
            finished=torch.ones(places, dtype=torch.bool, device=device),
            limit=integers(places),
            stop_ids=integers(places, MAX_STOP_IDS) - 1,
            table=integers(places, -(-max_context // page_size)),
            temperature=floats(),
            top_k=integers(places),
            top_p=floats(),
            min_p=floats(),
            seed=integers(places),
            forced=integers(places, max_context + 1).int() - 1 if forced else None,
        )

    def admit(self, admit: Admit) -> None:
        """A new turn takes a place."""
        place = admit.place
        stop = [*admit.stop_ids, *[-1] * (MAX_STOP_IDS - len(admit.stop_ids))]
        self.ring[place] = torch.tensor(admit.ring, device=self.ring.device)
        self.stop_ids[place] = torch.tensor(stop, device=self.stop_ids.device)
        self.table[place] = 0
        self.finished[place] = False
        self.limit[place] = admit.limit
        self.temperature[place] = admit.temperature
        self.top_k[place] = admit.top_k
        self.top_p[place] = admit.top_p
        self.min_p[place] = admit.min_p
        self.seed[place] = admit.seed - 2**64 if admit.seed >= 2**63 else admit.seed
        if self.forced is not None:
            ids = torch.as_tensor(np.frombuffer(admit.forced, "<i4").copy(), device=self.forced.device)
            row = self.forced[place]
            row.fill_(-1)
            end = min(admit.forced_from + len(ids), len(row))
            row[admit.forced_from : end] = ids[: end - admit.forced_from]

    def forced_or(self, places: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
        """`tokens` [n], or what is forced at their `positions`."""
        if self.forced is None:
            return tokens
        forced = self.forced[places, positions].long()
        return torch.where(forced >= 0, forced, tokens)

    def advance(self, places: Tensor, tokens: Tensor, lengths: Tensor, at: Tensor, live: Tensor) -> None:
        """Sequences at `places` [n] have `lengths` tokens through the model, the last of them sampled `tokens` (-1: no
        valid one, which finishes). Those not `live` stay as they are."""
        stopped = (self.stop_ids[places] == tokens[:, None]).any(-1)
        finished = stopped | (tokens < 0) | (lengths + 1 >= self.limit[places]) | ~live
        self.token[places] = torch.where(live, tokens.clamp(min=0), self.token[places])
        self.length[places] = torch.where(live, lengths, self.length[places])
        self.at[places] = torch.where(live, at, self.at[places])
        self.finished[places] = finished
