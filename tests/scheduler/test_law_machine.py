"""A state machine that drives the scheduler on a device made of labels.

The device does not compute: a KV row at position p holds a digest of the ids 0 … p, a state row a digest of the ids it
has seen, and every read is checked against what a sequence must find there. So a page with two writers, a row aged by
one token, a wrong copy or a page handed out too early shows at the first read, whatever led to it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import hypothesis.strategies as st
import msgspec
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenspeed.config.sampling import SamplingParams
from tokenspeed.scheduler.limits import Limits
from tokenspeed.scheduler.messages import Allow, Cancel, Ended, Generate, Rejected, Release, Stand, Started, Tokens
from tokenspeed.scheduler.plan import LogEntry, Plan, Sampled
from tokenspeed.scheduler.scheduler import Scheduler
from tokenspeed.scheduler.turns import Decoding

VOCABULARY = 5
STOP = 4


def digest(ids: tuple[int, ...]) -> int:
    return hash(("state", ids))


EVERYTHING = (1 << VOCABULARY) - 1


def next_token(ids: tuple[int, ...], mask: int = EVERYTHING) -> int:
    """The token after some ids, of those in `mask` (a bit for each)."""
    allowed = [token for token in range(VOCABULARY) if mask >> token & 1]
    return allowed[digest(ids) % len(allowed)]


def guided(name: str, outputs: int) -> int:
    """What the token number `outputs` of a turn in lockstep may be; now and then anything."""
    return hash((name, outputs)) % EVERYTHING + 1


def packed(mask: int) -> bytes:
    return b"" if mask == EVERYTHING else mask.to_bytes(4, "little")


@dataclass
class Place:
    run: int = 0
    ids: tuple[int, ...] = ()
    token: int = 0
    ring: list[int] = field(default_factory=list)
    at: int = 0
    finished: bool = True
    stop_ids: list[int] = field(default_factory=list)
    limit: int = 0
    mask: int = EVERYTHING
    table: dict[int, int] = field(default_factory=dict)


class LabelDevice:
    """Executes plans on labels."""

    def __init__(self, limits: Limits) -> None:
        self.size = limits.page_size
        self.kv = [[0] * limits.page_size for _ in range(limits.pages)]
        self.rows = [0] * limits.rows
        self.places = [Place() for _ in range(limits.max_sequences)]
        self.embedded = 0

    def launch(self, plan: Plan) -> list[Sampled]:
        for source, target in plan.copies:
            self.kv[target] = list(self.kv[source])
        for admit in plan.admits:
            self.places[admit.place] = Place(
                admit.run, ring=admit.ring, finished=False, stop_ids=admit.stop_ids, limit=admit.limit
            )
        for index, mask in plan.masks:
            self.places[index].mask = int.from_bytes(mask, "little") or EVERYTHING
        for index, page_index, page in plan.table:
            self.places[index].table[page_index] = page
        results = []
        states = [self._read(chunk.read_row, chunk.start) for chunk in plan.prefills]
        for chunk, history in zip(plan.prefills, states, strict=True):
            place = self.places[chunk.place]
            new = tuple(np.frombuffer(chunk.tokens, "<i4").tolist())
            if chunk.start:
                known = place.ids or tuple(self.expected[chunk.run][: chunk.start])
                assert history == digest(known), "the state read is not the one of these ids"
            else:
                known = ()
            place.ids = known + new
            self.embedded += len(new)
            for position in range(chunk.start, len(place.ids)):
                if position >= chunk.write_from:
                    self._write(place, position)
            for count, row in chunk.stores:
                assert row > 0
                self.rows[row] = digest(place.ids[: chunk.start + count])
            assert chunk.write_row > 0
            self.rows[chunk.write_row] = digest(place.ids)
            self._attend(place)
            if chunk.sample:
                results.append(self._sample(place, False))
        for index, run in plan.decodes:
            place = self.places[index]
            assert place.run == run
            if place.finished:
                results.append(Sampled(run, 0, False, True))
                continue
            assert self.rows[place.ring[place.at]] == digest(place.ids), "the ring's row is not the last state"
            place.ids += (place.token,)
            self.embedded += 1
            self._write(place, len(place.ids) - 1)
            place.at = (place.at + 1) % len(place.ring)
            self.rows[place.ring[place.at]] = digest(place.ids)
            self._attend(place)
            results.append(self._sample(place, True))
        return results

    def _read(self, row: int, start: int) -> int:
        assert (row == 0) == (start == 0)
        return self.rows[row]

    def _write(self, place: Place, position: int) -> None:
        page = place.table[position // self.size]
        assert page > 0
        self.kv[page][position % self.size] = digest(place.ids[: position + 1])

    def _attend(self, place: Place) -> None:
        for position in range(len(place.ids)):
            page = place.table[position // self.size]
            assert self.kv[page][position % self.size] == digest(place.ids[: position + 1]), "foreign or stale KV"

    def _sample(self, place: Place, decoded: bool) -> Sampled:
        place.token = next_token(place.ids, place.mask)
        place.finished = place.token in place.stop_ids or len(place.ids) + 1 >= place.limit
        return Sampled(place.run, place.token, True, decoded)

    expected: dict[int, list[int]]


class LawMachine(RuleBasedStateMachine):
    """Random turns, forks, cancels, releases and evictions over two tenants, with pools where all of it is tight."""

    @initialize(
        depth=st.integers(0, 2),
        size=st.sampled_from([1, 3, 4]),
        chunk=st.integers(1, 9),
        pages=st.integers(0, 12),
        rows=st.integers(0, 8),
        sequences=st.integers(1, 4),
        junction=st.sampled_from([1, 2, 5, 1000]),
        interval=st.sampled_from([2, 5, 1000]),
    )
    def start(
        self, depth: int, size: int, chunk: int, pages: int, rows: int, sequences: int, junction: int, interval: int
    ) -> None:
        context = 24
        self.limits = Limits(
            page_size=size,
            pages=-(-context // size) + 2 + pages,
            rows=depth + 6 + rows,
            max_sequences=sequences,
            prefill_chunk=chunk,
            depth=depth,
            max_context=context,
            max_queue=6,
            vocab_size=VOCABULARY,
            eos_token_ids=(STOP,),
            junction_tokens=junction,
            checkpoint_interval=interval,
        )
        self.scheduler = Scheduler(self.limits)
        self.device = LabelDevice(self.limits)
        self.device.expected = {}
        self.flight: deque[list[Sampled]] = deque()
        self.commands: list[Generate | Cancel | Release | Stand | Allow] = []
        self.log: list[tuple[LogEntry, bytes]] = []
        self.names = 0
        self.prompts: dict[str, tuple[str, list[int]]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.started: dict[str, Started] = {}
        self.ended: dict[str, tuple[str, list[int]]] = {}
        self.standing: list[str] = []
        self.lockstep: set[str] = set()

    @rule(
        tenant=st.sampled_from("ab"),
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        parent=st.integers(0, 99),
        keep=st.one_of(st.none(), st.integers(0, 24)),
        marks=st.sets(st.integers(1, 24), max_size=3),
        most=st.integers(1, 12),
        stop=st.booleans(),
        sample=st.integers(0, 5),
        alike=st.integers(1, 3),
        lockstep=st.booleans(),
    )
    def turn(self, tenant, tokens, parent, keep, marks, most, stop, sample, alike, lockstep) -> None:  # type: ignore[no-untyped-def]
        candidates = [name for name, (owner, _) in self.ended.items() if owner == tenant]
        above = candidates[parent % len(candidates)] if candidates and parent > 10 else None
        base = self.ended[above][1] if above is not None else []
        cut = None if keep is None or above is None else min(keep, len(base))
        prompt = (base if cut is None else base[:cut]) + tokens
        for branch in range(alike):  # turns that begin alike, as forks do
            self.names += 1
            name = f"t{self.names}"
            own = tokens + [branch] * (alike > 1)
            command = Generate(
                name,
                tenant,
                np.asarray(own, "<i4").tobytes(),
                SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=not stop),
                above,
                cut,
                tuple(sorted(mark for mark in marks if mark <= len(prompt))),
                sample > 0,
                lockstep,
            )
            self.prompts[name] = (tenant, prompt + [branch] * (alike > 1))
            self.outputs[name] = []
            self.commands.append(command)
            if lockstep:
                self.lockstep.add(name)
                self.commands.append(Allow(name, packed(guided(name, 0))))

    @rule(which=st.integers(0, 99), off=st.integers(0, 99))
    def stand(self, which: int, off: int) -> None:
        """Sessions' heads, sometimes of lineages that are gone."""
        names = [*self.prompts, None]
        held = [*self.standing, None]
        on, gone = names[which % len(names)], held[off % len(held)]
        if gone is not None:
            self.standing.remove(gone)
        if on in self.ended:
            self.standing.append(on)
            self.commands.append(Stand(on, gone))
        else:
            self.commands.append(Stand(None, gone))

    @precondition(lambda self: self.outputs)
    @rule(which=st.integers(0, 99), keep=st.sampled_from(["partial", "nothing"]))
    def cancel(self, which: int, keep: str) -> None:
        names = list(self.outputs)
        self.commands.append(Cancel(names[which % len(names)], keep))  # type: ignore[arg-type]

    @precondition(lambda self: self.ended)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        names = list(self.ended)
        name = names[which % len(names)]
        if not any(isinstance(command, Generate) and command.parent == name for command in self.commands):
            del self.ended[name]
            self.standing = [other for other in self.standing if other != name]
            self.commands.append(Release([name]))

    @rule()
    def evict(self) -> None:
        self.scheduler.cache.evict_all()
        # Not a command: a replay would not see it.
        self.log_broken = True

    @rule(times=st.integers(1, 8))
    def run(self, times: int) -> None:
        for _ in range(times):
            self.tick()

    def tick(self) -> None:
        results = self.flight.popleft() if len(self.flight) > self.limits.depth else []
        for name, _ in self.scheduler.seen_in_lockstep(results):
            self.commands.append(Allow(name, packed(guided(name, len(self.outputs[name]) + 1))))
        entry = LogEntry(len(self.log), float(len(self.log)), self.commands, results)
        self.commands = []
        plan = self.scheduler.tick(entry)
        self.check_steps()
        self.log.append((entry, msgspec.msgpack.encode(plan)))
        for state in self.scheduler.running.values():
            self.device.expected[state.run] = state.turn.all_ids().tolist()
        self.flight.append(self.device.launch(plan))
        for event in plan.events:
            self.take(event)
        self.scheduler.cache.check()
        assert len(self.scheduler._places) + len(self.scheduler.running) == self.limits.max_sequences

    def check_steps(self) -> None:
        """A turn in lockstep has one token on its way at most."""
        for state in self.scheduler.running.values():
            if isinstance(state, Decoding):
                on_their_way = state.enqueued + 1 - state.seen
                assert on_their_way <= (1 if state.turn.lockstep else self.limits.depth + 1)

    def take(self, event) -> None:  # type: ignore[no-untyped-def]
        if isinstance(event, Tokens):
            self.outputs[event.turn].extend(event.tokens)
            tenant, prompt = self.prompts[event.turn]
            ids = prompt + self.outputs[event.turn]
            for position in range(len(prompt), len(ids)):
                lockstep = event.turn in self.lockstep
                mask = guided(event.turn, position - len(prompt)) if lockstep else EVERYTHING
                assert ids[position] == next_token(tuple(ids[:position]), mask)
        elif isinstance(event, Started):
            assert event.prompt == event.reused + event.to_compute == len(self.prompts[event.turn][1])
            self.started[event.turn] = event
        elif isinstance(event, Rejected):
            _, prompt = self.prompts.pop(event.turn)
            del self.outputs[event.turn]
            if event.code == "context_length_exceeded":
                assert len(prompt) >= self.limits.max_context
            else:
                assert event.code == "queue_full"
        elif isinstance(event, Ended):
            tenant, prompt = self.prompts[event.turn]
            output = self.outputs.pop(event.turn)
            assert event.usage.output == len(output)
            assert event.reason != "error"
            if event.reason != "cancelled":
                assert event.usage.reused + event.usage.computed == event.usage.prompt
                assert event.reason != "stop" or output[-1] == STOP
                assert (event.reason == "warmed") == (not output)
            if self.scheduler.lineages.find(event.turn, tenant) is not None:
                self.ended[event.turn] = (tenant, prompt + output)

    @invariant()
    def lineages_are_exact(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for name, (tenant, ids) in self.ended.items():
            lineage = self.scheduler.lineages.find(name, tenant)
            assert lineage is not None
            assert lineage.ids().tolist() == ids
            assert self.scheduler.lineages.find(name, "ab".replace(tenant, "")) is None

    @invariant()
    def needs_are_counted(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        needed: Counter[int] = Counter()
        wanted: Counter[int] = Counter()
        for lineage in self.scheduler.lineages._lineages.values():
            if lineage.node is not None and not lineage.node.removed:
                needed.update(id(node) for node in lineage.node.path())
            assert bool(lineage.kept) == (lineage.leads_on and bool(lineage.stands()))
            wanted.update(id(node) for node in lineage.kept)
        for node in self.scheduler.cache.nodes:
            assert node.needed == needed[id(node)]
            assert node.wanted == wanted[id(node)]

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.commands and not self.scheduler.busy:
                break
            self.tick()
        assert not self.scheduler.busy, "a turn never ended"
        for _ in range(self.limits.depth + 1):
            self.tick()
        assert self.device.embedded == self.scheduler.computed + self.scheduler.decoded
        assert not self.scheduler.cache.tails
        self.tick()
        self.scheduler.cache.evict_all()
        self.scheduler.cache.turn_over()
        assert self.scheduler.cache.pages.free == self.limits.pages - 1
        assert self.scheduler.cache.rows.free == self.limits.rows - 1
        assert not self.scheduler.cache.nodes
        if not getattr(self, "log_broken", False):
            again = Scheduler(self.limits)
            for entry, plan in self.log:
                copied = msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=LogEntry)
                assert msgspec.msgpack.encode(again.tick(copied)) == plan


TestLaws = LawMachine.TestCase
TestLaws.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
