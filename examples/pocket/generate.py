"""Writes agent dialogues: facts told and asked back, tools chosen and called, results quoted, and small talk.

python examples/pocket/generate.py --seed 1 --count 2        # print two dialogues as training sees them
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

import talk
from conversation import Conversation
from errands import Errands
from memory import Memory
from phrasing import SYSTEMS, TABLES, THOUGHTFUL
from render import RECALLED, Message, Piece, render
from tools import offer
from values import Values


class Dialogue:
    """One dialogue in the making; `messages`, `schemas` and `system` are its outcome."""

    def __init__(self, seed: int, evaluation: bool = False, most_tools: int = 8, least_tools: int = 0) -> None:
        """A dialogue of a seed; with `evaluation` from the side of the split that training never draws."""
        self.values = values = Values(random.Random(seed), evaluation)
        self.conversation = Conversation(values)
        self.memory = Memory(self.conversation)
        count = values.random.randint(max(1, least_tools), most_tools)
        if not least_tools and values.chance(0.2):
            count = 0
        self.errands = Errands(self.conversation, self.memory, offer(values, count) if count else [])
        self.conversation.thoughtful = values.chance(0.1)
        self.system = self.draw_system()

    @property
    def messages(self) -> list[Message]:
        return self.conversation.messages

    @property
    def schemas(self) -> list[dict]:
        return [tool.schema for tool in self.errands.tools]

    def draw_system(self) -> str | None:
        """The system text: manners, sometimes a fact, sometimes the wish that the assistant thinks first."""
        values = self.values
        if not self.conversation.thoughtful and values.chance(0.4):
            return None
        parts = [values.pick(SYSTEMS)] if values.chance(0.8) else []
        if values.chance(0.25):
            fact = self.memory.new_fact()
            if fact:
                told = values.pick(fact.attribute.told[:1])
                if told.startswith(("The ", "{e}")):
                    self.memory.add(fact)
                    parts.append(told.format(v=fact.value, e=fact.entity) + ".")
        if self.conversation.thoughtful:
            parts.append(values.pick(THOUGHTFUL))
        values.random.shuffle(parts)
        return " ".join(parts) or None

    def exchange(self, words: tuple[str, str]) -> None:
        """A sentence of the user and the answer."""
        self.conversation.user(words[0])
        self.conversation.say(words[1])

    def chat(self) -> None:
        self.exchange(talk.chat(self.values))

    def remark(self) -> None:
        self.exchange(talk.remark(self.values))

    def ask_openly(self) -> None:
        """A question about the world, where no tool could answer it."""
        groups = {tool.spec.group for tool in self.errands.tools}
        if groups & {"web", "text", "notes", "people", "place", "files"}:
            return
        known = "I only know what you tell me"
        answer = f"{known} and what my tools return." if self.errands.tools else f"{known}."
        self.exchange((talk.open_question(self.values), answer))

    def echo(self) -> None:
        """Words to be said back."""
        text = self.values.of("text")
        self.conversation.user(self.values.pick(TABLES["echoes"]).format(t=text))
        self.conversation.say(Piece(text, RECALLED))

    def acts(self) -> list[tuple[Callable[[], None], float]]:
        """What can happen next, with weights."""
        memory, errands = self.memory, self.errands
        acts: list[tuple[Callable[[], None], float]] = [
            (memory.tell, 6 if len(memory.facts) < 12 else 1),
            (memory.recall, 6),
            (lambda: memory.unknown(bool(errands.tools)), 2.0),
            (memory.change, 0.8),
            (memory.summary, 0.4),
            (self.chat, 1.6),
            (errands.abilities, 0.25),
            (self.echo, 0.5),
            (self.ask_openly, 0.6),
            (self.remark, 0.4),
            (memory.read, 0.5),
            (errands.refuse, 0.7),
        ]
        if errands.tools:
            acts += [
                (errands.one, 7),
                (errands.parallel, 1.6),
                (errands.sequence, 1.2),
                (errands.again, 1.2),
                (errands.tell_and_ask, 0.9),
                (errands.missing, 1.0),
            ]
        return acts

    def extend(self) -> None:
        """One more exchange (or none, where the drawn one does not fit)."""
        if not self.messages and self.values.chance(0.35):
            return self.exchange(talk.greeting(self.values))
        acts, weights = zip(*self.acts(), strict=True)
        self.values.random.choices(acts, weights)[0]()


def main() -> None:
    parser = argparse.ArgumentParser(description="Print dialogues as training sees them.")
    parser.add_argument("--seed", type=int, default=0, help="of the first dialogue")
    parser.add_argument("--count", type=int, default=1, help="dialogues")
    parser.add_argument("--exchanges", type=int, default=12, help="exchanges a dialogue")
    parser.add_argument("--evaluation", action="store_true", help="from the evaluator's side of the split")
    arguments = parser.parse_args()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        dialogue = Dialogue(seed, arguments.evaluation)
        for _ in range(arguments.exchanges):
            dialogue.extend()
        print("".join(segment.text for segment in render(dialogue.schemas, dialogue.system, dialogue.messages)))


if __name__ == "__main__":
    main()
