"""Two clients on one server: random turns, forks, rewinds, regenerated answers, cancels and updates, over connections
that drop and come back. What is checked after every step are the laws that a client can see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

import tokenspeed.pocket
from tokenspeed import Engine, SamplingParams
from tokenspeed.client import Client, ConnectionFailed, Session, SessionError, Turn

TEXTS = st.sampled_from(["Hello!", "My name is Ines.", "What is my name?", "x", "Größe: 5 µm, 価格 🙂", "\n"])
INSTRUCTIONS = st.sampled_from(["You are a helpful assistant.", "Be brief.", ""])
LIMITS = st.integers(1, 6)


@dataclass
class Line:
    """What a session is known to stand on.

    Attributes:
        path: the turns up to the head.
        instructions: of the turns to come.
        under: the instructions that each turn was taken under; all lines share it.
    """

    id: str
    path: list[Turn]
    instructions: str
    under: dict[str, str]

    @property
    def head(self) -> Turn | None:
        return self.path[-1] if self.path else None

    @property
    def updated(self) -> bool:
        """Whether the next prompt begins otherwise than the head's."""
        return self.head is not None and self.under[self.head.id] != self.instructions


def ids(turn: Turn | None) -> list[int]:
    if turn is None:
        return []
    assert turn.prompt_token_ids is not None
    assert turn.output_token_ids is not None
    return turn.prompt_token_ids + turn.output_token_ids


class TwoClients(RuleBasedStateMachine):
    url: ClassVar[str]
    recompute: ClassVar[Callable[[list[int], int], list[int]]]
    checked: ClassVar[set[tuple[int, ...]]] = set()

    lines = Bundle("lines")
    which = st.integers(0, 1)

    @initialize(target=lines, instructions=INSTRUCTIONS)
    def connect(self, instructions: str) -> Line:
        """There is a past from the beginning, for most of what follows is about one."""
        encodings: Any = ("msgpack", "json")
        self.clients = [Client(self.url, encoding=encoding) for encoding in encodings]
        self.open: list[Line] = []
        self.under: dict[str, str] = {}
        line = self.open_session(which=0, instructions=instructions)
        for text in ("My name is Ines.", "x"):
            self.turn(which=0, line=line, text=text, limit=1, streamed=False)
        return line

    def teardown(self) -> None:
        for line in getattr(self, "open", []):
            self.session(0, line).close()
        for client in getattr(self, "clients", []):
            client.close()

    def session(self, which: int, line: Line) -> Session:
        return self.clients[which].session(id=line.id)

    def add(self, session: Session, path: list[Turn], instructions: str) -> Line:
        line = Line(session.id, list(path), instructions, self.under)
        self.open.append(line)
        return line

    def took(self, line: Line, turn: Turn, before: Turn | None) -> None:
        """The laws of a turn that followed `before`."""
        usage = turn.usage
        assert turn.prompt_token_ids is not None
        assert usage.prompt == len(turn.prompt_token_ids) == usage.reused.total + usage.computed
        assert usage.output == len(turn.output_token_ids or [])
        assert turn.parent == (before.id if before else None)
        if not line.updated:
            past = ids(before)
            assert turn.prompt_token_ids[: len(past)] == past, "ids are append-only"
            assert usage.computed <= usage.prompt - len(past) + 1
        expected = ids(turn)[len(turn.prompt_token_ids) :]
        key = tuple(ids(turn))
        if key not in self.checked:
            assert type(self).recompute(turn.prompt_token_ids, len(expected)) == expected
            self.checked.add(key)
        self.under[turn.id] = line.instructions

    @rule(target=lines, which=which, instructions=INSTRUCTIONS)
    def open_session(self, which: int, instructions: str) -> Line:
        session = self.clients[which].session(instructions=instructions, temperature=0, max_tokens=6)
        return self.add(session, [], instructions)

    @rule(which=which, line=lines, text=TEXTS, limit=LIMITS, streamed=st.booleans())
    def turn(self, which: int, line: Line, text: str, limit: int, streamed: bool) -> None:
        session, before = self.session(which, line), line.head
        if streamed:
            with session.turn(text, stream=True, token_ids=True, max_tokens=limit, expect_head=before or "start") as s:
                pieces = "".join(delta.text for delta in s if delta.channel == "text")
            turn = s.result()
            assert pieces == turn.text
        else:
            turn = session.turn(text, token_ids=True, max_tokens=limit)
        self.took(line, turn, before)
        line.path.append(turn)

    @rule(which=which, line=lines, text=TEXTS)
    def dropped_turn(self, which: int, line: Line, text: str) -> None:
        """The connection goes while the turn runs; the turn is finished and kept."""
        client, before = self.clients[which], line.head
        stream = self.session(which, line).turn(text, stream=True, token_ids=True)
        client.close()
        with pytest.raises(ConnectionFailed):
            stream.result()
        session = self.session(which, line)
        while session.get().state == "running":
            pass
        turn = session.turns(token_ids=True)[-1]
        assert turn.id == stream.id
        self.took(line, turn, before)
        line.path.append(turn)

    @rule(which=which, line=lines, text=TEXTS, keep=st.sampled_from(["partial", "nothing"]), wait=st.integers(0, 3))
    def cancelled_turn(self, which: int, line: Line, text: str, keep: Any, wait: int) -> None:
        """Cancelled from the other client's connection, after a few deltas."""
        before = line.head
        session = self.session(which, line)
        stream = session.turn(text, stream=True, token_ids=True, max_tokens=40, ignore_eos=True)
        for _ in range(wait):
            next(stream, None)
        self.session(1 - which, line).cancel(keep)
        turn = stream.result()
        if turn.status == "cancelled" and keep == "nothing":
            assert session.get().head == (before.id if before else None)
            return
        assert session.get().head == turn.id
        self.took(line, turn, before)
        line.path.append(turn)

    @rule(target=lines, which=which, line=lines, back=st.integers(0, 3))
    def fork(self, which: int, line: Line, back: int) -> Any:
        if not line.path:
            return multiple()
        path = line.path[: max(1, len(line.path) - back)]
        return self.add(self.session(which, line).fork(at=path[-1]), path, line.instructions)

    @rule(target=lines, which=which, line=lines, text=TEXTS, n=st.integers(1, 2))
    def turns_after(self, which: int, line: Line, text: str, n: int) -> Any:
        if line.head is None:
            return multiple()
        branches = self.clients[which].turn(line.head, text, n=n, token_ids=True, max_tokens=3)
        made = []
        for branch in branches:
            other = self.add(branch.session, line.path, self.under[line.head.id])
            self.took(other, branch.turn, line.head)
            other.path.append(branch.turn)
            made.append(other)
        assert len({tuple(ids(branch.turn)) for branch in branches}) == 1, "greedy answers to one question differ"
        return multiple(*made)

    @rule(which=which, line=lines, back=st.integers(0, 3))
    def rewind(self, which: int, line: Line, back: int) -> None:
        path = line.path[: max(0, len(line.path) - back)]
        self.session(which, line).rewind(path[-1] if path else "start")
        line.path = path

    @rule(which=which, line=lines)
    def regenerate(self, which: int, line: Line) -> None:
        if line.head is None or line.updated:
            return
        old, before = line.head, line.path[-2] if len(line.path) > 1 else None
        turn = self.session(which, line).regenerate(token_ids=True)
        assert turn.prompt_token_ids == old.prompt_token_ids
        assert ids(turn)[: len(ids(old))] == ids(old)[: len(ids(turn))], "the same prompt, greedily, says the same"
        self.took(line, turn, before)
        line.path[-1] = turn

    @rule(which=which, line=lines, instructions=INSTRUCTIONS)
    def update(self, which: int, line: Line, instructions: str) -> None:
        session = self.session(which, line)
        changes = line.instructions != instructions
        assert (session.get().instructions or "") == line.instructions
        lost = session.update(instructions=instructions)
        assert lost == 0 or changes
        line.instructions = instructions

    @rule(which=which)
    def reconnect(self, which: int) -> None:
        self.clients[which].close()

    @rule(which=which, line=consumes(lines))
    def close(self, which: int, line: Line) -> None:
        self.session(which, line).close()
        self.open.remove(line)
        with pytest.raises(SessionError, match="session_not_found"):
            self.session(1 - which, line)

    @invariant()
    def sessions_stand_where_they_should(self) -> None:
        """Whatever was done to one session, no other has moved."""
        if not hasattr(self, "clients"):
            return
        records = {record.id: record for record in self.clients[0].sessions()}
        for line in self.open:
            record = records[line.id]
            assert record.head == (line.head.id if line.head else None)
            assert (record.instructions or "") == line.instructions
            assert (record.state, record.running) == ("idle", None)
            listed = self.session(1, line).turns(token_ids=True)
            assert [turn.id for turn in listed] == [turn.id for turn in line.path]
            assert [ids(turn) for turn in listed] == [ids(turn) for turn in line.path]


@pytest.fixture(scope="module")
def recompute() -> Callable[[list[int], int], list[int]]:
    engine = Engine(tokenspeed.pocket.DIRECTORY, dtype="float64", prefix_cache=False, cache_bytes=64 << 20)

    def compute(prompt: list[int], count: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=max(1, count), ignore_eos=True)
        return list(engine.generate(prompt, params).token_ids[:count])

    return compute


def test_two_clients(live: Any, recompute: Callable[[list[int], int], list[int]]) -> None:
    TwoClients.url = live.url
    TwoClients.recompute = staticmethod(recompute)
    run_state_machine_as_test(
        TwoClients,
        settings=settings(
            max_examples=12, stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
