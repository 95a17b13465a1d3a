"""Small talk: things said that need neither memory nor tools."""

from __future__ import annotations

from phrasing import CHAT, GREETINGS, TABLES
from values import Values


def greeting(values: Values) -> tuple[str, str]:
    """A greeting and its answer."""
    asked = values.pick(GREETINGS) + values.pick(("", "", ".", "!", ", how are you?"))
    return asked, values.pick(TABLES["welcomes"])


def chat(values: Values) -> tuple[str, str]:
    """A common phrase and its answer."""
    table = values.pick(CHAT)
    text = values.pick(table["asked"])
    if text[-1].isalpha():
        text += values.pick(("", ".", "!"))
    text = text if values.chance(0.85) else text.lower()
    return text, values.pick(table["answers"])


def remark(values: Values) -> tuple[str, str]:
    """Something said that nobody asks back, and its answer."""
    text = values.pick(
        (
            filler(values),
            f"I went to {values.of('city')} yesterday.",
            f"I bought a {values.of('thing')} last week.",
            f"We had {values.food()} for lunch.",
            f"I like {values.food()}.",
            f"I saw a {values.animal()} this morning.",
            f"It is {values.sky()} outside.",
            f"{values.of('person')} was late again.",
            f"I read a book about {values.of('thing')}.",
            f"The {values.of('thing')} was expensive.",
            f"I will be busy on {values.weekday()}.",
            f"My day was {values.pick(('long', 'short', 'fine'))}.",
        )
    )
    return text, values.pick(("Okay, noted.", "I see.", "Okay, noted."))


def open_question(values: Values) -> str:
    """Something that takes knowledge of the world or a writer's hand."""
    thing, person = values.of("thing"), values.of("person")
    return values.pick(
        (
            f"Tell me about {values.of('city')}.",
            f"Who was {person}?",
            f"What is the capital of {values.of('project')}?",
            "Write a poem.",
            f"Write a poem about a {thing}.",
            f"Explain {thing} to me.",
            "Why is the sky blue?",
            f"Tell me a story about {person}.",
            f"Write a {thing} for me.",
            f"How does a {thing} work?",
            f"What do you know about {thing}?",
            "What is the news today?",
            f"Give me ideas for a {thing}.",
            f"Who invented the {thing}?",
            f"Which {thing} is the best?",
            f"Write some code for a {thing}.",
            "Sing a song.",
            f"Is {person} famous?",
            f"Compare {thing} and {values.of('thing')}.",
            "Give me some advice.",
            f"Should I buy a {thing}?",
        )
    )


def filler(values: Values) -> str:
    """A sentence about nothing that is asked later."""
    person, thing, other = values.person(), values.thing(), values.thing()
    return values.pick(
        (
            f"{person} walked to the {thing}.",
            f"The {thing} was near the {other}.",
            f"Nobody saw the {thing} that day.",
            f"After {values.count()} hours {person} found a {thing}.",
            f"It was {values.sky()} in {values.city()}.",
            f"They talked about the {thing} and the {other}.",
            f"{person} and {values.person()} like {values.food()}.",
            f"We counted {values.integer()} pieces.",
        )
    )
