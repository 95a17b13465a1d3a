"""The step channel: device arrays by place, the only link between one step and the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.execution.choices import Choices
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
        choices: how each place's tokens are chosen.
    """

    token: Tensor
    length: Tensor
    ring: Tensor
    at: Tensor
    finished: Tensor
    limit: Tensor
    stop_ids: Tensor
    table: Tensor
    choices: Choices

    @classmethod
    def empty(cls, places: int, ring: int, pages: int, choices: Choices, device: torch.device) -> StepChannel:
        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(
            token=integers(places),
            length=integers(places),
            ring=integers(places, ring),
            at=integers(places),
            finished=torch.ones(places, dtype=torch.bool, device=device),
            limit=integers(places),
            stop_ids=integers(places, MAX_STOP_IDS) - 1,
            table=integers(places, pages),
            choices=choices,
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
        self.choices.admit(place, admit.choice)

    def advance(self, places: Tensor, tokens: Tensor, lengths: Tensor, at: Tensor, live: Tensor) -> None:
        """Sequences at `places` [n] have `lengths` tokens through the model, the last of them sampled `tokens` (-1: no
        valid one, which finishes). Those not `live` stay as they are."""
        stopped = (self.stop_ids[places] == tokens[:, None]).any(-1)
        finished = stopped | (tokens < 0) | (lengths + 1 >= self.limit[places]) | ~live
        self.token[places] = torch.where(live, tokens.clamp(min=0), self.token[places])
        self.length[places] = torch.where(live, lengths, self.length[places])
        self.at[places] = torch.where(live, at, self.at[places])
        self.finished[places] = finished
