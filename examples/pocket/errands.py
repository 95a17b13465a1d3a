"""What users have done by tools: requests, calls, results and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conversation import Conversation
from facts import SPECIAL, Fact, draw_attribute
from memory import Memory
from phrasing import LEADS, QUOTES, TABLES, capital, one_of, request, small
from render import QUOTED, Call, Piece
from results import Result, result_of
from tools import Argument, Tool, collide, offer, typed

FREE = frozenset(("text", "title"))  # kinds of values that requests put in quotes
ALONE = frozenset(("text", "topic", "expression", "task"))  # kinds that are not asked for by twos
ASKING = ("What is", "What's", "How", "Which", "Where", "When")
HOUSE = frozenset(("composed", "invented", "direct"))  # groups of tools that are not everyday ones


@dataclass
class Errand:
    """One call and its request: `texts` stand for the arguments in `ask`; `thought` explains a mentioned fact."""

    tool: Tool
    arguments: dict[str, Any]
    texts: dict[int, str]
    ask: str = ""
    thought: str = ""

    @property
    def call(self) -> Call:
        return Call(self.tool.name, self.arguments)


class Errands:
    """The tools of one conversation and the exchanges that use them."""

    def __init__(self, conversation: Conversation, memory: Memory, tools: list[Tool]) -> None:
        self.conversation, self.memory, self.tools = conversation, memory, tools
        self.values = conversation.values
        self.found: list[tuple[str, str, list[Piece]]] = []  # (what was asked about, a question, its answer)

    def errand(self, tool: Tool, mention_facts: bool = True) -> Errand:
        """A call with fresh arguments, and how it is asked for."""
        values = self.values
        ask = one_of(values, tool.asks, tool.name)
        errand = Errand(tool, {}, {}, ask)
        for number, argument in enumerate(tool.arguments):
            place = f"{{{number}}}"
            if place not in ask:
                if argument.required:
                    return self.errand(tool, mention_facts)
                continue
            value = tool.draw(values, argument)
            known = self.memory.known(argument.param.kind)
            if mention_facts and known and not errand.thought and values.chance(0.3):
                fact = values.pick(known)
                value = fact.value
                mention = values.pick(fact.attribute.phrase.split("|")).format(e=fact.entity)
                errand.texts[number] = mention
                thought = f"{capital(mention)} is {value}."
                errand.thought = thought.replace("My ", "The user's ") if mention.startswith("my ") else thought
            else:
                errand.texts[number] = value
                if argument.param.kind in FREE and not (ask.endswith(place) and ": " + place in ask):
                    fitting = [pair for pair in QUOTES if pair[0] not in value and pair[1] not in value]
                    left, right = values.pick(fitting or [("", "")])
                    errand.texts[number] = left + value + right
            errand.arguments[argument.key] = typed(argument, value) if value else value
        return errand

    def sentence(self, errand: Errand, decorate: bool = True) -> str:
        """The user's words for an errand."""
        return request(self.values, errand.ask, errand.texts, errand.tool.spec.group, decorate)

    def call(self, errands: list[Errand], reasoning: str, mentioned: bool = False) -> None:
        """The assistant's message with the calls."""
        first = errands[0].tool
        group = first.spec.group if first.spec.group in HOUSE else "everyday"
        group += ", opaque" if first.opaque else ""
        group += ", mentions a fact" if mentioned else ""
        self.conversation.call([errand.call for errand in errands], reasoning, group)

    def perhaps(self, reasoning: str) -> str:
        """A thought that most conversations write down and some do not."""
        return reasoning if self.values.chance(0.8) else ""

    def finish(self, errands: list[Errand]) -> None:
        """The results of calls and the answer that quotes them."""
        results = []
        for errand in errands:
            result = result_of(self.values, errand.tool, errand.arguments)
            self.conversation.tool(result.text)
            results.append(result)
            questions = [ask for ask in errand.tool.spec.asks if ask.startswith(ASKING) and "{1}" not in ask]
            single = len(errands) == 1 and len(errand.arguments) == 1 and errand.texts.get(0)
            if single and result.quotes and result.fields and questions:
                self.found = [entry for entry in self.found if entry[0] != errand.texts[0]]
                self.found.append((errand.texts[0], self.values.pick(questions), result.sentence))
        self.answer(results)

    def answer(self, results: list[Result]) -> None:
        """The assistant's sentences for results."""
        pieces: list[Piece] = []
        for result in results:
            pieces += [Piece(" ")] * bool(pieces) + result.sentence
        quotes = [value for result in results for value in result.quotes]
        self.conversation.say(*pieces, aim={"kind": "result", "values": quotes} if quotes else {"kind": "done"})

    def one(self) -> None:
        """A request, one call, its result, the answer."""
        errand = self.errand(self.values.pick(self.tools))
        self.conversation.user(self.sentence(errand))
        reasoning = errand.thought and self.perhaps(errand.thought)
        if self.conversation.thoughtful and not reasoning:
            reasoning = f"I use {errand.tool.name} for this."
        self.call([errand], reasoning, bool(errand.thought))
        self.finish([errand])

    def tell_and_ask(self) -> None:
        """A fact and a request in one message, the request often about the fact."""
        values = self.values
        tool = values.pick(self.tools)
        telling = {special.kind for special in SPECIAL if special.phrase}
        fitting = [a for a in tool.arguments if not a.param.enum and a.param.kind in telling]
        if fitting and values.chance(0.7):
            kind = values.pick(fitting).param.kind
            attribute, entity = values.pick([s for s in SPECIAL if s.kind == kind and s.phrase]), ""
        else:
            attribute, entity = draw_attribute(values, self.memory.entities, self.memory.objects)
            kind = ""
        fact = Fact(attribute, entity, values.of(attribute.kind))
        if fact.key in self.memory.facts or self.memory.resembles(fact.value, []):
            return
        errand = self.errand(tool, mention_facts=False)
        told = capital(self.memory.statement(fact))
        for number, argument in enumerate(tool.arguments):
            if kind and argument.param.kind == kind and number in errand.texts:
                self.mention(errand, number, argument, fact)
                break
        self.memory.add(fact)
        self.conversation.user(f"{told}. {capital(self.sentence(errand))}")
        self.call([errand], self.perhaps(errand.thought), bool(errand.thought))
        self.finish([errand])

    def mention(self, errand: Errand, number: int, argument: Argument, fact: Fact) -> None:
        """Let a request say "there" or "my city" instead of an argument's value."""
        phrases = fact.attribute.phrase.split("|")
        where = f"in {{{number}}}"
        if argument.param.kind == "city" and where in errand.ask:
            phrases = ["there", *phrases]
        errand.texts[number] = self.values.pick(phrases)
        if errand.texts[number] == "there":
            errand.ask = errand.ask.replace(where, f"{{{number}}}")
        errand.arguments[argument.key] = typed(argument, fact.value)
        thought = capital(self.values.pick(fact.attribute.answer[:1]).format(v=fact.value))
        errand.thought = thought.replace("Your ", "The user's ").replace("You live", "The user lives")

    def missing(self) -> None:
        """A request that leaves the city out: the user's own if it is known, otherwise it is asked for."""
        values, short = self.values, TABLES["short"]
        fitting = [tool for tool in self.tools if tool.topic[-1] in short and tool.spec.group in ("weather", "time")]
        if not fitting:
            return
        tool = values.pick(fitting)
        self.conversation.user(values.pick(LEADS) + small(values.pick(short[tool.topic[-1]])))
        home = self.memory.facts.get("city")
        key = tool.arguments[0].key
        if home:
            city = home.value
            errand = Errand(tool, {key: city}, {0: city})
            self.call([errand], self.perhaps(f"The user lives in {city}."), True)
        else:
            self.conversation.say("For which city?")
            city = values.of("city")
            errand = Errand(tool, {key: city}, {0: city})
            self.conversation.user(values.pick(TABLES["cities"]).format(c=city))
            self.call([errand], "")
        self.finish([errand])

    def parallel(self) -> None:
        """Two or three calls at once: one tool for several things, or two tools."""
        values = self.values
        lists = [tool.arguments[0].param for tool in self.tools if len(tool.arguments) == 1]
        lists = [param for param in lists if not param.enum and param.kind not in ALONE]
        single = [tool for tool in self.tools if len(tool.arguments) == 1 and tool.arguments[0].param in lists]
        if single and values.chance(0.6):
            tool = values.pick(single)
            argument = tool.arguments[0]
            ask = one_of(values, tool.asks, tool.name)
            drawn = [tool.draw(values, argument) for _ in range(values.random.choice((2, 2, 2, 3)))]
            texts = list(dict.fromkeys(drawn))
            if len(texts) < 2:
                return
            joint = " and ".join([", ".join(texts[:-1]), texts[-1]])
            errands = [Errand(tool, {argument.key: typed(argument, text)}, {0: text}) for text in texts]
            self.conversation.user(self.sentence(Errand(tool, {}, {0: joint}, ask)))
            thought = f"{'Two' if len(texts) == 2 else 'Three'} calls of {tool.name}."
        else:
            if len(self.tools) < 2:
                return
            errands, sentences = [], []
            for tool in values.random.sample(self.tools, 2):
                errands.append(self.errand(tool, mention_facts=False))
                sentences.append(self.sentence(errands[-1], decorate=False))
            first, second = capital(sentences[0].rstrip("?.")), small(sentences[1])
            # The joint is drawn before the choice between one sentence and two.
            self.conversation.user(
                first + values.pick((" and ", ", and ", " and also ")) + second
                if values.chance(0.6)
                else f"{first}. {values.pick(('Also, ', 'And '))}{second}"
            )
            thought = "Two tools are needed."
        self.call(errands, self.perhaps(thought))
        self.finish(errands)

    def sequence(self) -> None:
        """Two calls one after the other, the second sometimes with the first one's result."""
        values = self.values
        if len(self.tools) < 2:
            return
        first_tool, second_tool = values.random.sample(self.tools, 2)
        first = self.errand(first_tool, mention_facts=False)
        result = result_of(values, first_tool, first.arguments)
        second = self.errand(second_tool, mention_facts=False)
        if len(result.quotes) == 1 and result.fields:
            kind = next((kind for _, kind in first_tool.spec.fields), "")
            self.pass_on(result.quotes[0], kind, second)
        opening = capital(self.sentence(first, decorate=False).rstrip("?."))
        closing = self.sentence(second, decorate=False)
        joint = values.pick((", and then ", ", then ", ". After that, ", ". Then "))
        self.conversation.user(f"{opening}{joint}{small(closing)}.")
        self.call([first], self.perhaps(f"First {first_tool.name}, then {second_tool.name}."))
        self.conversation.tool(result.text)
        if result.failed:
            return self.answer([result])
        self.call([second], self.perhaps(f"Now {second_tool.name}."))
        last = result_of(values, second_tool, second.arguments)
        self.conversation.tool(last.text)
        self.answer([result, last])

    def pass_on(self, value: str, kind: str, errand: Errand) -> None:
        """Make a result an argument of the next call, where one fits."""
        fitting = [
            (number, argument)
            for number, argument in enumerate(errand.tool.arguments)
            if number in errand.texts and not argument.param.enum and fits(kind, argument, value)
        ]
        if fitting:
            number, argument = self.values.pick(fitting)
            errand.texts[number] = self.values.pick(("that", "the result", "it"))
            errand.arguments[argument.key] = typed(argument, value)

    def again(self) -> None:
        """A question for an earlier result, answered without a call."""
        if not self.found:
            return
        values = self.values
        mention, ask, sentence = values.pick(self.found)
        if sum("order" in other for _, other, _ in self.found) == 1 and values.chance(0.5):
            ask = ask.replace("my order {0}", "my order").replace("order {0}", "my order")
        text = ask.replace("{0}", mention)
        if values.chance(0.5):
            text = text.replace(" is ", " was ").replace(" does ", " did ").replace("'s ", " was ", 1)
            text = text.rstrip("?") + values.pick(("?", " again?"))
        else:
            text = values.pick(TABLES["reminders"]) + small(text)
        self.conversation.user(text)
        self.conversation.say(*sentence, aim={"kind": "again"})

    def refuse(self) -> None:
        """A request that no offered tool serves."""
        other = offer(self.values, 1)[0]
        group = other.spec.group
        if group == "direct" or any(
            (tool.spec.group == group and group != "composed") or collide(tool, other) for tool in self.tools
        ):
            return
        self.conversation.user(self.sentence(self.errand(other, mention_facts=False)))
        reasoning = "None of my tools does this." if self.conversation.thoughtful and self.tools else ""
        answer = "I do not have a tool for that." if self.tools else "I cannot do that, because I have no tools."
        self.conversation.say(answer, reasoning=reasoning, aim={"kind": "none"})

    def abilities(self) -> None:
        """What the assistant can do."""
        self.conversation.user(self.values.pick(TABLES["abilities"]))
        if not self.tools:
            return self.conversation.say("I can remember what you tell me and answer questions about it.")
        names = [tool.name for tool in self.tools]
        listed = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
        start = "I can remember what you tell me, and I can use these tools: "
        self.conversation.say(start, Piece(listed, QUOTED), ".")


def fits(kind: str, argument: Argument, text: str) -> bool:
    """Whether a result of a kind can be that argument."""
    if argument.param.type == "integer":
        return text.lstrip("-").isdigit()
    if argument.param.type == "number":
        return text.replace(".", "", 1).lstrip("-").isdigit()
    return kind == argument.param.kind or argument.param.kind in ("text", "topic")
