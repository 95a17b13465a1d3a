"""Runs plans on a device, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenspeed.cache.pools import PagePool, StateRows
from tokenspeed.execution.channel import StepChannel
from tokenspeed.execution.graphs import DecodeGraphs
from tokenspeed.execution.staging import Fetched, Staging
from tokenspeed.kernels.sampling import Chosen
from tokenspeed.kernels.step import NOT_LIVE
from tokenspeed.models.batch import Batch, Stores
from tokenspeed.models.qwen35 import Qwen35
from tokenspeed.scheduler.plan import Plan, Prefill, Sampled

LONG_CHUNK, LONG_PROMPT = 4096, 1 << 18
"""Tokens of the least chunk and the longest prompt for which a start runs every chunk."""


@dataclass(frozen=True)
class Outcome:
    """What the tokens of one forward came to, on the device: `told` [n], of `end_step`, and all of `choose`."""

    told: Tensor
    chosen: Chosen


@dataclass(frozen=True)
class Draw:
    """Sampled tokens of one forward, on their way to the host; row i belongs to run `runs[i]`, which wants `top[i]` of
    the most likely ids beside its log-probability (None: neither)."""

    runs: list[int]
    top: list[int | None]
    fetched: Fetched
    decoded: bool

    def result(self) -> list[Sampled]:
        """Waits for the device."""
        told, *reported = (tensor.tolist() for tensor in self.fetched.wait())
        rows = [
            Sampled(run, token, token != NOT_LIVE, self.decoded) for run, token in zip(self.runs, told, strict=False)
        ]
        if reported:
            logprobs, top_ids, top_logprobs = reported
            for index, (row, top) in enumerate(zip(rows, self.top, strict=True)):
                if top is not None:
                    row.logprob = logprobs[index]
                    row.top = list(zip(top_ids[index][:top], top_logprobs[index][:top], strict=True))
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
        self.channel = channel
        self._staging = Staging(model.device)
        self._graphs: DecodeGraphs[Outcome] | None = None
        # Upper bounds of the channel's lengths, to size launches without asking it.
        self._lengths = [0] * len(channel.length)

    @property
    def embedded(self) -> Tensor:
        """[] int64, tokens of live sequences that went through the model."""
        return self.channel.embedded

    @torch.inference_mode()
    def record(self, size: int) -> None:
        """Make decode steps of up to `size` sequences replays of a CUDA graph, where a smaller one does not do."""
        channel = self.channel
        if self._graphs is None:
            self._graphs = DecodeGraphs(self._staging, channel.idle_place, self.model.device)
        pages = channel.table.shape[1]
        self._graphs.record(size, lambda places: self._step(places, pages, pages * self._size))

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Decode steps that are launched meanwhile are not replays: Python sees every operator of theirs."""
        graphs, self._graphs = self._graphs, None
        try:
            yield
        finally:
            self._graphs = graphs

    @torch.inference_mode()
    def replay_s(self, place: int, steps: int) -> float:
        """Seconds of a recorded decode step of one place, measured over `steps` of them."""
        assert self._graphs is not None
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._graphs.run([place])
        begun.record()
        for _ in range(steps):
            self._graphs.run([place])
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3 / steps

    @torch.inference_mode()
    def warm_up(self, most: int, context: int, progress: Callable[[int, int], None]) -> None:
        """Run prompts of all kinds of lengths, up to `most` tokens at once and at the end of a full context, into the
        sinks, so that whatever is compiled or chosen at a first call is there."""
        lengths = sorted({length for power in range(most.bit_length()) for length in (2**power, 2**power + 1)} | {most})
        lengths = [length for length in lengths if length <= min(most, context)]
        kinds = [([length], length) for length in lengths]
        kinds += [([1, min(2, most), min(70, most)], min(most, context)), ([min(most, context)], context)]
        # The chunks of a long prompt: libraries plan by shape, and attention's alone depends on what was before.
        ends = range(2 * most, min(context, LONG_PROMPT) + 1, most) if most >= LONG_CHUNK else ()
        long = [([most], end) for end in ends]
        small = self.model.one_layer_of_each_kind()
        for number, (counts, end) in enumerate([*kinds, *long]):
            progress(number, len(kinds) + len(long))
            self._warm(self.model if number < len(kinds) else small, counts, end)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def _warm(self, model: Qwen35, counts: list[int], end: int) -> None:
        staged, size, n = self._staging.tensor, self._size, len(counts)
        ends = [max(end, count) for count in counts]
        positions = np.concatenate([np.arange(last - count, last) for count, last in zip(counts, ends, strict=True)])
        places = torch.full((n,), self.channel.idle_place, dtype=torch.int64, device=self.model.device)
        sinks = torch.zeros_like(places)
        starts = staged(np.concatenate([[0], np.cumsum(counts)]))
        batch = Batch(
            positions=staged(positions),
            starts=starts,
            lengths=staged(ends),
            page_table=sinks[:, None].expand(n, -(-max(ends) // size)).contiguous(),
            kv_rows=staged(positions % size),
            read_rows=sinks,
            write_rows=sinks,
            decode=False,
            stores=Stores(sinks[:1], torch.ones_like(sinks[:1]), sinks[:1]) if n == 1 else None,
            longest_query=max(counts),
            longest=max(ends),
            bounds=tuple(zip(counts, ends, strict=True)),
        )
        tokens = torch.zeros(sum(counts), dtype=torch.int64, device=self.model.device)
        hidden = model.forward(tokens, batch, self.pages, self.rows)
        self._choose(hidden[starts[1:] - 1], places, batch.lengths, sinks, sinks.bool())

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Step:
        channel = self.channel
        if plan.copies:
            sources, targets = self._staging.tensor(plan.copies).T
            self.pages.copy(sources, targets)
        if plan.admits:
            channel.admit(plan.admits)
        for place, mask in plan.masks:
            channel.choices.allow(place, mask)
        if plan.table:
            channel.put_pages(plan.table)
        draws = []
        if plan.prefills:
            draw = self._prefill(plan.prefills)
            if draw is not None:
                draws.append(draw)
        if plan.decodes:
            draws.append(self._decode(plan.decodes))
        return Step(draws)

    def _prefill(self, chunks: list[Prefill]) -> Draw | None:
        channel, size, staged = self.channel, self._size, self._staging.tensor
        ids = [np.frombuffer(chunk.tokens, "<i4").astype(np.int64) for chunk in chunks]
        counts = [len(run) for run in ids]
        positions = np.concatenate([np.arange(c.start, c.start + n) for c, n in zip(chunks, counts, strict=True)])
        owners = np.repeat([chunk.place for chunk in chunks], counts)
        there = positions < np.repeat([chunk.write_from for chunk in chunks], counts)
        ends = [chunk.start + n for chunk, n in zip(chunks, counts, strict=True)]
        places = staged([chunk.place for chunk in chunks])
        at, owner = staged(positions), staged(owners)
        offset = at % size
        kv_rows = torch.where(staged(there), offset, channel.table[owner, at // size] * size + offset)
        stores = [(index, count, row) for index, chunk in enumerate(chunks) for count, row in chunk.stores]
        starts, lengths = staged(np.concatenate([[0], np.cumsum(counts)])), staged(ends)
        batch = Batch(
            positions=at,
            starts=starts,
            lengths=lengths,
            page_table=channel.table[places, : -(-max(ends) // size)],
            kv_rows=kv_rows,
            read_rows=staged([chunk.read_row for chunk in chunks]),
            write_rows=staged([chunk.write_row for chunk in chunks]),
            decode=False,
            stores=Stores(*staged(stores).T) if stores else None,
            longest_query=max(counts),
            longest=max(ends),
            bounds=tuple(zip(counts, ends, strict=True)),
        )
        hidden = self.model.forward(staged(np.concatenate(ids)), batch, self.pages, self.rows)
        channel.embedded += sum(counts)
        for chunk, end in zip(chunks, ends, strict=True):
            self._lengths[chunk.place] = end
        last = [index for index, chunk in enumerate(chunks) if chunk.sample]
        if not last:
            return None
        chosen = staged(last)
        outcome = self._choose(
            hidden[starts[1:][chosen] - 1],
            places[chosen],
            lengths[chosen],
            torch.zeros_like(chosen),
            torch.ones_like(chosen, dtype=torch.bool),
        )
        return self._fetch([(chunks[index].place, chunks[index].run) for index in last], outcome, decoded=False)

    def _decode(self, decodes: list[tuple[int, int]]) -> Draw:
        at = [place for place, _ in decodes]
        for place in at:
            self._lengths[place] += 1
        if self._graphs is not None:
            outcome = self._graphs.run(at)
        else:
            longest = max(self._lengths[place] for place in at)
            outcome = self._step(self._staging.tensor(at), -(-longest // self._size), longest)
        return self._fetch(decodes, outcome, decoded=True)

    def _step(self, places: Tensor, pages: int, longest: int) -> Outcome:
        """One token for each of `places` [n], whose contexts are `longest` tokens on `pages` pages, or less."""
        now = self.channel.begin(places, pages)
        batch = Batch(
            positions=now.positions,
            starts=torch.arange(len(places) + 1, device=places.device),
            lengths=now.lengths,
            page_table=now.page_table,
            kv_rows=now.kv_rows,
            read_rows=now.read_rows,
            write_rows=now.write_rows,
            decode=True,
            stores=None,
            longest_query=1,
            longest=longest,
        )
        hidden = self.model.forward(now.tokens, batch, self.pages, self.rows)
        return self._choose(hidden, places, now.lengths, now.following, now.live)

    def _choose(self, hidden: Tensor, places: Tensor, lengths: Tensor, at: Tensor, live: Tensor) -> Outcome:
        """Choose tokens after `hidden` [n, hidden], the outputs at the last of `lengths` tokens of the sequences in
        `places`, whose state stands `at` an index of their ring, and put them into the channel."""
        channel = self.channel
        chosen = channel.choices.choose(self.model.logits(hidden), places, lengths, live)
        return Outcome(channel.end(places, chosen.tokens, lengths, at, live), chosen)

    def _fetch(self, of: list[tuple[int, int]], outcome: Outcome, decoded: bool) -> Draw:
        """Start towards the host what the (place, run)s `of`, the first rows of `outcome`, want to know."""
        top = [self.channel.choices.reported(place) for place, _ in of]
        wanted, chosen = [outcome.told], outcome.chosen
        if any(count is not None for count in top):
            wanted += [chosen.logprobs, chosen.top_ids, chosen.top_logprobs]
        return Draw([run for _, run in of], top, self._staging.fetch(*wanted), decoded)
