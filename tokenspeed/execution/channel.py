"""The step channel: device arrays by place, the only link between one step and the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.execution.choices import Choices
from tokenspeed.execution.staging import Staging
from tokenspeed.kernels.registry import Operators
from tokenspeed.kernels.step import StepInputs
from tokenspeed.scheduler.plan import Admit

MAX_STOP_IDS = 72


@dataclass
class StepChannel:
    """What the device knows of the turn in each place. There is one place more than turns: the last is never admitted
    to, always finished, and pads a step. All arrays are [places] unless said otherwise.

    Attributes:
        token: int64, the next one to go through the model, at position `length`.
        length: int64, tokens that went through.
        ring: int64 [places, ring rows]; `at`: int64, the index of the state after `length` tokens in it.
        finished: bool; a finished place writes to the sinks.
        limit: int64, the length (with `token`) at which it is finished.
        stop_ids: int64 [places, MAX_STOP_IDS], padded with -1.
        table: int64 [places, pages of a full context], page ids by page index; past the length, anything.
        embedded: int64 [], tokens of live sequences that went through the model.
        choices: how each place's tokens are chosen.
        page_size: token rows in a page.
    """

    token: Tensor
    length: Tensor
    ring: Tensor
    at: Tensor
    finished: Tensor
    limit: Tensor
    stop_ids: Tensor
    table: Tensor
    embedded: Tensor
    choices: Choices
    page_size: int
    ops: Operators
    staging: Staging

    @classmethod
    def empty(
        cls, places: int, ring: int, pages: int, page_size: int, choices: Choices, ops: Operators, device: torch.device
    ) -> StepChannel:
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
            embedded=integers(),
            choices=choices,
            page_size=page_size,
            ops=ops,
            staging=Staging(device),
        )

    @property
    def idle_place(self) -> int:
        return len(self.length) - 1

    def admit(self, admits: Sequence[Admit]) -> None:
        """New turns take their places."""
        rows = [
            [admit.place, admit.limit, *admit.ring, *admit.stop_ids, *[-1] * (MAX_STOP_IDS - len(admit.stop_ids))]
            for admit in admits
        ]
        told = self.staging.tensor(rows)
        places, ring = told[:, 0], self.ring.shape[1]
        self.limit[places] = told[:, 1]
        self.ring[places] = told[:, 2 : 2 + ring]
        self.stop_ids[places] = told[:, 2 + ring :]
        self.finished.index_fill_(0, places, False)
        for admit in admits:
            self.choices.admit(admit.place, admit.choice)

    def put_pages(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """(place, page index, page)s of the table."""
        places, indices, pages = self.staging.tensor(entries).T
        self.table[places, indices] = pages

    def begin(self, places: Tensor, pages: int) -> StepInputs:
        """The next step of `places` [n], whose contexts reach over `pages` pages at most."""
        return self.ops.begin_step(
            self.token,
            self.length,
            self.ring,
            self.at,
            self.finished,
            self.table,
            self.embedded,
            places,
            self.page_size,
            pages,
        )

    def end(self, places: Tensor, tokens: Tensor, lengths: Tensor, at: Tensor, live: Tensor) -> Tensor:
        """Sequences at `places` [n] have `lengths` tokens through the model, the state after them at `at` of their
        ring, and were given `tokens` (-1: no valid one, which finishes). Returns what the host is told, [n]."""
        return self.ops.end_step(
            self.token,
            self.length,
            self.at,
            self.finished,
            self.limit,
            self.stop_ids,
            places,
            tokens,
            lengths,
            at,
            live,
        )
