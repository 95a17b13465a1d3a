"""Runs plans on a device, in order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tokenspeed.cache.pools import PagePool, StateRows
from tokenspeed.execution.channel import StepChannel
from tokenspeed.execution.choices import Drawn
from tokenspeed.models.batch import Batch, Stores
from tokenspeed.models.qwen35 import Qwen35
from tokenspeed.scheduler.plan import Plan, Prefill, Sampled


@dataclass(frozen=True)
class Draw:
    """Sampled tokens of one forward, still on the device; row i belongs to run `runs[i]`, which wants `top[i]` of the
    most likely ids beside its log-probability (None: neither)."""

    runs: list[int]
    top: list[int | None]
    drawn: Drawn
    live: Tensor  # [n] bool
    decoded: bool

    def result(self) -> list[Sampled]:
        """Waits for the device."""
        tokens, live = self.drawn.tokens.tolist(), self.live.tolist()
        rows = [
            Sampled(run, token, alive, self.decoded) for run, token, alive in zip(self.runs, tokens, live, strict=True)
        ]
        if self.drawn.logprobs is not None:
            chosen, ids, logprobs = (values.tolist() for values in self.drawn.logprobs)
            for index, (row, top) in enumerate(zip(rows, self.top, strict=True)):
                if top is not None:
                    row.logprob = chosen[index]
                    row.top = list(zip(ids[index][:top], logprobs[index][:top], strict=True))
        return rows


@dataclass(frozen=True)
class Step:
    """A step on its way."""

    draws: list[Draw]

    def result(self) -> list[Sampled]:
        """Waits for the device."""
        return [row for draw in self.draws for row in draw.result()]


class Executor:
    """Owns the device side of the cache and of the step channel.

    `launch` puts a step on the device's one stream and returns without waiting for it.
    """

    def __init__(self, model: Qwen35, pages: PagePool, rows: StateRows, channel: StepChannel) -> None:
        self.model = model
        self.pages = pages
        self.rows = rows
        self._size = pages.geometry.page_size
        self._device = model.device
        self._channel = channel
        # Upper bounds of the channel's lengths, to size launches without asking it.
        self._lengths = [0] * len(channel.length)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Step:
        channel = self._channel
        if plan.copies:
            sources, targets = torch.tensor(plan.copies, device=self._device).T
            self.pages.copy(sources, targets)
        for admit in plan.admits:
            channel.admit(admit)
        if plan.table:
            places, indices, pages = torch.tensor(plan.table, device=self._device).T
            channel.table[places, indices] = pages
        draws = []
        if plan.prefills:
            draw = self._prefill(plan.prefills)
            if draw is not None:
                draws.append(draw)
        if plan.decodes:
            draws.append(self._decode(plan.decodes))
        return Step(draws)

    def _prefill(self, chunks: list[Prefill]) -> Draw | None:
        channel, size = self._channel, self._size
        ids = [np.frombuffer(chunk.tokens, "<i4").astype(np.int64) for chunk in chunks]
        counts = [len(run) for run in ids]
        positions = np.concatenate([np.arange(c.start, c.start + n) for c, n in zip(chunks, counts, strict=True)])
        owners = np.repeat([chunk.place for chunk in chunks], counts)
        there = positions < np.repeat([chunk.write_from for chunk in chunks], counts)
        ends = [chunk.start + n for chunk, n in zip(chunks, counts, strict=True)]
        places = self._tensor([chunk.place for chunk in chunks])
        at, owner = self._tensor(positions), self._tensor(owners)
        offset = at % size
        kv_rows = torch.where(self._tensor(there), offset, channel.table[owner, at // size] * size + offset)
        stores = [(index, count, row) for index, chunk in enumerate(chunks) for count, row in chunk.stores]
        starts = self._tensor(np.concatenate([[0], np.cumsum(counts)]))
        batch = Batch(
            positions=at,
            starts=starts,
            lengths=self._tensor(ends),
            page_table=channel.table[places, : -(-max(ends) // size)],
            kv_rows=kv_rows,
            read_rows=self._tensor([chunk.read_row for chunk in chunks]),
            write_rows=self._tensor([chunk.write_row for chunk in chunks]),
            live=torch.ones(len(chunks), dtype=torch.bool, device=self._device),
            decode=False,
            stores=Stores(*self._tensor(stores).T) if stores else None,
            longest_query=max(counts),
            longest=max(ends),
        )
        hidden = self.model.forward(self._tensor(np.concatenate(ids)), batch, self.pages, self.rows)
        for chunk, end in zip(chunks, ends, strict=True):
            self._lengths[chunk.place] = end
        last = [index for index, chunk in enumerate(chunks) if chunk.sample]
        if not last:
            return None
        chosen = self._tensor(last)
        of = [(chunks[index].place, chunks[index].run) for index in last]
        ends_at, ring_start = starts[1:][chosen] - 1, torch.zeros_like(chosen)
        return self._draw(of, hidden[ends_at], places[chosen], batch.lengths[chosen], ring_start, batch.live[chosen])

    def _decode(self, decodes: list[tuple[int, int]]) -> Draw:
        channel, size = self._channel, self._size
        places = self._tensor([place for place, _ in decodes])
        positions, live = channel.length[places], ~channel.finished[places]
        ring, at = channel.ring[places], channel.at[places]
        following = (at + 1) % ring.shape[1]
        offset = positions % size
        pages = channel.table[places, positions // size]
        for place, _ in decodes:
            self._lengths[place] += 1
        longest = max(self._lengths[place] for place, _ in decodes)
        batch = Batch(
            positions=positions,
            starts=torch.arange(len(decodes) + 1, device=self._device),
            lengths=positions + 1,
            page_table=channel.table[places, : -(-longest // size)],
            kv_rows=torch.where(live, pages * size + offset, offset),
            read_rows=ring.gather(1, at[:, None])[:, 0],
            write_rows=torch.where(live, ring.gather(1, following[:, None])[:, 0], 0),
            live=live,
            decode=True,
            stores=None,
            longest_query=1,
            longest=longest,
        )
        hidden = self.model.forward(channel.token[places], batch, self.pages, self.rows)
        draw = self._draw(decodes, hidden, places, positions + 1, following, live)
        return replace(draw, decoded=True)

    def _draw(
        self, of: list[tuple[int, int]], hidden: Tensor, places: Tensor, lengths: Tensor, at: Tensor, live: Tensor
    ) -> Draw:
        """Choose tokens after `hidden` [n, hidden], the outputs at the last of `lengths` tokens of the (place, run)s
        `of`, and put them into the channel."""
        choices = self._channel.choices
        drawn = choices.draw(self.model.logits(hidden), [place for place, _ in of], places, lengths, live)
        self._channel.advance(places, drawn.tokens, lengths, at, live)
        top = [choices.reported(place) for place, _ in of]
        return Draw([run for _, run in of], top, drawn, live, decoded=False)

    def _tensor(self, values: list[int] | list[tuple[int, int, int]] | np.ndarray) -> Tensor:
        return torch.as_tensor(values, device=self._device)
