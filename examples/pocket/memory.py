"""What users tell and ask back: exchanges about facts."""

from __future__ import annotations

from conversation import Conversation
from facts import CONTESTED, Fact, draw_attribute
from phrasing import CONFIRMED, GREETINGS, REMARKS, TABLES, capital, one_of, question, small
from render import RECALLED, Piece
from talk import filler


class Memory:
    """The facts of one conversation and the exchanges about them."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation, self.values = conversation, conversation.values
        values = self.values
        self.facts: dict[str, Fact] = {}
        self.stale: list[str] = []
        self.entities = [values.of("person") for _ in range(values.random.randint(2, 4))]
        self.objects = [values.of("project") for _ in range(2)] + [values.of("thing") for _ in range(2)]

    def known(self, kind: str) -> list[Fact]:
        """Facts of a kind that a request can mention instead of their value."""
        return [fact for fact in self.facts.values() if fact.attribute.kind == kind and fact.attribute.phrase]

    def add(self, fact: Fact) -> None:
        self.facts[fact.key] = fact

    def new_fact(self) -> Fact | None:
        """A fact that is not told yet and whose value cannot be taken for another's, or nothing."""
        attribute, entity = draw_attribute(self.values, self.entities, self.objects)
        fact = Fact(attribute, entity, self.values.of(attribute.kind))
        if fact.key in self.facts or self.resembles(fact.value, self.stale):
            return None
        return fact

    def resembles(self, value: str, others: list[str]) -> bool:
        """Whether a value contains, or is contained in, one that was told or one of `others`."""
        told = [fact.value for fact in self.facts.values()] + others
        return any(value.lower() in text.lower() or text.lower() in value.lower() for text in told)

    def statement(self, fact: Fact) -> str:
        """One of the wordings in which the fact can be told."""
        return self.values.pick(fact.attribute.told).format(v=fact.value, e=fact.entity)

    def told(self, facts: list[Fact]) -> str:
        """Facts in one message; the combination of wordings is from this side of the split."""
        values = self.values
        for _ in range(30):
            forms = [values.pick(fact.attribute.told) for fact in facts]
            lead = values.pick(REMARKS) if values.chance(0.25) and len(facts) == 1 else ""
            joint = values.pick((" and ", ". ", ", and ", ". ", "; ", "\n"))
            if values.form(*forms, lead, joint):
                break
        forms = [small(form) if number and values.chance(0.7) else form for number, form in enumerate(forms)]
        parts = [form.format(v=fact.value, e=fact.entity) for form, fact in zip(forms, facts, strict=True)]
        if lead:
            return lead + (small(parts[0]) if values.chance(0.6) else parts[0])
        apart = joint in (". ", "\n")
        return joint.join(capital(part) if apart or not number else part for number, part in enumerate(parts))

    def recalled(self, fact: Fact, answer: str | None = None) -> list[Piece]:
        """The sentence that says a fact back, its value labelled."""
        before, after = (answer or self.values.pick(fact.attribute.answer)).split("{v}")
        start, end = before.format(e=fact.entity), after.format(e=fact.entity)
        return [Piece(capital(start)), Piece(fact.value, RECALLED), Piece(end)]

    def repeated(self, fact: Fact) -> list[Piece]:
        """The same, as the end of a sentence."""
        first, value, rest = self.recalled(fact)
        start = first.text if fact.entity and first.text.startswith(fact.entity) else small(first.text)
        return [Piece(start), value, rest]

    def tell(self) -> None:
        """One to three facts, acknowledged."""
        values = self.values
        new: list[Fact] = []
        for _ in range(values.random.choice((1, 1, 1, 2, 2, 3))):
            fact = self.new_fact()
            if fact:
                new.append(fact)
                self.add(fact)
        if not new:
            return
        text = self.told(new) + values.pick((".", ".", ".", "", "!"))
        if values.chance(0.15):
            text = f"{values.pick(GREETINGS).rstrip('!')}{values.pick(('! ', ', ', '. '))}{text}"
        self.conversation.user(text)
        if values.chance(0.25):
            return self.conversation.say(values.pick(TABLES["noted"]))
        before, after = values.pick(CONFIRMED).split("{s}")
        pieces: list[Piece | str] = [before]
        for number, fact in enumerate(new):
            pieces.append("" if not number else (" and " if number == len(new) - 1 else ", "))
            start, value, rest = self.repeated(fact)
            pieces += [start, value, rest.text.rstrip(".")]
        self.conversation.say(*pieces, after)

    def change(self) -> None:
        """A fact gets a new value."""
        if not self.facts:
            return
        fact = self.values.pick(list(self.facts.values()))
        fresh = self.values.of(fact.attribute.kind)
        if self.resembles(fresh, self.stale):
            return
        self.stale.append(fact.value)
        fact.value = fresh
        lead = self.values.pick(TABLES["corrections"])
        self.conversation.user(lead + small(self.statement(fact)) + self.values.pick((".", " now.", "")))
        pieces = self.repeated(fact)
        self.conversation.say(self.values.pick(("Updated: ", "Okay, ", "Got it, ")), *pieces)

    def recall(self) -> None:
        """A question for something told."""
        if not self.facts:
            return self.tell()
        facts = list(self.facts.values())
        if len(facts) > 1 and self.values.chance(0.12):
            return self.recall_two(*self.values.random.sample(facts, 2))
        fact = self.values.pick(facts[: max(1, len(facts) // 2)] if self.values.chance(0.4) else facts)
        asked = question(self.values, fact.attribute.asked, fact.attribute.key).format(e=fact.entity)
        others = [other.value for other in facts if other is not fact] + self.stale
        aim = {"kind": "recall", "group": "recall", "value": fact.value, "others": others}
        self.conversation.user(asked)
        pieces = self.recalled(fact, self.values.pick(fact.attribute.answer[:1]))
        reasoning = "The user told me this earlier." if self.conversation.thoughtful else ""
        self.conversation.say(*pieces, reasoning=reasoning, aim=aim)

    def recall_two(self, first: Fact, second: Fact) -> None:
        """Two things asked in one breath."""
        asked = []
        for fact in (first, second):
            form = one_of(self.values, fact.attribute.asked, fact.attribute.key, "two")
            asked.append(capital(form.format(e=fact.entity)))
        if asked[0].endswith("?") and self.values.chance(0.7):
            self.conversation.user(f"{asked[0][:-1]} and {small(asked[1])}")
        else:
            self.conversation.user(" ".join(asked))
        answers = [self.recalled(fact, fact.attribute.answer[0]) for fact in (first, second)]
        self.conversation.say(*answers[0], " ", *answers[1])

    def unknown(self, tools: bool) -> None:
        """A question for something never told, often close to something told; with `tools`, none that one may know."""
        values = self.values
        for _ in range(20):
            attribute, entity = draw_attribute(values, self.entities, self.objects)
            near = values.pick(list(self.facts.values())) if self.facts and values.chance(0.5) else None
            if near and near.entity:
                attribute = near.attribute
                entity = values.pick(self.entities + self.objects)
                if attribute.kind == "place":
                    entity = entity.lower()
            contested = tools and entity and attribute.key.removeprefix("{e}: ") in CONTESTED
            if Fact(attribute, entity, "").key not in self.facts and not contested:
                break
        else:
            return
        self.conversation.user(question(values, attribute.asked, attribute.key).format(e=entity))
        reasoning = "The user has not told me this." if self.conversation.thoughtful else ""
        aim = {"kind": "unknown", "others": [fact.value for fact in self.facts.values()]}
        self.conversation.say(values.pick(attribute.unknown).format(e=entity), reasoning=reasoning, aim=aim)

    def summary(self) -> None:
        """Everything told so far, if it is little."""
        facts = [fact for fact in self.facts.values() if not fact.entity]
        if not 0 < len(facts) < 5 or len(facts) < len(self.facts):
            return
        self.conversation.user(self.values.pick(TABLES["summaries"]))
        pieces: list[Piece] = []
        for fact in facts:
            pieces += [Piece(" ")] * bool(pieces) + self.recalled(fact, fact.attribute.answer[0])
        self.conversation.say(*pieces)

    def read(self) -> None:
        """A longer text, sometimes with a fact in it."""
        values = self.values
        sentences = [filler(values) for _ in range(values.random.randint(2, 9))]
        if values.chance(0.4):
            fact = self.new_fact()
            if fact:
                self.add(fact)
                place = values.random.randrange(len(sentences) + 1)
                sentences.insert(place, capital(self.statement(fact)) + ".")
        self.conversation.user(values.pick(TABLES["texts"]) + " ".join(sentences))
        self.conversation.say(values.pick(TABLES["texts_read"]))
