"""The agentic workload: a long first turn, then short ones, each behind all that was said before.

A target takes the turns, be it an engine in this process or a server. What is measured is checked first: that a prompt
is its history and what is new, that what was reused and computed add up to it, that as many tokens were generated as
asked for, that the first turn found nothing in the cache, and that a first turn asked twice is answered alike.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from tokenspeed.bench.driver import BenchError

REPEATED_TOKENS = 8
"""Of the answer to a first turn that is asked twice."""


@dataclass(frozen=True)
class Workload:
    """Conversations side by side. All counts are tokens.

    Attributes:
        context: in the first turn. turns: of a conversation. new: in each later turn. generate: in each answer.
        conversations: that run at a time, each taking its next turn as soon as the one before has ended.
        salt: of the contents; another salt, other contents.
    """

    context: int = 50_000
    turns: int = 12
    new: int = 800
    generate: int = 500
    conversations: int = 1
    salt: int = 0

    @property
    def longest(self) -> int:
        """Tokens of a conversation at its end."""
        return self.context + (self.turns - 1) * self.new + self.turns * self.generate


@dataclass(frozen=True)
class Ask:
    """A turn to take: `tokens` more of prompt, drawn from `seed`, and `generate` tokens of answer, greedy."""

    tokens: int
    generate: int
    seed: str


@dataclass(frozen=True)
class Answer:
    """A turn that was taken.

    Attributes:
        prompt, output: tokens, the history included. reused, computed: of the prompt; None where a server does not say.
        said: the answer itself, ids or text.
        arrivals: when each piece of it became known, by the caller's clock, in seconds since the turn was sent.
    """

    prompt: int
    output: int
    reused: int | None
    computed: int | None
    said: Sequence[int] | str
    arrivals: Sequence[float]

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0]

    @property
    def tokens_per_s(self) -> float | None:
        """After the first; None for fewer than two pieces."""
        span = self.arrivals[-1] - self.arrivals[0]
        return (self.output - 1) / span if span > 0 else None

    @property
    def itl_s(self) -> float | None:
        """Median over the gaps between pieces, which hold the same number of tokens on the average."""
        gaps = [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]
        return median(gaps) * len(gaps) / (self.output - 1) if gaps and self.output > 1 else None


Script = Generator[Ask, Answer, None]
"""A conversation: yields its turns one by one and is given their answers."""


class Target(Protocol):
    """What takes turns.

    Attributes:
        cache_at_start: in words, why nothing of a conversation is cached when it begins.
        shared: tokens that stand before the contents of every first turn, which the cache may hold.
    """

    cache_at_start: str
    shared: int

    def slack(self, generate: int) -> int:
        """Tokens by which a turn's prompt may differ from its history and what was asked for, behind an answer of
        `generate` tokens; 0 where ids are sent."""

    def converse(self, scripts: Sequence[Script]) -> None:
        """Take the turns of conversations side by side, to their ends. Raises BenchError where one fails."""


@dataclass(frozen=True)
class Row:
    """One turn. `new`: tokens of the prompt that were in no turn before."""

    conversation: int
    turn: int
    new: int
    answer: Answer

    def as_dict(self) -> dict[str, Any]:
        answer = self.answer
        return {
            "conversation": self.conversation,
            "turn": self.turn,
            "prompt": answer.prompt,
            "new": self.new,
            "reused": answer.reused,
            "computed": answer.computed,
            "output": answer.output,
            "ttft_s": answer.ttft_s,
            "itl_s": answer.itl_s,
            "tokens_per_s": answer.tokens_per_s,
        }


@dataclass(frozen=True)
class Report:
    """Figures of a workload whose turns passed the gate.

    Attributes:
        rows: by conversation, then by turn.
        seconds: from the first turn's sending to the last one's end.
    """

    workload: Workload
    cache_at_start: str
    rows: list[Row]
    seconds: float

    @property
    def hit_rate(self) -> float | None:
        """Σ reused / Σ prompt, the first turns included; None where the server does not say what it reused."""
        reused = [row.answer.reused for row in self.rows]
        told = [count for count in reused if count is not None]
        return sum(told) / self._prompt if len(told) == len(reused) else None

    @property
    def hit_rate_bound(self) -> float:
        """Σ (prompt − new) / Σ prompt: what exact reuse comes to."""
        return sum(row.answer.prompt - row.new for row in self.rows) / self._prompt

    @property
    def first_reused(self) -> int | None:
        """The most that a first turn reused."""
        counts = [row.answer.reused for row in self.rows if row.turn == 1]
        return max((count for count in counts if count is not None), default=None)

    @property
    def tokens_per_s(self) -> float | None:
        """Of one conversation while it generates, over all turns."""
        rates = [(row.answer.output - 1, row.answer.tokens_per_s) for row in self.rows]
        timed = [(count, rate) for count, rate in rates if rate is not None]
        return sum(count for count, _ in timed) / sum(count / rate for count, rate in timed) if timed else None

    @property
    def total_per_s(self) -> float:
        """Tokens generated in all conversations together, over the whole time, prefills included."""
        return sum(row.answer.output for row in self.rows) / self.seconds

    @property
    def _prompt(self) -> int:
        return sum(row.answer.prompt for row in self.rows)

    def of_turn(self, turn: int) -> list[Row]:
        """That turn of every conversation."""
        return [row for row in self.rows if row.turn == turn]

    def as_dict(self) -> dict[str, Any]:
        workload = self.workload
        return {
            "context": workload.context,
            "turns": workload.turns,
            "new": workload.new,
            "generate": workload.generate,
            "conversations": workload.conversations,
            "cache_at_start": self.cache_at_start,
            "first_turn_reused": self.first_reused,
            "hit_rate": self.hit_rate,
            "hit_rate_bound": self.hit_rate_bound,
            "tokens_per_s": self.tokens_per_s,
            "total_per_s": self.total_per_s,
            "seconds": self.seconds,
            "rows": [row.as_dict() for row in self.rows],
        }


def measure(target: Target, workload: Workload) -> Report:
    """Take the workload's turns. Raises BenchError where the gate fails; then there are no figures."""
    _ask_twice(target, workload)
    by_conversation: list[list[Row]] = [[] for _ in range(workload.conversations)]
    scripts = [_conversation(target, workload, number, rows) for number, rows in enumerate(by_conversation, 1)]
    begun = time.perf_counter()
    target.converse(scripts)
    seconds = time.perf_counter() - begun
    rows = [row for rows in by_conversation for row in rows]
    if len(rows) != workload.turns * workload.conversations:
        raise BenchError(f"{len(rows)} turns were taken of {workload.turns * workload.conversations}")
    return Report(workload, target.cache_at_start, rows, seconds)


def _ask_twice(target: Target, workload: Workload) -> None:
    """A first turn of other contents, whose answers must be the same."""
    said = []
    for _ in range(2):
        answers: list[Answer] = []
        target.converse([_first_turn(workload, answers)])
        said.append(answers[0].said)
    if said[0] != said[1]:
        raise BenchError(f"a first turn asked twice was answered {said[0]!r}, then {said[1]!r}")


def _first_turn(workload: Workload, answers: list[Answer]) -> Script:
    generate = min(REPEATED_TOKENS, workload.generate)
    answers.append((yield Ask(workload.context, generate, f"{workload.salt} asked twice")))


def _conversation(target: Target, workload: Workload, number: int, rows: list[Row]) -> Script:
    history = 0
    for turn in range(1, workload.turns + 1):
        tokens = workload.new if turn > 1 else workload.context
        answer = yield Ask(tokens, workload.generate, f"{workload.salt} {number} {turn}")
        row = Row(number, turn, answer.prompt - history, answer)
        problems = list(_problems(row, tokens, workload, target))
        if problems:
            which = f"turn {turn}" + (f" of conversation {number}" if workload.conversations > 1 else "")
            raise BenchError(f"{which}: {'; '.join(problems)}")
        rows.append(row)
        history = answer.prompt + answer.output


def _problems(row: Row, asked: int, workload: Workload, target: Target) -> Generator[str, None, None]:
    answer, slack = row.answer, target.slack(workload.generate)
    if abs(row.new - asked) > slack:
        history = answer.prompt - row.new
        yield (
            f"the prompt has {answer.prompt} tokens; its history of {history} and {asked} new ones make "
            f"{history + asked}, give or take {slack}"
        )
    if answer.reused is not None and answer.computed is not None and answer.reused + answer.computed != answer.prompt:
        yield f"{answer.reused} reused tokens and {answer.computed} computed ones are not the prompt's {answer.prompt}"
    if answer.output != workload.generate:
        yield f"{answer.output} tokens were generated; {workload.generate} were asked for"
    if row.turn == 1 and (answer.reused or 0) > target.shared:
        yield f"{answer.reused} tokens of the first turn came from the cache, which was to know nothing of it"
