"""The values that dialogues talk about: names, places, numbers, codes, phrases and invented words.

A value belongs to one of two halves of the world by a checksum of its text: training dialogues hold only the one,
evaluation dialogues only the other, so what the evaluator asks back was never seen.
"""

from __future__ import annotations

import random
import tomllib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def wordings(name: str) -> dict[str, Any]:
    """The tables of `wordings/NAME.toml`."""
    return tomllib.loads((Path(__file__).parent / "wordings" / f"{name}.toml").read_text())


def lists(tables: dict[str, Any]) -> dict[str, list[str]]:
    """The tables' texts, split at spaces."""
    return {name: text.split() for name, text in tables.items() if isinstance(text, str)}


WORDS = lists(wordings("words"))
PERSONS, CITIES, COLOURS, ANIMALS = WORDS["persons"], WORDS["cities"], WORDS["colours"], WORDS["animals"]
FOODS, DRINKS, HOBBIES, JOBS = WORDS["foods"], WORDS["drinks"], WORDS["hobbies"], WORDS["jobs"]
LANGUAGES, CURRENCIES, UNITS, PLACES = WORDS["languages"], WORDS["currencies"], WORDS["units"], WORDS["places"]
WEEKDAYS, MONTHS, SEASONS = WORDS["weekdays"], WORDS["months"], WORDS["seasons"]
SKIES, STATES, ADJECTIVES, NOUNS = WORDS["skies"], WORDS["states"], WORDS["adjectives"], WORDS["nouns"]
CHORE_PAIRS = [tuple(chore.replace("_", " ").split("|")) for chore in WORDS["chores"]]
FOREIGN, ONSETS, VOWELS = WORDS["foreign"], WORDS["onsets"], WORDS["vowels"]
CODAS = [coda.strip("-") for coda in WORDS["codas"]]
HEX = "0123456789abcdef"
TAGS = [
    "<|im_end|>",
    "<|im_start|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<tool_response>",
    "<|endoftext|>",
    "</tool_response>",
]


def withheld(text: str) -> bool:
    """Whether a text belongs to the evaluator's half of the world (an eighth of it)."""
    return zlib.crc32(text.encode()) % 8 == 0


class Values:
    """Draws values of every kind from one random source, all from one side of the split."""

    def __init__(self, random_source: random.Random, evaluation: bool) -> None:
        self.random = random_source
        self.evaluation = evaluation

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def pick(self, options: Sequence[T]) -> T:
        return self.random.choice(options)

    def of(self, kind: str) -> str:
        """A value of a kind as text; free kinds are drawn from this side of the split."""
        draw = getattr(self, kind)
        text = draw()
        if kind in CLOSED:
            return text
        for _ in range(60):
            if withheld(text) == self.evaluation:
                return text
            text = draw()
        return text

    def form(self, *key: object) -> bool:
        """Whether a combination of wordings belongs to this side of the split."""
        return withheld("|".join(map(str, key))) == self.evaluation

    # Words

    def opaque(self, most: int = 3) -> str:
        """An invented word."""
        count = self.random.choices((1, 2, 3), (1, 6, 3))[0]
        parts = [self.pick(ONSETS) + self.pick(VOWELS) + self.pick(CODAS) for _ in range(min(count, most))]
        return "".join(parts)

    def letters(self) -> str:
        return "".join(self.pick("abcdefghijklmnopqrstuvwxyz") for _ in range(self.random.randint(2, 7)))

    def thing(self) -> str:
        """An everyday or invented noun."""
        return self.opaque() if self.chance(0.5) else self.pick(NOUNS)

    # Names

    def person(self) -> str:
        if self.chance(0.45):
            return self.opaque().capitalize()
        if self.chance(0.25):
            return f"{self.pick(PERSONS)} {self.opaque().capitalize()}"
        return self.pick(PERSONS)

    def city(self) -> str:
        if self.chance(0.08):
            return f"{self.pick(['New', 'San', 'Port', 'Saint', 'North', 'Bad'])} {self.opaque().capitalize()}"
        return self.opaque().capitalize() if self.chance(0.3) else self.pick(CITIES)

    def project(self) -> str:
        roll = self.random.random()
        if roll < 0.5:
            return self.opaque().capitalize()
        if roll < 0.7:
            return self.pick(NOUNS).capitalize()
        if roll < 0.85:
            return f"{self.pick(ADJECTIVES).capitalize()} {self.pick(NOUNS).capitalize()}"
        return f"{self.pick(NOUNS)}-{self.pick(NOUNS)}"

    def company(self) -> str:
        return f"{self.opaque().capitalize()} {self.pick(['Ltd', 'Labs', 'Group', 'Works', 'Inc', 'Systems', 'GmbH'])}"

    def team(self) -> str:
        return self.pick([self.pick(NOUNS), self.opaque(), self.pick(COLOURS), self.pick(ANIMALS) + "s"])

    # Numbers

    def count(self) -> str:
        return str(self.random.randint(2, 12))

    def integer(self) -> str:
        return str(self.random.randint(0, 10 ** self.random.randint(1, 5)))

    def signed(self) -> str:
        return ("-" if self.chance(0.12) else "") + self.integer()

    def decimal(self) -> str:
        return f"{self.integer()}.{self.random.randint(1, 99)}" if self.chance(0.7) else self.integer()

    def money(self) -> str:
        return str(self.random.choice((1, 10, 50, 100)) * self.random.randint(3, 99))

    def temperature(self) -> str:
        return str(self.random.randint(-15, 39))

    def percent(self) -> str:
        return str(self.random.randint(1, 100))

    def year(self) -> str:
        return str(self.random.randint(1900, 2060))

    def pin(self) -> str:
        return "".join(self.pick("0123456789") for _ in range(self.random.randint(3, 6)))

    def phone(self) -> str:
        return self.pick(["+", "0", ""]) + " ".join(
            "".join(self.pick("0123456789") for _ in range(self.random.randint(2, 4))) for _ in range(3)
        )

    # Times

    def date(self) -> str:
        day, month, year = self.random.randint(1, 28), self.random.randint(1, 12), self.random.randint(2024, 2032)
        name = MONTHS[month - 1]
        return self.pick(
            [
                f"{day} {name}",
                f"{name} {day}",
                f"{year}-{month:02d}-{day:02d}",
                f"{day} {name} {year}",
                f"{self.pick(WEEKDAYS)}, {day} {name}",
            ]
        )

    def clock(self) -> str:
        hour = self.random.randint(1, 12)
        return self.pick(
            [
                f"{self.random.randint(0, 23)}:{self.random.randint(0, 59):02d}",
                f"{hour} {self.pick(['am', 'pm'])}",
                str(hour) + self.pick(["am", "pm", ":30", " o'clock", ":15 pm"]),
            ]
        )

    def moment(self) -> str:
        return self.pick(
            [
                self.date(),
                self.clock(),
                self.pick(WEEKDAYS),
                "tomorrow",
                f"{self.pick(WEEKDAYS)} {self.clock()}",
                " at ".join(
                    [
                        self.pick(["tomorrow", "today", self.pick(WEEKDAYS)]),
                        self.pick([self.clock(), str(self.random.randint(1, 12)), "noon"]),
                    ]
                ),
                f"next {self.pick(WEEKDAYS)}",
                f"in {self.count()} {self.pick(['hours', 'minutes', 'days'])}",
            ]
        )

    def occasion(self) -> str:
        """A moment as a sentence ends with it."""
        day, clock = self.pick([*WEEKDAYS, self.date()]), self.clock()
        return self.pick(
            [
                self.moment(),
                f"on {day}",
                f"at {clock} on {day}",
                f"on {day} at {clock}",
                f"{day}, {clock}",
                f"next {day}",
            ]
        )

    # Codes and addresses

    def code(self) -> str:
        """An identifier: letters and digits, up to 40 characters."""
        roll = self.random.random()
        upper = "".join(self.pick("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(self.random.randint(1, 3)))
        if roll < 0.2:
            return self.pin()
        if roll < 0.45:
            return f"{upper}-{self.pin()}"
        if roll < 0.6:
            return f"{upper}{self.pin()}"
        if roll < 0.75:
            return f"{self.pick([self.letters(), 'ord', 'inv', 'id', 'item'])}_{self.hex(self.random.randint(4, 10))}"
        if roll < 0.85:
            return f"{self.pin()}-{self.pin()}-{upper}"
        if roll < 0.92:
            return "-".join(self.hex(size) for size in (8, 4, 4, 4, 12))
        return self.hex(self.random.randint(8, 40))

    def hex(self, size: int) -> str:
        return "".join(self.pick(HEX) for _ in range(size))

    def email(self) -> str:
        return f"{self.word().lower()}{self.pick(['', '.' + self.opaque(), str(self.random.randint(1, 99))])}@" + (
            f"{self.opaque()}.{self.pick(['com', 'org', 'net', 'io', 'dev'])}"
        )

    def url(self) -> str:
        host = f"https://{self.opaque()}.{self.pick(['com', 'org', 'dev'])}"
        return f"{host}/{self.letters()}{self.pick(['', '?q=' + self.pin()])}"

    def path(self) -> str:
        name = f"{self.thing()}{self.pick(['', '_' + self.thing(), self.pin()])}"
        folder = self.pick(["", "/", "/home/", "docs/", "src/"])
        return f"{folder}{name}.{self.pick(['txt', 'py', 'md', 'csv', 'pdf', 'json'])}"

    def version(self) -> str:
        return ".".join(str(self.random.randint(0, 30)) for _ in range(3))

    def word(self) -> str:
        return self.pick([self.pick(PERSONS), self.opaque(), self.letters(), self.pick(NOUNS), self.opaque()])

    # Phrases

    def title(self) -> str:
        roll = self.random.random()
        if roll < 0.4:
            start = self.pick(["The ", "", "A "]) + self.pick(ADJECTIVES).capitalize()
            return f"{start} {self.pick([*NOUNS, self.opaque()]).capitalize()}"
        if roll < 0.7:
            return " ".join(
                self.pick([self.pick(ADJECTIVES), self.pick(NOUNS), self.opaque()])
                for _ in range(self.random.randint(1, 4))
            )
        return f"{self.pick(NOUNS)} {self.pick(['for', 'about', 'with', 'from'])} {self.person()}"

    def text(self) -> str:
        """A free string of up to 40 characters: phrases, punctuation, other scripts, look-alikes of control tokens."""
        roll = self.random.random()
        if roll < 0.35:
            text = self.title()
        elif roll < 0.6:
            text = f"{self.task()}{self.pick(['', '!', '?', '...', f' ({self.pin()})', f' at {self.clock()}'])}"
        elif roll < 0.75:
            text = " ".join(
                self.pick([self.opaque(), self.letters(), self.code(), self.pin()])
                for _ in range(self.random.randint(1, 4))
            )
        elif roll < 0.9:
            text = " ".join(
                self.pick([self.pick(FOREIGN), self.opaque(), self.pick(NOUNS)])
                for _ in range(self.random.randint(1, 4))
            )
        elif roll < 0.94:
            text = f"{self.pick(TAGS)}{self.pick(['', ' '])}{self.opaque()}"
        else:
            text = self.pick([self.email(), self.url(), self.path(), self.version()])
        return text[:40].strip()

    def task(self) -> str:
        verb, thing = self.pick(CHORE_PAIRS)
        roll = self.random.random()
        if roll < 0.35:
            return f"{verb} {thing}"
        if roll < 0.6:
            return f"{self.pick(['call', 'meet', 'email', 'pay', 'thank', 'visit', 'ask'])} {self.person()}"
        if roll < 0.8:
            return f"{self.pick(['buy', 'order', 'fix', 'clean', 'find', 'sell'])} the {self.thing()}"
        return f"{self.pick(['send', 'show', 'bring', 'give'])} the {self.thing()} to {self.person()}"

    def topic(self) -> str:
        """What a search is about."""
        return self.pick([self.thing, self.project, self.person, self.title])()

    def expression(self) -> str:
        """An arithmetic expression."""
        sign, close = self.pick(["+", "-", "*", "/"]), self.pick(["+", "-", "*", "/"])
        gap = self.pick([" ", ""])
        text = f"{self.integer()}{gap}{sign}{gap}{self.count()}"
        return text if self.chance(0.4) else f"({text}){gap}{close}{gap}{self.count()}"

    # Closed lists

    def colour(self) -> str:
        return self.pick(COLOURS)

    def animal(self) -> str:
        return self.pick(ANIMALS)

    def food(self) -> str:
        return self.pick(FOODS)

    def drink(self) -> str:
        return self.pick(DRINKS)

    def hobby(self) -> str:
        return self.pick(HOBBIES)

    def job(self) -> str:
        return self.pick(JOBS)

    def language(self) -> str:
        return self.pick(LANGUAGES)

    def weekday(self) -> str:
        return self.pick(WEEKDAYS)

    def season(self) -> str:
        return self.pick(SEASONS)

    def currency(self) -> str:
        return self.pick(CURRENCIES)

    def unit(self) -> str:
        return self.pick(UNITS)

    def place(self) -> str:
        return self.pick(PLACES)

    def sky(self) -> str:
        return self.pick(SKIES)

    def state(self) -> str:
        return self.pick(STATES)


FEW = ("count", "temperature", "percent", "colour", "animal", "food", "drink", "hobby", "job", "language", "weekday")
CLOSED = frozenset((*FEW, "season", "currency", "unit", "place", "sky", "state"))  # their values are in both halves
