"""The scheduler: continuous batching, chunked prefill, all-or-nothing admission.

It is a pure function of its state and the log (law 6): `tick` takes an entry and returns a plan, reads no clock, no
device and nothing unordered. Replaying a log into a fresh scheduler gives the same plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenspeed.cache.lineage import Lineage, LineageBook
from tokenspeed.cache.prefix_cache import PrefixCache
from tokenspeed.cache.tree import NOTHING, Tail
from tokenspeed.scheduler.messages import (
    Cancel,
    Ended,
    EndReason,
    EngineEvent,
    Generate,
    MissReason,
    Progress,
    Rejected,
    Started,
    Tokens,
)
from tokenspeed.scheduler.plan import Admit, LogEntry, Plan, Prefill, Sampled
from tokenspeed.scheduler.stopping import StopStrings
from tokenspeed.scheduler.turns import Decoding, Prefilling, Queued, Running, State, Turn

MAX_MARKS = 4
PROGRESS_EVERY_S = 1.0


@dataclass(frozen=True)
class Limits:
    """What the scheduler works within. `depth`: steps whose results are not read yet when a step is planned.
    `prefix_cache`: whether prompts reuse what is cached. `forced_tokens`: whether turns may force their output."""

    page_size: int
    pages: int
    rows: int
    max_sequences: int
    prefill_chunk: int
    depth: int
    max_context: int
    max_queue: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    prefix_cache: bool = True
    forced_tokens: bool = False

    def check(self) -> None:
        """Raise ValueError where one turn alone would not fit."""
        pages = -(-self.max_context // self.page_size) + 1
        if pages > self.pages - 1:
            raise ValueError(f"a context of {self.max_context} tokens needs {pages} pages; there are {self.pages - 1}")
        rows = self.depth + 1 + MAX_MARKS
        if rows > self.rows - 1:
            raise ValueError(f"one turn needs {rows} state rows; there are {self.rows - 1}")


class Scheduler:
    """See the module. `cache` and `lineages` are its state and may be looked at."""

    def __init__(self, limits: Limits, token_bytes: Sequence[bytes | None] = ()) -> None:
        """
        Args:
            token_bytes: what each id writes, for stop strings; without it they are refused.
        """
        limits.check()
        self._token_bytes = token_bytes
        self.limits = limits
        self.cache = PrefixCache(limits.pages, limits.rows, limits.page_size)
        self.lineages = LineageBook()
        self.queue: deque[Turn] = deque()
        self.running: dict[int, Running] = {}
        self.computed = 0
        self.reused = 0
        self.decoded = 0
        self._turns: dict[str, State] = {}
        self._warmed: list[Prefilling] = []  # computed whole by the last tick's step
        self._places = list(range(limits.max_sequences - 1, -1, -1))
        self._runs = 0
        self._now_s = 0.0
        self._plan = _empty_plan(0)

    @property
    def busy(self) -> bool:
        return bool(self._turns)

    def residency(self, names: list[str]) -> list[int]:
        """For each lineage, the length whose state is kept; 0 for unknown ones."""
        lineages = [self.lineages.named(name) for name in names]
        return [self.cache.kept(lineage.tenant, lineage.ids()) if lineage else 0 for lineage in lineages]

    def tick(self, entry: LogEntry) -> Plan:
        """The next step's plan."""
        self._now_s = entry.time_s
        self._plan = _empty_plan(entry.number)
        self.cache.turn_over()
        self._absorb(entry.results)
        for warmed in self._warmed:
            self._end(warmed, "warmed")
        self._warmed.clear()
        for command in entry.commands:
            if isinstance(command, Generate):
                self._generate(command)
            elif isinstance(command, Cancel):
                self._cancel(command)
            else:
                for name in command.turns:
                    self._release(name)
        decoding = self._room_to_decode()
        self._prefill()
        for state in decoding:
            state.enqueued += 1
            self._plan.decodes.append((state.place, state.run))
        self._report_progress()
        # Enough for each running turn to begin a page in the next tick without waiting for one.
        self.cache.make_room(len(self.running), 0)
        return self._plan

    # ------------------------------------------------------------------ results

    def _absorb(self, results: list[Sampled]) -> None:
        fresh: dict[int, Tokens] = {}
        for sampled in results:
            self.decoded += sampled.decoded and sampled.live
            state = self.running.get(sampled.run)
            if not isinstance(state, Decoding) or not sampled.live:
                continue
            turn = state.turn
            if not 0 <= sampled.token < self.limits.vocab_size:
                self._fail(state, "the model's output is not finite")
                continue
            state.seen += 1
            turn.outputs.append(sampled.token)
            turn.token_times_s.append(self._now_s)
            turn.stop_string = turn.stopping.after(sampled.token)
            event = fresh.setdefault(sampled.run, Tokens(turn.name, []))
            event.tokens.append(sampled.token)
            if sampled.logprob is not None:
                event.logprobs = [*(event.logprobs or []), sampled.logprob]
                event.top_logprobs = [*(event.top_logprobs or []), sampled.top or []]
        for run, event in fresh.items():
            state = self.running[run]
            turn = state.turn
            self._emit(event)
            if event.tokens[-1] in turn.stop_ids or turn.stop_string is not None:
                self._end(state, "stop")
            elif turn.length >= turn.limit:
                self._end(state, "context_length" if turn.by_context else "length")

    # ------------------------------------------------------------------ commands

    def _generate(self, command: Generate) -> None:
        rejected = self._refusal(command)
        if rejected is not None:
            self._emit(rejected)
            return
        parent = self.lineages.find(command.parent, command.tenant) if command.parent is not None else None
        keep = 0 if parent is None else parent.length if command.keep is None else command.keep
        own = np.frombuffer(command.tokens, "<i4").astype(np.int32)
        lineage = self.lineages.draft(command.turn, command.tenant, parent, keep, own)
        ids, params = lineage.ids(), command.sampling
        room = self.limits.max_context - len(ids)
        output = room if params.max_tokens is None else min(room, params.max_tokens)
        eos = () if params.ignore_eos else self.limits.eos_token_ids
        turn = Turn(
            name=command.turn,
            tenant=command.tenant,
            lineage=lineage,
            ids=ids,
            marks=command.marks,
            params=params,
            stop_ids=frozenset((*eos, *params.stop_token_ids)),
            limit=len(ids) + output,
            by_context=params.max_tokens is None or params.max_tokens > room,
            stopping=StopStrings(params.stop, self._token_bytes),
            sample=command.sample,
            expected=0 if parent is None else min(keep, parent.cached),
            arrived_s=self._now_s,
            progress_s=self._now_s,
        )
        self.queue.append(turn)
        self._turns[turn.name] = Queued(turn)

    def _refusal(self, command: Generate) -> Rejected | None:
        def bad(message: str) -> Rejected:
            return Rejected(command.turn, "bad_request", message)

        if command.turn in self._turns or command.turn in self.lineages:
            return bad(f"turn {command.turn!r} exists already")
        length, keep = 0, 0
        if command.parent is not None:
            parent = self.lineages.find(command.parent, command.tenant)
            if parent is None:
                return Rejected(command.turn, "unknown_lineage", f"no lineage {command.parent!r}")
            length = parent.length
            keep = length if command.keep is None else command.keep
        elif command.keep is not None:
            return bad("keep needs a parent")
        if not 0 <= keep <= length:
            return bad(f"keep is {keep}; the parent has {length} ids")
        if len(command.tokens) % 4:
            return bad(f"tokens holds {len(command.tokens)} bytes, which is no number of int32 ids")
        own = np.frombuffer(command.tokens, "<i4")
        if len(own) and not 0 <= own.min() <= own.max() < self.limits.vocab_size:
            return bad(f"token ids must be in 0 … {self.limits.vocab_size - 1}; got {own.min()} … {own.max()}")
        total = keep + len(own)
        if total == 0:
            return bad("the prompt is empty")
        if total >= self.limits.max_context:
            return Rejected(
                command.turn,
                "context_length_exceeded",
                f"maximum context length is {self.limits.max_context} tokens, but the prompt has {total} and at least "
                "one more is needed for the output",
            )
        marks = command.marks
        if len(marks) > MAX_MARKS or list(marks) != sorted(set(marks)) or not all(0 < mark <= total for mark in marks):
            return bad(f"marks must be at most {MAX_MARKS} ascending lengths in 1 … {total}; got {list(marks)}")
        try:
            command.sampling.check()
        except ValueError as error:
            return bad(str(error))
        if command.sampling.stop and not self._token_bytes:
            return bad("stop strings need the model's tokenizer, which its directory does not have")
        forced = command.sampling.forced_token_ids
        if forced and not self.limits.forced_tokens:
            return bad("forced_token_ids are not allowed by this engine's configuration")
        for name, tokens in (("forced_token_ids", forced), ("logit_bias", [t for t, _ in command.sampling.logit_bias])):
            if not all(0 <= token < self.limits.vocab_size for token in tokens):
                return bad(f"{name} must be of ids in 0 … {self.limits.vocab_size - 1}")
        if len(self.queue) >= self.limits.max_queue:
            return Rejected(command.turn, "queue_full", f"{len(self.queue)} turns are waiting; no more are taken")
        return None

    def _cancel(self, command: Cancel) -> None:
        state = self._turns.get(command.turn)
        if state is not None:
            self._end(state, "cancelled", forget=command.keep == "nothing")

    def _release(self, name: str) -> None:
        lineage = self.lineages.named(name)
        if lineage is not None:
            self.cache.leave(lineage)
            self.lineages.release(lineage)

    # ------------------------------------------------------------------ endings

    def _end(self, state: State, reason: EndReason, forget: bool = False) -> None:
        turn = state.turn
        if forget:
            self._vacate(state)
            self.lineages.release(turn.lineage)
        else:
            turn.lineage.own = np.concatenate([turn.lineage.own, np.asarray(turn.outputs, np.int32)])
            self._vacate(state, turn.lineage)
            self.lineages.publish(turn.lineage)
        self._close_turn(turn, reason)

    def _fail(self, state: Running, message: str) -> None:
        """End a turn whose state cannot be trusted: nothing of it is sealed."""
        self.running.pop(state.run)
        self._places.append(state.place)
        self.cache.abandon(state.tail)
        self.lineages.release(state.turn.lineage)
        self._close_turn(state.turn, "error", message)

    def _close_turn(self, turn: Turn, reason: EndReason, message: str | None = None) -> None:
        del self._turns[turn.name]
        usage, timings = turn.usage(self.limits.max_context), turn.timings(self._now_s)
        self._emit(Ended(turn.name, reason, usage, timings, message, turn.stop_string))

    def _vacate(self, state: State, lineage: Lineage | None = None) -> None:
        """Leave the queue, or the place. What was computed stays in the cache; `lineage` comes to stand on it."""
        if isinstance(state, Queued):
            self.queue.remove(state.turn)
            return
        self.running.pop(state.run)
        self._places.append(state.place)
        length, row = state.sealed()
        self.cache.close(state.tail, state.turn.all_ids()[:length], row, lineage)

    def _preempt(self, state: Running) -> None:
        """Send a running turn back to the head of the queue. Its ids are kept, and so is, until evicted, its cache;
        tokens in flight are dropped and will be drawn again with the same noise."""
        self._vacate(state)
        self._turns[state.turn.name] = Queued(state.turn)
        self.queue.appendleft(state.turn)

    # ------------------------------------------------------------------ planning

    def _room_to_decode(self) -> list[Decoding]:
        """The decoding turns that take a step, each with a page for its next position."""
        ready: list[Decoding] = []
        waiting: list[Running] = []
        for state in list(self.running.values()):
            if not isinstance(state, Decoding) or state.next_position >= state.turn.limit - 1:
                continue  # the token at limit - 1 is sampled by the step before it and never computed
            known = len(state.tail.pages)
            if self.cache.grow(state.tail, state.next_position + 1):
                self._tell_pages(state.place, state.tail, known)
                ready.append(state)
            else:
                waiting.append(state)
        self.cache.make_room(len(waiting), 0)
        while self.cache.pages.free_soon < len(waiting) and len(self.running) > 1:
            last = next(reversed(self.running.values()))
            ready = [state for state in ready if state is not last]
            waiting = [state for state in waiting if state is not last]
            self._preempt(last)
            self.cache.make_room(len(waiting), 0)
        return ready

    def _prefill(self) -> None:
        budget = self.limits.prefill_chunk
        for state in list(self.running.values()):
            if isinstance(state, Prefilling) and state not in self._warmed and budget > 0:
                budget -= self._chunk(state, budget)
        while self.queue and self._places and budget > 0:
            admitted = self._admit(self.queue[0])
            if admitted is None:
                return
            self.queue.popleft()
            budget -= self._chunk(admitted, budget)

    def _admit(self, turn: Turn) -> Prefilling | None:
        ids = turn.all_ids()
        found = self.cache.find(turn.tenant, ids) if self.limits.prefix_cache else NOTHING
        marks = [mark for mark in turn.marks if mark > found.state]
        opening = self.cache.open(turn.tenant, found, len(ids) + 1, self.limits.depth + 1, len(marks))
        if opening is None:
            return None
        if opening.copy is not None:
            self._plan.copies.append(opening.copy)
        self._runs += 1
        tail, place = opening.tail, self._places.pop()
        row = found.checkpoint.row if found.checkpoint is not None else 0
        state = Prefilling(turn, self._runs, place, tail, ids, found.state, row, marks, found.kv)
        self.running[state.run] = self._turns[turn.name] = state
        stop_ids = sorted(turn.stop_ids)
        self._plan.admits.append(Admit(place, state.run, list(tail.ring), turn.limit, stop_ids, turn.choice()))
        table = self.cache.page_table(tail)
        self._plan.table.extend((place, index, page) for index, page in enumerate(table))
        self.reused += found.state
        if turn.admitted_s is None:
            turn.admitted_s = self._now_s
            turn.reused = found.state
            missed: MissReason = "evicted" if self.limits.prefix_cache else "off"
            reason = missed if found.state < turn.expected else None
            self._emit(Started(turn.name, len(ids), found.state, len(ids) - found.state, reason))
        return state

    def _chunk(self, state: Prefilling, budget: int) -> int:
        """Plan the next tokens of a prompt; returns how many."""
        turn, tail, start = state.turn, state.tail, state.done
        end = min(len(state.ids), start + budget)
        stores: list[tuple[int, int]] = []
        while state.marks and state.marks[0] <= end:
            mark = state.marks.pop(0)
            row = self.cache.checkpoint(tail, state.ids[:mark])
            if row is not None:
                stores.append((mark - start, row))
        last = end == len(state.ids)
        tokens = state.ids[start:end].astype("<i4").tobytes()
        self._plan.prefills.append(
            Prefill(state.place, state.run, start, tokens, state.write_from, state.row, tail.ring[0], stores, last)
        )
        state.done, state.row = end, tail.ring[0]
        self._count_computed(turn, end - start)
        if last and not turn.sample:
            self._warmed.append(state)
        elif last:
            self.cache.settle(tail)
            decoding = Decoding(turn, state.run, state.place, tail, end)
            self.running[state.run] = self._turns[turn.name] = decoding
        return end - start

    def _count_computed(self, turn: Turn, tokens: int) -> None:
        self.computed += tokens
        first = min(tokens, len(turn.ids) - turn.reused - turn.computed)
        turn.computed += first
        turn.recomputed += tokens - first

    def _tell_pages(self, place: int, tail: Tail, known: int) -> None:
        first = tail.start // self.limits.page_size
        for offset in range(known, len(tail.pages)):
            self._plan.table.append((place, first + offset, tail.pages[offset]))

    # ------------------------------------------------------------------ events

    def _report_progress(self) -> None:
        for position, turn in enumerate(self.queue):
            self._progress(turn, Progress(turn.name, "queued", 0, len(turn.ids), position))
        for state in self.running.values():
            if isinstance(state, Prefilling):
                turn = state.turn
                self._progress(turn, Progress(turn.name, "prefill", state.done, len(state.ids)))

    def _progress(self, turn: Turn, progress: Progress) -> None:
        if self._now_s - turn.progress_s >= PROGRESS_EVERY_S:
            turn.progress_s = self._now_s
            self._emit(progress)

    def _emit(self, event: EngineEvent) -> None:
        self._plan.events.append(event)


def _empty_plan(number: int) -> Plan:
    return Plan(number, copies=[], admits=[], table=[], prefills=[], decodes=[], events=[])
