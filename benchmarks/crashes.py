"""Kill a server at random moments under load, start it again on what it left, and look whether anything is missing.

    python benchmarks/crashes.py --points 100 --output benchmarks/results/crashes.json

Several clients open sessions, take greedy turns, fork, rewind, update and close. After each kill -9 the server is
started on the same data directory, and every session is compared with what its client was told, by token ids: what was
acknowledged is there; beyond it there may be what the one command had asked for that was under way when the server
died, whole, and nothing else. Then the sessions go on. Some kills come while the server starts. In the end every
conversation is taken again on a server that nothing interrupts, which must give the same ids.

It shows what a process that is killed loses (nothing), not what a machine without power would: for that each commit is
synced, which the journal checks when it opens its file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from types import TracebackType
from typing import Self

from tokenspeed import Client
from tokenspeed.client import Session, SessionError, Turn

CLIENTS = 4
LONGEST = 8
"""Turns of a conversation; then it is closed and another begins."""
SERVE = ("serve", "--port", "0", "--threads", "1", "--dtype", "float64", "--max-context", "1024", "--cache", "96MiB")
START_S = 60.0


class Failure(Exception):
    """Something that was acknowledged is not there, or something is there that nobody asked for."""


class Server:
    """One life of a server."""

    def __init__(self, *options: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tokenspeed", *SERVE, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ready(self) -> str:
        """Its URL, once it answers."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.search(r"http://[\w.:]+:\d+", line)
        if found is None:
            raise Failure(f"the server did not start: {self._process.communicate(timeout=START_S)}")
        return found[0]

    def end(self, number: int) -> None:
        self._process.send_signal(number)
        self._process.communicate(timeout=START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.end(signal.SIGKILL)


@dataclass(frozen=True)
class Told:
    """A turn as its client was told of it."""

    id: str
    given: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]

    @classmethod
    def of(cls, turn: Turn, given: str) -> Told:
        assert turn.prompt_token_ids is not None
        assert turn.output_token_ids is not None
        return cls(turn.id, given, tuple(turn.prompt_token_ids), tuple(turn.output_token_ids))


@dataclass
class Conversation:
    """A session as its client was told of it.

    Attributes:
        forks: sessions, with the last turn of each.
        doing: the command under way: `open`, `turn`, `fork`, `rewind`, `update`, `close`.
        given: the input under way.
        mark: of the session's label; `next_mark` is the one under way.
    """

    name: str
    session: str | None = None
    turns: list[Told] = field(default_factory=list)
    forks: dict[str, str] = field(default_factory=dict)
    doing: str | None = None
    given: str = ""
    mark: str = "0"
    next_mark: str = "0"


@dataclass
class Counts:
    turns: int = 0
    commands: int = 0
    unacknowledged_turns_kept: int = 0


class Agent:
    """One client and its conversations, one after the other."""

    def __init__(self, number: int, dice: random.Random, counts: Counts) -> None:
        self._number = number
        self._dice = dice
        self._counts = counts
        self._begun = 0
        self.now = self._next()
        self.finished: list[Conversation] = []

    def _next(self) -> Conversation:
        self._begun += 1
        return Conversation(f"{self._number}.{self._begun}")

    def work(self, url: str) -> None:
        """Until the server is gone."""
        with Client(url) as client:
            try:
                while True:
                    self._step(client)
                    self._counts.commands += 1
            except ConnectionError:
                pass  # killed; what was under way is in `doing`
            except SessionError as error:
                if error.code not in ("engine_restarted", "journal_failed"):
                    raise

    def _step(self, client: Client) -> None:
        talk = self.now
        if talk.session is None:
            talk.doing = "open"
            labels = {"name": talk.name, "mark": talk.mark}
            instructions = f"You are the assistant of client {talk.name}."
            opened = client.session(instructions=instructions, labels=labels, temperature=0, max_tokens=10)
            talk.session, talk.doing = opened.id, None
            return
        session = client.session(id=talk.session)
        if len(talk.turns) == LONGEST:
            self._close(client, session, talk)
            return
        talk.doing = self._dice.choices(["turn", "fork", "rewind", "update"], [12, 1, 1, 1])[0]
        if talk.doing == "turn":
            talk.given = question(talk.name, len(talk.turns))
            told = Told.of(session.turn(talk.given, token_ids=True), talk.given)
            talk.turns.append(told)
            self._counts.turns += 1
        elif talk.doing == "fork" and talk.turns:
            fork = session.fork()
            talk.forks[fork.id] = talk.turns[-1].id
        elif talk.doing == "rewind" and len(talk.turns) > 1:
            session.rewind(talk.turns[-2].id)
            talk.turns.pop()
        elif talk.doing == "update":
            talk.next_mark = str(int(talk.mark) + 1)
            session.update(labels={"name": talk.name, "mark": talk.next_mark})
            talk.mark = talk.next_mark
        talk.doing = None

    def _close(self, client: Client, session: Session, talk: Conversation) -> None:
        while talk.forks:
            fork, _ = next(iter(talk.forks.items()))
            talk.doing = "close fork"
            client.session(id=fork).close()
            del talk.forks[fork]
            talk.doing = None
        talk.doing = "close"
        session.close()
        self._closed()

    def _closed(self) -> None:
        self.finished.append(self.now)
        self.now = self._next()

    def check(self, client: Client, there: dict[str, dict[str, str]]) -> None:
        """Compare with a server that was started again. `there`: its sessions' labels; those that are known are taken
        out. What was under way and happened is as good as told from now on.

        Raises:
            Failure: something is missing, or too much.
        """
        talk, doing = self.now, self.now.doing
        talk.doing = None
        for fork, head in list(talk.forks.items()):
            if there.pop(fork, None) is not None:
                found = client.session(id=fork).turns()[-1].id
                if found != head:
                    raise Failure(f"fork {fork} of {talk.name} stands at {found} instead of {head}")
            elif doing == "close fork":
                del talk.forks[fork]
                doing = None
            else:
                raise Failure(f"fork {fork} of {talk.name} is gone")
        unknown = [name for name, labels in there.items() if labels["name"] == talk.name and name != talk.session]
        if unknown and doing in ("open", "fork") and len(unknown) == 1:
            for name in unknown:
                del there[name]
                client.session(id=name).close()
        if talk.session is None:
            return
        if talk.session not in there:
            if doing != "close":
                raise Failure(f"session {talk.session} of {talk.name} is gone")
            self._closed()
            return
        self._check_session(client.session(id=talk.session), there.pop(talk.session), talk, doing)

    def _check_session(self, session: Session, labels: dict[str, str], talk: Conversation, doing: str | None) -> None:
        if labels["mark"] != talk.mark and (doing, labels["mark"]) != ("update", talk.next_mark):
            raise Failure(f"{talk.name} has mark {labels['mark']} instead of {talk.mark}")
        talk.mark = labels["mark"]
        found = session.turns(token_ids=True)
        if doing == "rewind" and len(found) == len(talk.turns) - 1:
            talk.turns.pop()
        elif doing == "turn" and len(found) == len(talk.turns) + 1:
            if (found[-1].status, found[-1].parent) == ("cancelled", talk.turns[-1].id if talk.turns else None):
                session.rewind(found[-1].parent)  # a server that ends in order keeps what it had
                found.pop()
            else:
                talk.turns.append(Told.of(found[-1], talk.given))
                self._counts.unacknowledged_turns_kept += 1
        kept = [Told.of(turn, told.given) for turn, told in zip(found, talk.turns, strict=False)]
        if len(found) != len(talk.turns) or kept != talk.turns:
            raise Failure(
                f"{talk.name} has turns {[turn.id for turn in found]} instead of {[told.id for told in talk.turns]}, "
                f"or other ids in them ({doing} was under way)"
            )


def question(name: str, number: int) -> str:
    return f"My number is {name}, and this is question {number}. What is my number?"


def wait_for(counts: Counts, commands: int) -> None:
    """Until so many were answered, however fast the machine is; or for a while."""
    patience = time.monotonic() + START_S
    while counts.commands < commands and time.monotonic() < patience:
        time.sleep(0.001)


def survive(agents: list[Agent], counts: Counts, points: int, dice: random.Random, home: Path, number: int) -> int:
    """Kill (with the signal `number`) so often, and check each time. Returns how many kills came during a start."""
    early = 0
    for point in range(points + 1):
        with Server("--data-dir", str(home)) as server:
            if number == signal.SIGKILL and 0 < point < points and dice.random() < 0.15:
                time.sleep(dice.uniform(0, 4))
                server.end(number)
                early += 1
                continue
            url = server.ready()
            with Client(url) as client:
                there = {record.id: record.labels for record in client.sessions()}
                for agent in agents:
                    agent.check(client, there)
                if there:
                    raise Failure(f"sessions that nobody asked for: {there}")
            if point == points:
                break
            with ThreadPoolExecutor(len(agents)) as pool:
                working = [pool.submit(agent.work, url) for agent in agents]
                wait_for(counts, counts.commands + dice.randrange(50))
                time.sleep(dice.uniform(0, 0.1))
                server.end(number)
            for work in working:
                work.result()
        print(f"\r{point + 1} of {points}", end="", file=sys.stderr, flush=True)
    return early


def compare(conversations: list[Conversation]) -> int:
    """Take every conversation again, without interruption. Returns how many turns were compared."""
    compared = 0
    with Server("--no-journal") as server, Client(server.ready()) as client:
        for talk in conversations:
            instructions = f"You are the assistant of client {talk.name}."
            with client.session(instructions=instructions, temperature=0, max_tokens=10) as session:
                for told in talk.turns:
                    again = Told.of(session.turn(told.given, token_ids=True), told.given)
                    if (again.prompt, again.output) != (told.prompt, told.output):
                        raise Failure(f"turn {told.id} of {talk.name} has other ids than without interruption")
                    compared += 1
    return compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=100, help="how often to kill the server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--orderly", action="store_true", help="SIGTERM in place of SIGKILL")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    options = parser.parse_args()
    dice, counts = random.Random(options.seed), Counts()
    agents = [Agent(number, random.Random(f"{options.seed} {number}"), counts) for number in range(CLIENTS)]
    number = signal.SIGTERM if options.orderly else signal.SIGKILL
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        try:
            early = survive(agents, counts, options.points, dice, Path(home) / "data", number)
            conversations = [talk for agent in agents for talk in (*agent.finished, agent.now)]
            compared = compare(conversations)
        except Failure as failure:
            sys.exit(f"\n{failure}")
    about = {
        "command": f"python benchmarks/crashes.py --points {options.points} --seed {options.seed}",
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()} CPU",
        "workload": f"{CLIENTS} clients: greedy turns of the model that ships (float64), forks, rewinds, updates",
        "signal": number.name,
        "points_survived": options.points,
        "of_them_while_starting": early,
        "turns_acknowledged": counts.turns,
        "turns_lost": 0,
        "commands_acknowledged": counts.commands,
        "turns_kept_but_not_yet_acknowledged": counts.unacknowledged_turns_kept,
        "turns_compared_with_an_uninterrupted_run": compared,
        "wall_s": round(time.monotonic() - begun),
    }
    print("\r" + json.dumps(about, indent=1))
    if options.output:
        options.output.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
