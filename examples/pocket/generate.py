"""Writes agent dialogues: facts told and asked back, tools chosen and called, results quoted, and small talk.

python examples/pocket/generate.py --seed 1 --count 2        # print two dialogues as training sees them
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import tools as toolbox
from facts import CONTESTED, SPECIAL, Fact, draw_attribute
from render import QUOTED, RECALLED, Call, Message, Piece, as_text, render
from tools import Argument, Tool, typed
from values import Values, wordings

TABLES = wordings("chat")
GREETINGS, SYSTEMS, THOUGHTFUL = TABLES["greetings"], TABLES["systems"], TABLES["thoughtful"]
ERRORS, ACKS, CONFIRMED, LEADS = TABLES["errors"], TABLES["acks"], TABLES["confirmed"], TABLES["leads"]
IMPERATIVES, CHAT = TABLES["imperatives"], TABLES["chat"]
QUOTES = (('"', '"'), ('"', '"'), ("'", "'"), ("`", "`"), ("“", "”"))
FREE = frozenset(("text", "title"))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def small(text: str) -> str:
    """The sentence with a small first letter, where its first word is an ordinary one."""
    first = text.split(" ")[0]
    return (
        text
        if first in ("I", "I'm") or first[1:].lower() != first[1:] or ("'" in first and first[0] == "I")
        else text[:1].lower() + text[1:]
    )


class Dialogue:
    """One conversation in the making.

    `messages`, `schemas` and `system` are its outcome; the `act_` methods append exchanges of one kind each.
    """

    def __init__(self, seed: int, evaluation: bool = False, most_tools: int = 8, least_tools: int = 0) -> None:
        self.random = random.Random(seed)
        self.values = values = Values(self.random, evaluation)
        self.messages: list[Message] = []
        self.facts: dict[str, Fact] = {}
        self.stale: list[str] = []
        self.found: list[tuple[str, str, list[Piece]]] = []
        self.entities = [values.of("person") for _ in range(self.random.randint(2, 4))]
        self.objects = [values.of("project") for _ in range(2)] + [values.of("thing") for _ in range(2)]
        count = self.random.randint(max(1, least_tools), most_tools)
        if not least_tools and values.chance(0.2):
            count = 0
        self.tools = toolbox.offer(values, count) if count else []
        self.schemas = [tool.schema for tool in self.tools]
        self.thoughtful = values.chance(0.1)
        self.system = self.draw_system()

    def draw_system(self) -> str | None:
        values = self.values
        if not self.thoughtful and values.chance(0.4):
            return None
        parts = [values.pick(SYSTEMS)] if values.chance(0.8) else []
        if values.chance(0.25):
            fact = self.new_fact()
            if fact:
                told = values.pick(fact.attribute.told[:1])
                if told.startswith(("The ", "{e}")):
                    self.facts[fact.key] = fact
                    parts.append(told.format(v=fact.value, e=fact.entity) + ".")
        if self.thoughtful:
            parts.append(values.pick(THOUGHTFUL))
        self.random.shuffle(parts)
        return " ".join(parts) or None

    # Saying things

    def user(self, text: str) -> None:
        self.messages.append(Message("user", [Piece(text)]))

    def say(self, *pieces: Piece | str, reasoning: str = "", aim: dict[str, Any] | None = None) -> None:
        content = [Piece(piece) if isinstance(piece, str) else piece for piece in pieces]
        self.messages.append(Message("assistant", content, reasoning, aim=aim or {}))

    def one_of(self, texts: Sequence[str], *key: object) -> str:
        """A wording from this side of the split."""
        text = self.values.pick(texts)
        for _ in range(30):
            if self.values.form(text, *key):
                break
            text = self.values.pick(texts)
        return text

    def question(self, texts: Sequence[str], key: str) -> str:
        """A question with what may come before it; the pair is from this side of the split."""
        for _ in range(30):
            lead, text = self.values.pick(LEADS), self.values.pick(texts)
            if self.values.form(lead, text, key):
                break
        if not text.endswith("?"):
            text += self.values.pick((".", "", ", please."))
        if text.endswith("?") and self.values.chance(0.14):
            if self.values.chance(0.4):
                text = text.replace(" is ", " was ").replace("What's ", "What was ").replace("When's ", "When was ")
            text = f"{text[:-1]} again?"
        text = lead + (small(text) if lead and not text.startswith(("{e}", "I")) else text)
        return text.lower() if self.values.chance(0.05) and "{" not in text else text

    # Facts

    def new_fact(self) -> Fact | None:
        attribute, entity = draw_attribute(self.values, self.entities, self.objects)
        fact = Fact(attribute, entity, self.values.of(attribute.kind))
        taken = {other.value.lower() for other in self.facts.values()} | {text.lower() for text in self.stale}
        if fact.key in self.facts or any(fact.value.lower() in text or text in fact.value.lower() for text in taken):
            return None
        return fact

    def statement(self, fact: Fact) -> str:
        return self.one_of(fact.attribute.told, fact.attribute.key).format(v=fact.value, e=fact.entity)

    def recalled(self, fact: Fact, answer: str | None = None) -> list[Piece]:
        """The sentence that says a fact back, its value labelled."""
        before, after = (answer or self.values.pick(fact.attribute.answer)).split("{v}")
        return [
            Piece(capital(before.format(e=fact.entity))),
            Piece(fact.value, RECALLED),
            Piece(after.format(e=fact.entity)),
        ]

    def act_tell(self) -> None:
        """One to three facts, acknowledged."""
        new: list[Fact] = []
        for _ in range(self.random.choice((1, 1, 1, 2, 2, 3))):
            fact = self.new_fact()
            if fact:
                new.append(fact)
                self.facts[fact.key] = fact
        if not new:
            return
        told = [self.statement(fact) for fact in new]
        if len(new) == 1:
            text = capital(told[0])
            if self.values.chance(0.25):
                text = self.values.pick(
                    (
                        "Remember: ",
                        "Please note: ",
                        "Hi, ",
                        "By the way, ",
                        "FYI: ",
                        "Please remember that ",
                        "Keep in mind that ",
                    )
                ) + (told[0] if told[0][:1].isupper() and self.values.chance(0.6) else small(told[0]))
        else:
            joint = self.values.pick((" and ", ". ", ", and ", ". ", "; ", "\n"))
            text = joint.join(capital(part) if "." in joint or "\n" in joint else part for part in told)
        text += self.values.pick((".", ".", ".", "", "!"))
        if self.values.chance(0.15):
            text = f"{self.values.pick(GREETINGS).rstrip('!')}{self.values.pick(('! ', ', ', '. '))}{text}"
        self.user(text)
        if self.values.chance(0.25):
            self.say(
                self.values.pick(
                    ("Got it.", "Noted.", "Okay, I will remember that.", "Thanks, I will keep that in mind.")
                )
            )
            return
        form = self.values.pick(CONFIRMED)
        before, after = form.split("{s}")
        pieces: list[Piece | str] = [before]
        for number, fact in enumerate(new):
            pieces.append("" if not number else (" and " if number == len(new) - 1 else ", "))
            first, value, rest = self.recalled(fact)
            start = first.text if fact.entity and first.text.startswith(fact.entity) else small(first.text)
            pieces += [start, value, rest.text.rstrip(".")]
        self.say(*pieces, after)

    def act_change(self) -> None:
        """A fact gets a new value."""
        if not self.facts:
            return
        fact = self.values.pick(list(self.facts.values()))
        fresh = self.values.of(fact.attribute.kind)
        values = [other.value.lower() for other in self.facts.values()] + [text.lower() for text in self.stale]
        if any(fresh.lower() in text or text in fresh.lower() for text in values):
            return
        self.stale.append(fact.value)
        fact.value = fresh
        lead = self.values.pick(
            ("Actually, ", "Correction: ", "I was wrong: ", "Update: ", "Sorry, ", "Change of plan: ", "No, ")
        )
        self.user(lead + small(self.statement(fact)) + self.values.pick((".", " now.", "")))
        first, value, rest = self.recalled(fact)
        start = first.text if fact.entity and first.text.startswith(fact.entity) else small(first.text)
        self.say(self.values.pick(("Updated: ", "Okay, ", "Got it, ")), start, value, rest)

    def act_recall(self) -> None:
        """A question for something told."""
        if not self.facts:
            return self.act_tell()
        facts = list(self.facts.values())
        if len(facts) > 1 and self.values.chance(0.12):
            return self.recall_two(*self.random.sample(facts, 2))
        fact = self.values.pick(facts[: max(1, len(facts) // 2)] if self.values.chance(0.4) else facts)
        asked = self.question(fact.attribute.asked, fact.attribute.key).format(e=fact.entity)
        others = [other.value for other in facts if other is not fact] + self.stale
        aim = {"kind": "recall", "group": "recall", "value": fact.value, "others": others}
        self.user(asked)
        before, after = self.values.pick(fact.attribute.answer[:1]).split("{v}")
        reasoning = "The user told me this earlier." if self.thoughtful else ""
        self.say(
            capital(before.format(e=fact.entity)),
            Piece(fact.value, RECALLED),
            after.format(e=fact.entity),
            reasoning=reasoning,
            aim=aim,
        )

    def recall_two(self, first: Fact, second: Fact) -> None:
        """Two things asked in one breath."""
        asked = [
            capital(self.one_of(fact.attribute.asked, fact.attribute.key).format(e=fact.entity))
            for fact in (first, second)
        ]
        if asked[0].endswith("?") and self.values.chance(0.7):
            self.user(f"{asked[0][:-1]} and {small(asked[1])}")
        else:
            self.user(" ".join(asked))
        self.say(
            *self.recalled(first, first.attribute.answer[0]), " ", *self.recalled(second, second.attribute.answer[0])
        )

    def act_unknown(self) -> None:
        """A question for something never told, often close to something told."""
        for _ in range(20):
            attribute, entity = draw_attribute(self.values, self.entities, self.objects)
            near = self.values.pick(list(self.facts.values())) if self.facts and self.values.chance(0.5) else None
            if near and near.entity:
                attribute = near.attribute
                entity = self.values.pick(self.entities + self.objects)
                if attribute.kind == "place":
                    entity = entity.lower()
            contested = self.tools and entity and attribute.key.removeprefix("{e}: ") in CONTESTED
            if Fact(attribute, entity, "").key not in self.facts and not contested:
                break
        else:
            return
        self.user(self.question(attribute.asked, attribute.key).format(e=entity))
        reasoning = "The user has not told me this." if self.thoughtful else ""
        self.say(
            self.values.pick(attribute.unknown).format(e=entity),
            reasoning=reasoning,
            aim={"kind": "unknown", "others": [fact.value for fact in self.facts.values()]},
        )

    def act_summary(self) -> None:
        """Everything told so far, if it is little."""
        facts = [fact for fact in self.facts.values() if not fact.entity]
        if not 0 < len(facts) < 5 or len(facts) < len(self.facts):
            return
        self.user(
            self.values.pick(
                (
                    "What do you know about me?",
                    "What have I told you so far?",
                    "Summarise what I told you.",
                    "What do you remember?",
                    "List what you know so far.",
                    "Repeat what I told you.",
                )
            )
        )
        pieces: list[Piece] = []
        for fact in facts:
            pieces += [Piece(" ")] * bool(pieces) + self.recalled(fact, fact.attribute.answer[0])
        self.say(*pieces)

    # Tools

    def fill(self, tool: Tool, allow_fact: bool = True) -> tuple[dict[str, Any], dict[int, str], str, str]:
        """Arguments for a call, the texts that stand for them in the request, the request's wording, and a thought."""
        values = self.values
        ask = self.one_of(tool.asks, tool.spec.group)
        chosen: dict[str, Any] = {}
        texts: dict[int, str] = {}
        thought = ""
        for number, argument in enumerate(tool.arguments):
            place = f"{{{number}}}"
            if place not in ask:
                if argument.required:
                    return self.fill(tool, allow_fact)
                continue
            value = tool.draw(values, argument)
            known = [
                fact
                for fact in self.facts.values()
                if fact.attribute.kind == argument.param.kind and fact.attribute.phrase
            ]
            if allow_fact and known and not thought and values.chance(0.3):
                fact = values.pick(known)
                value = fact.value
                mention = values.pick(fact.attribute.phrase.split("|")).format(e=fact.entity)
                texts[number] = mention
                thought = f"{capital(mention)} is {value}."
                thought = thought.replace("My ", "The user's ") if mention.startswith("my ") else thought
            else:
                texts[number] = value
                if argument.param.kind in FREE and not (ask.endswith(place) and ": " + place in ask):
                    left, right = values.pick(
                        [pair for pair in QUOTES if pair[0] not in value and pair[1] not in value] or [("", "")]
                    )
                    texts[number] = left + value + right
            chosen[argument.key] = typed(argument, value) if value else value
        return chosen, texts, ask, thought

    def request(self, ask: str, texts: dict[int, str], key: str, decorate: bool = True) -> str:
        """The user's sentence for one request."""
        values = self.values
        for number, text in texts.items():
            ask = ask.replace(f"{{{number}}}", f"\0{number}\0")
        if ask.startswith("!"):
            for _ in range(30):
                form = values.pick(IMPERATIVES)
                if values.form(form, ask, key):
                    break
            text = form.format(c=capital(ask[1:]), l=ask[1:]) if decorate else ask[1:]
            free_end = ask.endswith("\0") and ": \0" in ask
            if free_end and decorate:
                text = f"{values.pick(('', 'Please '))}{ask[1:]}"
                text = capital(text)
        else:
            lead = values.pick(LEADS) if decorate else ""
            text = lead + (small(ask) if lead and ask[0] != "\0" else ask)
        for number, value in texts.items():
            text = text.replace(f"\0{number}\0", value)
        return text

    def call(self, calls: list[tuple[Tool, dict[str, Any]]], reasoning: str, mentioned: bool) -> None:
        message = Message(
            "assistant", reasoning=reasoning, calls=[Call(tool.name, arguments) for tool, arguments in calls]
        )
        first = calls[0][0]
        group = first.spec.group if first.spec.group in ("composed", "invented", "direct") else "everyday"
        message.aim = {
            "kind": "call",
            "group": f"{group}{', opaque' if first.opaque else ''}{', mentions a fact' if mentioned else ''}",
        }
        self.messages.append(message)

    def result(
        self, tool: Tool, arguments: dict[str, Any], texts: dict[int, str]
    ) -> tuple[str, list[Piece], list[str], dict[str, str]]:
        """What the tool returns, the sentence that answers with it, the values it must quote, and the result's fields."""
        values, spec = self.values, tool.spec
        shown = {
            str(number): as_text(arguments[argument.key])
            for number, argument in enumerate(tool.arguments)
            if argument.key in arguments
        }
        if values.chance(0.07):
            known = [text for text in shown.values() if text] or ["it"]
            message = values.pick(
                (
                    values.pick(ERRORS),
                    f"{values.of('thing')} {values.pick(ERRORS)}",
                    f"no such {values.of('thing')}",
                    f"{values.pick(known)} not found",
                    f"unknown {values.of('thing')} {values.pick(known)}",
                    f"cannot {values.of('task')}",
                    f"{values.of('thing')} is {values.of('state')}",
                    f"missing {values.of('thing')}",
                )
            )
            text = values.pick(
                (
                    f"error: {message}",
                    f'{{"error": "{message}"}}',
                    f"Error: {message}",
                    f"error: {message}",
                    f"error: {values.pick(('ValueError', 'KeyError', 'RuntimeError', 'TimeoutError'))}: {message}",
                )
            )
            message = text.removeprefix("error: ").removeprefix("Error: ") if text[0] != "{" else message
            return text, [Piece("The tool reported an error: "), Piece(message, QUOTED), Piece(".")], [message], {}
        if spec.done or not (spec.fields or spec.arithmetic):
            done = (
                capital(
                    (spec.done or "it is done").format(*[shown.get(str(i), "") for i in range(len(tool.arguments))])
                )
                if self.complete(spec.done, shown)
                else "It is done"
            )
            if values.chance(0.2):
                number = values.of("code")
                key = values.pick(("id", "id", "number", "reference", "key"))
                text = self.json_text({key: number, **({"status": "created"} if values.chance(0.3) else {})})
                return (
                    text,
                    [Piece(f"Done, {small(done)}; the {key} is "), Piece(number, QUOTED), Piece(".")],
                    [number],
                    {key: number},
                )
            return values.pick(ACKS), [Piece(f"Done, {small(done)}.")], [], {}
        if spec.listing:
            return self.listed(tool, shown)
        fields = self.fields(spec, arguments)
        if values.chance(0.12) and not spec.arithmetic:
            text = self.prose(fields, shown)
            return text, [Piece("The result is: "), Piece(text, QUOTED), Piece(".")], [text], {}
        names = list(fields)
        texts_of = [as_text(value) for value in fields.values()]
        opaque = values.chance(0.12) or (tool.opaque and values.chance(0.3))
        if opaque:
            names = [values.opaque(2) for _ in names]
        whole = (
            len(names) == max(1, len(spec.fields))
            and spec.answers
            and not opaque
            and self.complete(spec.answers[0], shown)
        )
        if len(names) == 1 and values.chance(0.4):
            text = texts_of[0]
            whole = bool(spec.answers) and "{b}" not in spec.answers[0] and self.complete(spec.answers[0], shown)
            pieces = (
                self.filled(spec.answers[0], shown, texts_of)
                if whole
                else [Piece("The result is "), Piece(texts_of[0], QUOTED), Piece(".")]
            )
            return text, pieces, texts_of, {"result": texts_of[0]}
        if len(names) == 2 and values.chance(0.12):
            text = f"{texts_of[1]}, {texts_of[0]}"
            return text, [Piece("The result is: "), Piece(text, QUOTED), Piece(".")], texts_of, {}
        if (not whole and values.chance(0.25)) or values.chance(0.06):
            extra = values.opaque(2)
            names.append(extra)
            texts_of.append(values.of(values.pick(("code", "thing", "integer"))))
            whole = False
        data: dict[str, Any] = dict(zip(names, list(fields.values()) + texts_of[len(fields) :], strict=True))
        if values.chance(0.12):
            data = {**{key: value for key, value in arguments.items() if key not in data}, **data}
        text = self.json_text(data)
        if whole:
            return (
                text,
                self.filled(values.pick(spec.answers[:1]), shown, texts_of),
                texts_of,
                dict(zip(names, texts_of, strict=True)),
            )
        pieces = []
        for number, (name, value) in enumerate(zip(names, texts_of, strict=True)):
            lead = (
                ("The " if not number else " and the " if number == len(names) - 1 else ", the ")
                + name.replace("_", " ")
                + " is "
            )
            pieces += [Piece(lead), Piece(value, QUOTED)]
        return text, [*pieces, Piece(".")], texts_of, dict(zip(names, texts_of, strict=True))

    def prose(self, fields: dict[str, Any], shown: dict[str, str]) -> str:
        """A result in words."""
        values = self.values
        pairs = [(name.replace("_", " "), as_text(value)) for name, value in fields.items()]
        topic = values.pick([text for text in shown.values() if text] or ["it"])
        return values.pick(
            (
                f"{topic}: {', '.join(value for _, value in reversed(pairs))}",
                ", ".join(value for _, value in pairs) + values.pick(("", " " + values.thing())),
                f"{topic} has {pairs[0][0]} {pairs[0][1]}",
                " and ".join(f"{value} {name}" for name, value in pairs),
                f"The {pairs[0][0]} of {topic} is {pairs[0][1]}",
                f"{capital(values.thing())} {pairs[0][1]} {values.thing()}",
                "; ".join(f"{name}: {value}" for name, value in pairs),
            )
        )[:70].strip()

    def complete(self, form: str, shown: dict[str, str]) -> bool:
        return all(f"{{{number}}}" not in form or str(number) in shown for number in range(4))

    def json_text(self, data: dict[str, Any]) -> str:
        """A result as JSON text, in the spacings that clients use."""
        values = self.values
        if values.chance(0.05):
            data = {values.pick(("data", "result", "response")): data}
        if values.chance(0.2):
            return json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        return json.dumps(data, ensure_ascii=values.chance(0.1))

    def fields(self, spec: toolbox.Spec, arguments: dict[str, Any]) -> dict[str, Any]:
        """The result's fields: keys drawn from their wordings, numbers as numbers."""
        values = self.values
        if spec.arithmetic:
            left, right = list(arguments.values())[:2]
            outcome = {
                "+": lambda: left + right,
                "-": lambda: left - right,
                "*": lambda: left * right,
                "/": lambda: round(left / (right or 1), 2),
            }[spec.arithmetic]()
            return {values.pick(("result", "sum" if spec.arithmetic == "+" else "value", "answer")): outcome}
        chosen = {}
        for keys, kind in spec.fields if values.chance(0.75) else spec.fields[:1]:
            text = values.of(kind)
            number: Any = text
            if kind in ("temperature", "integer", "percent", "count", "money", "decimal") and values.chance(0.85):
                number = float(text) if "." in text else int(text)
            chosen[values.pick(keys.split("|"))] = number
        return chosen

    def filled(self, form: str, shown: dict[str, str], results: list[str]) -> list[Piece]:
        """An answer's wording with arguments and results in it; results are labelled."""
        pieces: list[Piece] = []
        rest = form
        while rest:
            before, brace, after = rest.partition("{")
            if before:
                pieces.append(Piece(before))
            if not brace:
                break
            key, _, rest = after.partition("}")
            pieces.append(Piece(results["ab".index(key)], QUOTED) if key in "ab" else Piece(shown[key]))
        return pieces

    def listed(self, tool: Tool, shown: dict[str, str]) -> tuple[str, list[Piece], list[str], dict[str, str]]:
        """A list of findings, possibly empty."""
        values = self.values
        keys, kind = tool.spec.fields[0]
        items = list(dict.fromkeys(values.of(kind) for _ in range(self.random.choice((0, 1, 1, 2, 2, 3)))))
        roll = values.random.random()
        if roll < 0.45:
            text = self.json_text({values.pick(keys.split("|")): items})
        elif roll < 0.8 or not items:
            text = json.dumps(items, ensure_ascii=False)
        else:
            text = "\n".join(items) if values.chance(0.5) else "\n".join(f"- {item}" for item in items)
        if not items:
            return text, [Piece("I found nothing.")], [], {}
        pieces = [Piece("I found ")]
        for number, item in enumerate(items):
            pieces.append(Piece("" if not number else " and " if number == len(items) - 1 else ", "))
            pieces.append(Piece(item, QUOTED))
        return text, [*pieces, Piece(".")], items, {}

    def act_tool(self) -> None:
        """A request, one call, its result, the answer."""
        tool = self.values.pick(self.tools)
        arguments, texts, ask, thought = self.fill(tool)
        self.user(self.request(ask, texts, tool.spec.group))
        reasoning = thought if thought and self.values.chance(0.8) else ""
        if self.thoughtful and not reasoning:
            reasoning = f"I use {tool.name} for this."
        self.call([(tool, arguments)], reasoning, bool(thought))
        self.finish([(tool, arguments, texts)])

    def act_tell_and_ask(self) -> None:
        """A fact and a request in one message, the request often about the fact."""
        values = self.values
        tool = values.pick(self.tools)
        fitting = [
            a for a in tool.arguments if not a.param.enum and any(s.kind == a.param.kind and s.phrase for s in SPECIAL)
        ]
        if fitting and values.chance(0.7):
            kind = values.pick(fitting).param.kind
            attribute, entity = values.pick([s for s in SPECIAL if s.kind == kind and s.phrase]), ""
        else:
            attribute, entity = draw_attribute(values, self.entities, self.objects)
            kind = ""
        fact = Fact(attribute, entity, values.of(attribute.kind))
        if fact.key in self.facts or any(
            fact.value.lower() in other.value.lower() or other.value.lower() in fact.value.lower()
            for other in self.facts.values()
        ):
            return
        arguments, texts, ask, _ = self.fill(tool, allow_fact=False)
        told = capital(self.statement(fact))
        thought = ""
        for number, argument in enumerate(tool.arguments):
            if kind and argument.param.kind == kind and number in texts:
                texts[number] = (
                    values.pick(("there", *fact.attribute.phrase.split("|")))
                    if kind == "city" and f"in {{{number}}}" in ask
                    else values.pick(fact.attribute.phrase.split("|"))
                )
                if texts[number] == "there":
                    ask = ask.replace(f"in {{{number}}}", f"{{{number}}}")
                arguments[argument.key] = typed(argument, fact.value)
                thought = f"{capital(values.pick(fact.attribute.answer[:1]).format(v=fact.value))}".replace(
                    "Your ", "The user's "
                )
                thought = thought.replace("You live", "The user lives")
                break
        self.facts[fact.key] = fact
        self.user(f"{told}. {capital(self.request(ask, texts, tool.spec.group))}")
        self.call([(tool, arguments)], thought if values.chance(0.8) else "", bool(thought))
        self.finish([(tool, arguments, texts)])

    def finish(self, calls: list[tuple[Tool, dict[str, Any], dict[int, str]]], reasoning: str = "") -> None:
        """The results of calls and the answer that quotes them."""
        pieces: list[Piece] = []
        quotes: list[str] = []
        for tool, arguments, texts in calls:
            text, sentence, values, fields = self.result(tool, arguments, texts)
            self.messages.append(Message("tool", [Piece(text)]))
            pieces += [Piece(" ")] * bool(pieces) + sentence
            quotes += values
            questions = [
                ask
                for ask in tool.spec.asks
                if ask.startswith(("What is", "What's", "How", "Which", "Where", "When")) and "{1}" not in ask
            ]
            if len(calls) == 1 and values and questions and len(arguments) == 1 and texts.get(0) and fields:
                self.found = [entry for entry in self.found if entry[0] != texts[0]]
                self.found.append((texts[0], self.values.pick(questions), sentence))
        if len(self.messages) > 1:
            self.say(
                *pieces, reasoning=reasoning, aim={"kind": "result", "values": quotes} if quotes else {"kind": "done"}
            )

    def act_missing(self) -> None:
        """A request that leaves the city out: the user's own if it is known, otherwise it is asked for."""
        values = self.values
        short = {
            "get_weather": (
                "What's the weather?",
                "How is the weather?",
                "What is the weather like today?",
                "weather?",
                "Is it nice outside?",
            ),
            "get_time": ("What time is it?", "How late is it?", "Tell me the time"),
        }
        fitting = [tool for tool in self.tools if tool.topic[-1] in short and tool.spec.group in ("weather", "time")]
        if not fitting:
            return
        tool = values.pick(fitting)
        self.user(values.pick(LEADS) + small(values.pick(short[tool.topic[-1]])))
        home = self.facts.get("city")
        key = tool.arguments[0].key
        if home:
            city = home.value
            self.call([(tool, {key: city})], f"The user lives in {city}." if values.chance(0.8) else "", True)
        else:
            self.say("For which city?")
            city = values.of("city")
            self.user(
                values.pick(
                    ("{c}", "{c}.", "In {c}.", "For {c}, please.", "{c} please", "I mean {c}.", "For {c}")
                ).format(c=city)
            )
            self.call([(tool, {key: city})], "", False)
        self.finish([(tool, {key: city}, {0: city})])

    def act_parallel(self) -> None:
        """Two or three calls at once: one tool for several things, or two tools."""
        values = self.values
        single = [
            tool
            for tool in self.tools
            if len(tool.arguments) == 1
            and not tool.arguments[0].param.enum
            and tool.arguments[0].param.kind not in ("text", "topic", "expression", "task")
        ]
        if single and values.chance(0.6):
            tool = values.pick(single)
            argument = tool.arguments[0]
            ask = self.one_of(tool.asks, tool.spec.group)
            texts = list(dict.fromkeys(tool.draw(values, argument) for _ in range(self.random.choice((2, 2, 2, 3)))))
            if len(texts) < 2:
                return
            joint = " and ".join([", ".join(texts[:-1]), texts[-1]])
            calls = [(tool, {argument.key: typed(argument, text)}, {0: text}) for text in texts]
            self.user(self.request(ask, {0: joint}, tool.spec.group))
            thought = f"{capital(['one', 'two', 'three'][len(texts) - 1])} calls of {tool.name}."
        else:
            if len(self.tools) < 2:
                return
            calls, sentences = [], []
            for tool in values.random.sample(self.tools, 2):
                arguments, texts_of, ask, _ = self.fill(tool, allow_fact=False)
                calls.append((tool, arguments, texts_of))
                sentences.append(self.request(ask, texts_of, tool.spec.group, decorate=False))
            first, second = sentences[0].rstrip("?."), sentences[1]
            self.user(
                capital(first) + values.pick((" and ", ", and ", " and also ")) + small(second)
                if values.chance(0.6)
                else f"{capital(first)}. {values.pick(('Also, ', 'And '))}{small(second)}"
            )
            thought = "Two tools are needed."
        self.call([(tool, arguments) for tool, arguments, _ in calls], thought if values.chance(0.8) else "", False)
        self.finish(calls)

    def act_sequence(self) -> None:
        """Two calls one after the other, the second sometimes with the first one's result."""
        values = self.values
        if len(self.tools) < 2:
            return
        first, second = values.random.sample(self.tools, 2)
        arguments, texts, ask, _ = self.fill(first, allow_fact=False)
        text, sentence, quotes, fields = self.result(first, arguments, texts)
        next_arguments, next_texts, next_ask, _ = self.fill(second, allow_fact=False)
        if len(quotes) == 1 and fields:
            kind = next((kind for _, kind in first.spec.fields), "")
            fitting = [
                (n, a)
                for n, a in enumerate(second.arguments)
                if n in next_texts and not a.param.enum and self.fits(kind, a, quotes[0])
            ]
            if fitting:
                number, argument = values.pick(fitting)
                next_texts[number] = values.pick(("that", "the result", "it"))
                next_arguments[argument.key] = typed(argument, quotes[0])
        opening = self.request(ask, texts, first.spec.group, decorate=False).rstrip("?.")
        closing = self.request(next_ask, next_texts, second.spec.group, decorate=False)
        self.user(
            f"{capital(opening)}{values.pick((', and then ', ', then ', '. After that, ', '. Then '))}{small(closing)}."
        )
        self.call([(first, arguments)], f"First {first.name}, then {second.name}." if values.chance(0.8) else "", False)
        self.messages.append(Message("tool", [Piece(text)]))
        if text.lower().startswith(("error", '{"error')):
            return self.say(*sentence, aim={"kind": "result", "values": quotes})
        self.call([(second, next_arguments)], f"Now {second.name}." if values.chance(0.8) else "", False)
        next_text, next_sentence, next_quotes, _ = self.result(second, next_arguments, next_texts)
        self.messages.append(Message("tool", [Piece(next_text)]))
        self.say(
            *sentence,
            " ",
            *next_sentence,
            aim={"kind": "result", "values": quotes + next_quotes} if quotes + next_quotes else {"kind": "done"},
        )

    def fits(self, kind: str, argument: Argument, text: str) -> bool:
        """Whether a result can be that argument."""
        if argument.param.type == "integer":
            return text.lstrip("-").isdigit()
        if argument.param.type == "number":
            return text.replace(".", "", 1).lstrip("-").isdigit()
        return kind == argument.param.kind or argument.param.kind in ("text", "topic")

    def act_again(self) -> None:
        """A question for an earlier result, answered without a call."""
        if not self.found:
            return
        mention, ask, sentence = self.values.pick(self.found)
        text = ask.replace("{0}", mention)
        if self.values.chance(0.5):
            text = text.replace(" is ", " was ").replace(" does ", " did ").replace("'s ", " was ", 1)
            text = text.rstrip("?") + self.values.pick(("?", " again?"))
        else:
            text = self.values.pick(
                ("What did you say: ", "Remind me: ", "Once more: ", "You told me before: ", "Say it again: ")
            ) + small(text)
        self.user(text)
        self.say(*sentence, aim={"kind": "again"})

    def act_no_tool(self) -> None:
        """A request that no offered tool serves."""
        values = self.values
        other = toolbox.offer(values, 1)[0]
        if other.spec.group == "direct" or any(
            (tool.spec.group == other.spec.group and other.spec.group != "composed") or toolbox.collide(tool, other)
            for tool in self.tools
        ):
            return
        _arguments, texts, ask, _ = self.fill(other, allow_fact=False)
        self.user(self.request(ask, texts, other.spec.group))
        reasoning = "None of my tools does this." if self.thoughtful and self.tools else ""
        self.say(
            "I do not have a tool for that." if self.tools else "I cannot do that, because I have no tools.",
            reasoning=reasoning,
            aim={"kind": "none"},
        )

    # Small talk

    def act_greet(self) -> None:
        self.user(self.values.pick(GREETINGS) + self.values.pick(("", "", ".", "!", ", how are you?")))
        self.say(
            self.values.pick(("Hello! How can I help you?", "Hello! What can I do for you?", "Hi! How can I help?"))
        )

    def act_chat(self) -> None:
        table = self.values.pick(CHAT)
        text = self.values.pick(table["asked"])
        if text[-1].isalpha():
            text += self.values.pick(("", ".", "!"))
        self.user(text if self.values.chance(0.85) else text.lower())
        self.say(self.values.pick(table["answers"]))

    def act_remark(self) -> None:
        """Something said that nobody asks back."""
        values = self.values
        text = values.pick(
            (
                self.filler(),
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
        self.user(text)
        self.say(values.pick(("Okay, noted.", "I see.", "Okay, noted.")))

    def act_open(self) -> None:
        """Something that takes knowledge of the world or a writer's hand."""
        values = self.values
        if any(tool.spec.group in ("web", "text", "notes", "people", "place", "files") for tool in self.tools):
            return
        thing, person = values.of("thing"), values.of("person")
        self.user(
            values.pick(
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
        )
        self.say(
            "I only know what you tell me and what my tools return." if self.tools else "I only know what you tell me."
        )

    def act_abilities(self) -> None:
        self.user(
            self.values.pick(
                (
                    "What can you do?",
                    "How can you help me?",
                    "What are you able to do?",
                    "Which tools do you have?",
                    "What tools can you use?",
                    "List your tools.",
                    "What are your abilities?",
                )
            )
        )
        if not self.tools:
            return self.say("I can remember what you tell me and answer questions about it.")
        names = [tool.name for tool in self.tools]
        listed = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
        self.say("I can remember what you tell me, and I can use these tools: ", Piece(listed, QUOTED), ".")

    def act_repeat(self) -> None:
        """Words to be said back."""
        text = self.values.of("text")
        self.user(
            self.values.pick(
                (
                    "Repeat after me: {t}",
                    "Say {t}",
                    'Repeat "{t}"',
                    "Please repeat: {t}",
                    "Echo {t}",
                    "Write exactly this: {t}",
                )
            ).format(t=text)
        )
        self.say(Piece(text, RECALLED))

    def act_read(self) -> None:
        """A longer text, sometimes with a fact in it."""
        values = self.values
        sentences = [self.filler() for _ in range(self.random.randint(2, 9))]
        if values.chance(0.4):
            fact = self.new_fact()
            if fact:
                self.facts[fact.key] = fact
                sentences.insert(self.random.randrange(len(sentences) + 1), capital(self.statement(fact)) + ".")
        self.user(
            values.pick(
                ("Here is a text: ", "Please read this: ", "Some background: ", "Read this:\n", "For context: ")
            )
            + " ".join(sentences)
        )
        self.say(values.pick(("Thank you, I have read it.", "I have read it.", "Okay, I have read the text.")))

    def filler(self) -> str:
        """A sentence about nothing that is asked later."""
        values = self.values
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

    def acts(self) -> list[tuple[Callable[[], None], float]]:
        """What can happen next, with weights."""
        talk: list[tuple[Callable[[], None], float]] = [
            (self.act_tell, 6 if len(self.facts) < 12 else 1),
            (self.act_recall, 6),
            (self.act_unknown, 2.0),
            (self.act_change, 0.8),
            (self.act_summary, 0.4),
            (self.act_chat, 1.6),
            (self.act_abilities, 0.25),
            (self.act_repeat, 0.5),
            (self.act_open, 0.6),
            (self.act_remark, 0.4),
            (self.act_read, 0.5),
            (self.act_no_tool, 0.7),
        ]
        if self.tools:
            talk += [
                (self.act_tool, 7),
                (self.act_parallel, 1.6),
                (self.act_sequence, 1.2),
                (self.act_again, 1.2),
                (self.act_tell_and_ask, 0.9),
                (self.act_missing, 1.0),
            ]
        return talk

    def extend(self) -> None:
        """One more exchange."""
        if not self.messages and self.values.chance(0.35):
            return self.act_greet()
        acts, weights = zip(*self.acts(), strict=True)
        self.random.choices(acts, weights)[0]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
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
