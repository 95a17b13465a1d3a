"""The scheduler: continuous batching, chunked prefill, all-or-nothing admission.

It is a pure function of its state and the log (law 6): `tick` takes an entry and returns a plan, reads no clock, no
device and nothing unordered. Replaying a log into a fresh scheduler gives the same plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from tokenspeed.cache.lineage import Lineage, LineageBook
from tokenspeed.cache.prefix_cache import PrefixCache
from tokenspeed.cache.tree import NOTHING, Found, Tail
from tokenspeed.cache.trie import Ids, shared_length
from tokenspeed.scheduler.limits import Limits
from tokenspeed.scheduler.messages import (
    Allow,
    Cancel,
    Ended,
    EndReason,
    EngineEvent,
    Generate,
    MissReason,
    Progress,
    Stand,
    Started,
    Tokens,
)
from tokenspeed.scheduler.plan import Admit, LogEntry, Plan, Prefill, Sampled
from tokenspeed.scheduler.refusals import refusal
from tokenspeed.scheduler.stopping import StopStrings
from tokenspeed.scheduler.turns import Decoding, Prefilling, Queued, Running, State, Turn

PROGRESS_EVERY_S = 1.0


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

    def seen_in_lockstep(self, results: Sequence[Sampled]) -> list[tuple[str, int]]:
        """(turn, token) of the turns in lockstep that results hold a token for. Whoever calls `tick` with these results
        may add to its entry what these turns are then allowed."""
        seen = []
        for sampled in results:
            state = self.running.get(sampled.run)
            if isinstance(state, Decoding) and state.turn.lockstep and self._is_token(sampled):
                seen.append((state.turn.name, sampled.token))
        return seen

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
            elif isinstance(command, Stand):
                self._stand(command.on, 1)
                self._stand(command.off, -1)
            elif isinstance(command, Allow):
                self._allow(command)
            else:
                for name in command.turns:
                    self._release(name)
        decoding = self._room_to_decode()
        self._prefill()
        for state in decoding:
            state.enqueued += 1
            self._plan.decodes.append((state.place, state.run))
        self._tell_masks()
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
            if not self._is_token(sampled):
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

    def _is_token(self, sampled: Sampled) -> bool:
        return sampled.live and 0 <= sampled.token < self.limits.vocab_size

    # ------------------------------------------------------------------ commands

    def _generate(self, command: Generate) -> None:
        taken = command.turn in self._turns or command.turn in self.lineages
        parent = self.lineages.find(command.parent, command.tenant) if command.parent is not None else None
        rejected = refusal(command, parent, self.limits, taken, len(self.queue), bool(self._token_bytes))
        if rejected is not None:
            self._emit(rejected)
            return
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
            lockstep=command.lockstep,
            expected=0 if parent is None else min(keep, parent.cached),
            arrived_s=self._now_s,
            progress_s=self._now_s,
        )
        self.queue.append(turn)
        self._turns[turn.name] = Queued(turn)

    def _allow(self, command: Allow) -> None:
        state = self._turns.get(command.turn)
        if state is not None and state.turn.lockstep:
            state.turn.mask = command.mask

    def _cancel(self, command: Cancel) -> None:
        state = self._turns.get(command.turn)
        if state is not None:
            self._end(state, "cancelled", forget=command.keep == "nothing")

    def _release(self, name: str) -> None:
        lineage = self.lineages.named(name)
        if lineage is not None:
            parent = lineage.parent
            self.cache.leave(lineage)
            self.lineages.release(lineage)
            self._review(parent)

    def _stand(self, name: str | None, by: int) -> None:
        lineage = self.lineages.named(name) if name is not None else None
        if lineage is not None:
            lineage.heads += by
            self._review(lineage)

    def _review(self, lineage: Lineage | None) -> None:
        """Keep a lineage's states for a session to go on from, or no longer."""
        if lineage is not None and self.lineages.named(lineage.name) is lineage:
            self.cache.keep(lineage, lineage.leads_on)

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
            self._review(turn.lineage)
            self._review(turn.lineage.parent)
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
            if state.held:
                continue
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
        # Before the prefills under way go on: none may pass the point where a waiting turn parts from it.
        for turn in self.queue:
            self._wait_for_another(turn, self._find(turn))
        for state in list(self.running.values()):
            if isinstance(state, Prefilling) and state not in self._warmed and budget > 0:
                budget -= self._chunk(state, budget)
        for turn in list(self.queue):
            if not self._places or budget <= 0:
                return
            found = self._find(turn)
            if self._wait_for_another(turn, found):
                continue
            admitted = self._admit(turn, found)
            if admitted is None:
                return  # memory is short for this one: those behind it wait too
            self.queue.remove(turn)
            budget -= self._chunk(admitted, budget)

    def _find(self, turn: Turn) -> Found:
        return self.cache.find(turn.tenant, turn.all_ids()) if self.limits.prefix_cache else NOTHING

    def _wait_for_another(self, turn: Turn, found: Found) -> bool:
        """Whether a prefill under way computes a good part of this prompt; then it leaves a state where they part, and
        the turn takes up there. So N turns that begin alike have what they share computed once."""
        if not self.limits.prefix_cache:
            return False
        ids = turn.all_ids()
        if self.cache.pending(turn.tenant, ids) - found.state >= self.limits.junction_tokens:
            return True
        for state in self.running.values():
            if not isinstance(state, Prefilling) or state.turn.tenant != turn.tenant:
                continue
            shared = min(shared_length(ids, state.ids), len(ids) - 1)
            known = [mark for mark in state.marks if found.state + self.limits.junction_tokens <= mark <= shared]
            if known and shared - known[-1] < self.limits.junction_tokens:
                return True
            if shared <= state.done or shared - found.state < self.limits.junction_tokens:
                continue
            if self.cache.reserve(state.tail):
                state.marks = sorted([*state.marks, shared])
                state.junctions.add(shared)
                return True
        return False

    def _admit(self, turn: Turn, found: Found) -> Prefilling | None:
        ids = turn.all_ids()
        marks = [mark for mark in turn.marks if mark > found.state]
        opening = self.cache.open(turn.tenant, found, len(ids) + 1, self.limits.depth + 1, len(marks))
        if opening is None:
            return None
        if opening.copy is not None:
            self._plan.copies.append(opening.copy)
        self._runs += 1
        tail, place = opening.tail, self._places.pop()
        row = found.checkpoint.row if found.checkpoint is not None else 0
        junctions = {mark for mark in self._further_marks(ids, found, marks) if self.cache.reserve(tail)}
        marks = sorted({*marks, *junctions})
        turn.lineage.marks = [node for node in found.passed if node.end in turn.marks and node.end <= found.state]
        state = Prefilling(turn, self._runs, place, tail, ids, found.state, row, marks, junctions, found.kv)
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

    def _further_marks(self, ids: Ids, found: Found, marks: list[int]) -> list[int]:
        """Where more states are worth a row, if there is one: where this prompt parts from what is cached, and at
        intervals. The most useful first."""
        limits = self.limits
        last = len(ids)
        further = [found.kv] if found.kv < last and found.kv - found.state >= limits.junction_tokens else []
        first = (found.state // limits.checkpoint_interval + 1) * limits.checkpoint_interval
        further += range(first, last, limits.checkpoint_interval)
        return [mark for mark in further if mark not in marks]

    def _chunk(self, state: Prefilling, budget: int) -> int:
        """Plan the next tokens of a prompt; returns how many."""
        turn, tail, start = state.turn, state.tail, state.done
        end = min(len(state.ids), start + budget)
        stores: list[tuple[int, int]] = []
        while state.marks and state.marks[0] <= end:
            mark = state.marks.pop(0)
            node, row = self.cache.checkpoint(tail, state.ids[:mark], shared=mark in state.junctions)
            if mark in turn.marks:
                turn.lineage.marks.append(node)
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
            decoding = Decoding(turn, state.run, state.place, tail, end, state.told)
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

    def _tell_masks(self) -> None:
        """Last of all: a place may have gone to another turn since a mask came."""
        for state in self.running.values():
            if state.told != state.turn.mask:
                state.told = state.turn.mask
                self._plan.masks.append((state.place, state.told))

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
