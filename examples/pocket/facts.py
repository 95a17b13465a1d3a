"""Facts that users tell and ask back: what they are called, how they are told, asked and answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from values import ANIMALS, Values, wordings


@dataclass(frozen=True)
class Attribute:
    """Something that can be told. `{v}` is the value, `{e}` the entity it belongs to (if it has one)."""

    key: str
    kind: str
    told: tuple[str, ...]
    asked: tuple[str, ...]
    answer: tuple[str, ...]
    unknown: tuple[str, ...]
    phrase: str = ""  # how requests can mention the value instead of saying it: "my city"


def attribute_of(entry: dict[str, Any], noun: str = "", kind: str = "") -> Attribute:
    """An `Attribute` of its table; forms of words take a noun and a kind."""

    def words(name: str) -> tuple[str, ...]:
        return tuple(text.replace("NOUN", noun) for text in entry[name])

    return Attribute(
        entry["key"].replace("NOUN", noun),
        kind or entry["kind"],
        words("told"),
        words("asked"),
        words("answer"),
        words("unknown"),
        entry.get("phrase", "").replace("NOUN", noun),
    )


def nouns(table: str) -> list[tuple[str, str]]:
    """(noun, kind) pairs of a table whose nouns may hold spaces."""
    pairs: list[tuple[str, str]] = []
    words: list[str] = []
    for word in table.split():
        if ":" in word:
            last, kind = word.split(":")
            pairs.append((" ".join([*words, last]), kind))
            words = []
        else:
            words.append(word)
    return pairs


TABLES = wordings("facts")
SPECIAL = tuple(attribute_of(entry) for entry in TABLES["special"])
LIVES = tuple(attribute_of({**entry, "key": "{e}: " + entry["key"]}) for entry in TABLES["life"])
OWN_NOUNS, COMMON_NOUNS = nouns(TABLES["own_nouns"]), nouns(TABLES["common_nouns"])
POSSESSED_NOUNS, THING_NOUNS = nouns(TABLES["possessed_nouns"]), nouns(TABLES["things_nouns"])
RELATIONS, CONTESTED = frozenset(TABLES["relations"].split()), frozenset(TABLES["contested"])


def formed(form: str, noun: str, kind: str) -> Attribute:
    """An attribute about a noun, in the wordings of a form."""
    return attribute_of(TABLES["form"][form], noun, kind)


@dataclass
class Fact:
    """A value told for an attribute."""

    attribute: Attribute
    entity: str
    value: str

    @property
    def key(self) -> str:
        """What the fact is about; two facts of one dialogue never share it."""
        return (
            self.attribute.key.replace("{e}", self.entity.lower())
            .removeprefix("my ")
            .removeprefix("the ")
            .replace("favorite", "favourite")
            .replace("color", "colour")
        )


def draw_attribute(values: Values, entities: list[str], objects: list[str]) -> tuple[Attribute, str]:
    """An attribute and its entity (empty if it has none); entities are persons and projects of this dialogue."""
    roll = values.random.random()
    if roll < 0.32:
        return values.pick(SPECIAL), ""
    if roll < 0.52:
        noun, kind = values.pick(OWN_NOUNS)
        return formed("relation" if noun in RELATIONS else "own", noun, "person" if noun in RELATIONS else kind), ""
    if roll < 0.62:
        return formed("common", *values.pick(COMMON_NOUNS)), ""
    if roll < 0.71:
        return values.pick(LIVES), values.pick(entities)
    if roll < 0.78:
        return formed("possessed", *values.pick(POSSESSED_NOUNS)), values.pick(entities)
    if roll < 0.84:
        return formed("possessed", *values.pick(THING_NOUNS)), values.pick(objects)
    if roll < 0.9:
        return formed("whereabouts", "", "place"), values.pick(objects).lower()
    if roll < 0.94:
        return formed("pet", values.pick(ANIMALS), "person"), ""
    noun = values.opaque()
    kind = values.pick(("code", "integer", "thing", "person", "project", "title", "text"))
    form = values.pick(("own", "common", "possessed"))
    return formed(form, noun, kind), values.pick(entities + objects) if form == "possessed" else ""
