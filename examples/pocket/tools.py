"""Tools that dialogues offer: everyday Python functions, verb-object pairs, and tools whose words are invented.

A `Spec` is a kind of tool with all its wordings; `Tool` is one drawing of it: a name, parameter keys, descriptions, the
JSON schema, and the wordings left for its requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from values import Values, wordings


@dataclass(frozen=True)
class Param:
    """A parameter: key wordings, value kind (`Values` method) or enum, JSON type, descriptions."""

    keys: str
    kind: str
    type: str = "string"
    descs: tuple[str, ...] = ()
    optional: bool = False
    enum: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    """A kind of tool. `asks` have `{0}`, `{1}` for parameters; those that start with `!` are imperatives.

    `fields` are (key wordings, kind) of the result; `answers` quote fields as `{a}`, `{b}` in that order, and are used
    when the result has all fields. A spec without fields acts, and `done` says what is then true.
    """

    group: str
    names: str
    descs: tuple[str, ...]
    params: tuple[Param, ...]
    asks: tuple[str, ...]
    fields: tuple[tuple[str, str], ...] = ()
    answers: tuple[str, ...] = ()
    done: str = ""
    arithmetic: str = ""
    listing: bool = False


def param_of(entry: dict[str, Any]) -> Param:
    """A `Param` of its table."""
    return Param(
        entry["keys"],
        entry.get("kind", ""),
        entry.get("type", "string"),
        tuple(entry.get("descs", ())),
        entry.get("optional", False),
        tuple(entry.get("enum", ())),
    )


def spec_of(entry: dict[str, Any]) -> Spec:
    """A `Spec` of its table."""
    return Spec(
        entry["group"],
        entry["names"],
        tuple(entry["descs"]),
        tuple(param_of(param) for param in entry["params"]),
        tuple(entry["asks"]),
        tuple((keys, kind) for keys, kind in entry.get("fields", ())),
        tuple(entry.get("answers", ())),
        entry.get("done", ""),
        entry.get("arithmetic", ""),
        entry.get("listing", False),
    )


TABLES = wordings("tools")
ORDINARY: tuple[Spec, ...] = tuple(spec_of(entry) for entry in TABLES["everyday"])
VERBS: dict[str, tuple[tuple[str, ...], str]] = {
    verb: (tuple(entry["words"]), entry["past"]) for verb, entry in TABLES["verbs"].items()
}
OBJECTS: dict[str, tuple[str, ...]] = {thing: tuple(words) for thing, words in TABLES["objects"].items()}
OVERLAPS: dict[str, str] = TABLES["overlaps"]
QUESTIONS: dict[str, tuple[str, ...]] = {verb: tuple(asks) for verb, asks in TABLES["questions"].items()}
EXTRAS: dict[str, tuple[Param, str]] = {
    verb: (param_of(entry["param"]), entry["tail"]) for verb, entry in TABLES["extras"].items()
}
OBJECT_KINDS = ("code", "title", "person", "project", "code")


def composed(values: Values) -> tuple[str, str]:
    """A verb-object pair from this side of the split."""
    while True:
        pair = values.pick(list(VERBS)), values.pick(list(OBJECTS))
        if values.form(*pair):
            return pair


@dataclass
class Argument:
    """A parameter as one tool has it."""

    key: str
    param: Param
    desc: str
    required: bool


@dataclass
class Tool:
    """One tool of one dialogue."""

    name: str
    desc: str
    arguments: list[Argument]
    asks: tuple[str, ...]
    spec: Spec
    topic: tuple[str, ...] = ()  # (verb, object), or what else tells it from its neighbours
    opaque: bool = False
    schema: dict[str, Any] = field(default_factory=dict)

    def draw(self, values: Values, argument: Argument) -> str:
        """A value for an argument, as the user would write it."""
        if argument.param.enum:
            return values.pick(argument.param.enum)
        return values.of(argument.param.kind)


def typed(argument: Argument, text: str) -> Any:
    """The JSON value of an argument's text."""
    if argument.param.type == "integer":
        return int(text)
    if argument.param.type == "number":
        return float(text) if "." in text else int(text)
    return text


def schema_of(tool: Tool, values: Values) -> dict[str, Any]:
    """The function's schema in one of the shapes that real clients send."""
    properties: dict[str, Any] = {}
    for argument in tool.arguments:
        entry: dict[str, Any] = {"type": argument.param.type}
        if argument.desc and values.chance(0.9):
            entry["description"] = argument.desc
        if argument.param.enum:
            entry["enum"] = list(argument.param.enum)
        if values.chance(0.03):
            entry["title"] = argument.key.replace("_", " ").title()
        properties[argument.key] = entry
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    required = [argument.key for argument in tool.arguments if argument.required]
    if required or values.chance(0.5):
        parameters["required"] = required
    if values.chance(0.1):
        parameters["additionalProperties"] = False
    schema: dict[str, Any] = {"name": tool.name}
    if tool.desc:
        schema["description"] = tool.desc
    schema["parameters"] = parameters
    if values.chance(0.04):
        schema["strict"] = True
    return schema


def opaque_name(values: Values) -> str:
    """A function name that cannot be guessed."""
    words = [values.opaque(2) for _ in range(values.random.choice((1, 1, 2, 2, 3)))]
    roll = values.random.random()
    if roll < 0.75:
        return "_".join(words)
    if roll < 0.9:
        return words[0] + "".join(word.capitalize() for word in words[1:])
    return "_".join(words) + str(values.random.randint(1, 99))


def arguments_of(spec: Spec, values: Values, opaque_keys: bool, described: bool) -> list[Argument]:
    """Keys, descriptions and which are required, for one tool."""
    used: set[str] = set()
    arguments = []
    for param in spec.params:
        key = values.opaque(2) if opaque_keys else values.pick(param.keys.split())
        while key in used:
            key = values.opaque(2)
        used.add(key)
        desc = values.pick(param.descs) if param.descs and (described or (opaque_keys and len(spec.params) > 1)) else ""
        arguments.append(Argument(key, param, desc, not param.optional))
    return arguments


def ordinary_tool(spec: Spec, values: Values, opaque: bool) -> Tool:
    """A tool of an everyday kind, under one of its names or an invented one."""
    while True:
        described = values.chance(0.75) or opaque
        name = opaque_name(values) if opaque else values.pick(spec.names.split())
        desc = values.pick(spec.descs) if described else ""
        if values.form("tool", name, desc) or values.chance(0.02):
            break
    keys = values.chance(0.7 if opaque else 0.12)
    arguments = arguments_of(spec, values, keys, values.chance(0.4))
    tool = Tool(name, desc, arguments, spec.asks, spec, (spec.group, spec.names.split()[0]), opaque)
    tool.schema = schema_of(tool, values)
    return tool


def composed_tool(pair: tuple[str, str], values: Values, opaque: bool, words: tuple[str, str] | None = None) -> Tool:
    """A tool that does one thing with one kind of object; `words` are the wordings its schema should have."""
    verb, thing = pair
    verbs, past = VERBS[verb]
    verb_word, thing_word = words or (values.pick(verbs), values.pick(OBJECTS.get(thing, (thing,))))
    kind = values.pick(OBJECT_KINDS)
    keys = {
        "code": f"{thing_word}_id id number key reference",
        "title": "title name label",
        "person": "name person owner",
        "project": f"name {thing_word} title",
    }[kind]
    params = [Param(keys, kind, descs=(f"Which {thing_word}.", f"The {thing_word}.", f"Identifies the {thing_word}."))]
    tail = ""
    if verb in EXTRAS and values.chance(0.7):
        extra, tail = EXTRAS[verb]
        params.append(extra)
    name = opaque_name(values) if opaque else composed_name(verb_word.replace(" ", "_"), thing_word, values)
    wordings = OBJECTS.get(thing, (thing,))
    pairs = [(v, o) for v in verbs for o in wordings]
    if values.chance(0.5) and len(pairs) > 1:
        pairs.remove((verb_word, thing_word))  # requests then never have both of the schema's words
    asks = tuple(f"!{v} the {o} {{0}}{tail}" for v, o in pairs)
    if not tail and verb in QUESTIONS:
        asks += tuple(form.replace("OBJECT", o) for form in QUESTIONS[verb] for o in wordings)
    article = "an" if thing_word[0] in "aeiou" else "a"
    desc = values.pick(
        [
            f"{verb_word.capitalize()} {article} {thing_word}.",
            f"Use this to {verb_word} {article} {thing_word}.",
            f"Lets you {verb_word} the {thing_word} of your choice.",
            f"{verb_word} {thing_word}",
            f"{verb_word.capitalize()} one {thing_word} by its {params[0].keys.split()[-1]}.",
        ]
    )
    if not opaque and values.chance(0.2):
        desc = ""
    informs = verb in ("find", "count", "check", "describe")
    result = {
        "find": ("location|place|shelf", "place"),
        "count": ("count|number|total", "integer"),
        "check": ("status|state|condition", "state"),
        "describe": ("summary|description|text", "title"),
    }
    spec = Spec(
        "composed",
        name,
        (desc,),
        tuple(params),
        asks,
        fields=(result[verb],) if informs else (),
        done=f"the {thing_word} {{0}} is {past}",
    )
    arguments = arguments_of(spec, values, values.chance(0.6 if opaque else 0.2), values.chance(0.4))
    tool = Tool(name, desc, arguments, asks, spec, pair, opaque)
    tool.schema = schema_of(tool, values)
    return tool


def composed_name(verb: str, thing: str, values: Values) -> str:
    return values.pick(
        [
            f"{verb}_{thing}",
            f"{verb}_{thing}",
            f"{thing}_{verb}",
            f"{verb}{thing.capitalize()}",
            f"{verb}_the_{thing}",
            f"{verb}_{thing}_{values.opaque(1)}",
            f"{values.opaque(1)}_{verb}_{thing}",
        ]
    )


def invented_tool(values: Values, word: str, opaque: bool) -> Tool:
    """A tool about an invented noun: only the word itself, in description or name, says what it is for."""
    attribute = values.opaque()
    names = (opaque_name(values),) if opaque else (f"get_{word}", f"{word}_lookup", word, f"{word}_of", f"find_{word}")
    kind = values.pick(("person", "city", "code", "project", "thing"))
    desc = values.pick(
        [f"Get the {word} of a {attribute}.", f"Return the {word}.", f"Looks up {word} values.", f"The {word} service."]
    )
    param = Param(f"name key item {attribute} target", kind, descs=(f"The {attribute}.",))
    asks = (
        f"What is the {word} of {{0}}?",
        f"!get the {word} for {{0}}",
        f"!tell me the {word} of {{0}}",
        f"Which {word} does {{0}} have?",
        f"!look up {word} for {{0}}",
    )
    result = values.pick(["integer", "code", "thing", "title", "decimal"])
    spec = Spec(
        "invented",
        word,
        (desc,),
        (param,),
        asks,
        fields=((f"{word}|value|result|{word}", result),),
        answers=(f"The {word} of {{0}} is {{a}}.",),
    )
    keep = opaque or values.chance(0.6)
    tool = Tool(
        values.pick(names),
        desc if keep else "",
        arguments_of(spec, values, values.chance(0.3), values.chance(0.3)),
        asks,
        spec,
        (word,),
        opaque,
    )
    tool.schema = schema_of(tool, values)
    return tool


def direct_tool(values: Values) -> Tool:
    """A tool without a description, called by its name: `call NAME with KEY VALUE and KEY VALUE`."""
    name = opaque_name(values)
    params = []
    for _ in range(values.random.choice((1, 1, 2, 2, 3))):
        kind, json_type = values.pick(
            [
                ("text", "string"),
                ("integer", "integer"),
                ("decimal", "number"),
                ("code", "string"),
                ("thing", "string"),
                ("signed", "integer"),
                ("person", "string"),
            ]
        )
        params.append(Param(values.opaque(2), kind, json_type))
    keys = [param.keys for param in params]
    asks = (
        f"!call {name} with " + " and ".join(f"{key} {{{i}}}" for i, key in enumerate(keys)),
        f"!run {name}, " + ", ".join(f"{key}={{{i}}}" for i, key in enumerate(keys)),
        f"!use {name} with " + ", ".join(f"{key} set to {{{i}}}" for i, key in enumerate(keys)),
    )
    spec = Spec(
        "direct",
        name,
        ("",),
        tuple(params),
        asks,
        fields=(("result|value|output", values.pick(["integer", "code", "title", "thing"])),),
    )
    arguments = [Argument(param.keys, param, "", True) for param in params]
    tool = Tool(name, "", arguments, asks, spec, (name,), True)
    tool.schema = schema_of(tool, values)
    return tool


def related_pairs(pair: tuple[str, str], values: Values) -> list[tuple[str, str]]:
    """Near misses of a verb-object pair: the same object with other verbs, the same verb with other objects."""
    verb, thing = pair
    if thing not in OBJECTS:
        return [(other, thing) for other in values.random.sample(list(VERBS), 3) if other != verb] + [
            (verb, values.of("thing"))
        ]
    others = [(other, thing) for other in VERBS if other != verb and values.form(other, thing)]
    others = values.random.sample(others, min(len(others), 3))
    others += values.random.sample(
        [(verb, other) for other in OBJECTS if other != thing and values.form(verb, other)], 2
    )
    return others


def collide(one: Tool, other: Tool) -> bool:
    """Whether one request could mean both tools."""
    if one.topic == other.topic or one.name == other.name:
        return True
    if {one.spec.group, other.spec.group} & {"composed"}:
        pairs = [(a, b) for a, b in ((one, other), (other, one)) if a.spec.group == "composed"]
        return any(OVERLAPS.get(a.topic[1]) == b.spec.group for a, b in pairs)
    return False


def offer(values: Values, count: int) -> list[Tool]:
    """The tools of one dialogue: `count` of them, with near misses of each other, in random order."""
    tools: list[Tool] = []
    opaque_share = values.pick((0.0, 0.0, 0.3, 0.6, 1.0))

    def add(tool: Tool) -> None:
        if len(tools) < count and not any(collide(tool, other) for other in tools):
            tools.append(tool)

    while len(tools) < count:
        opaque = values.chance(opaque_share)
        roll = values.random.random()
        if roll < 0.45:
            spec = values.pick(ORDINARY)
            add(ordinary_tool(spec, values, opaque))
            siblings = [other for other in ORDINARY if other.group == spec.group and other is not spec]
            for sibling in values.random.sample(siblings, min(len(siblings), values.random.randint(0, 2))):
                add(ordinary_tool(sibling, values, values.chance(opaque_share)))
        elif roll < 0.8:
            # An unheard-of object has one wording, so that it must be matched by its letters.
            pair = composed(values) if values.chance(0.7) else (values.pick(list(VERBS)), values.of("thing"))
            add(composed_tool(pair, values, opaque))
            nears = related_pairs(pair, values)
            for near in values.random.sample(nears, min(len(nears), values.random.randint(1, 3))):
                add(composed_tool(near, values, values.chance(opaque_share)))
        elif roll < 0.92:
            word = values.opaque()
            add(invented_tool(values, word, opaque))
            if values.chance(0.5):
                add(invented_tool(values, values.opaque(), values.chance(opaque_share)))
        else:
            add(direct_tool(values))
    values.random.shuffle(tools)
    return tools
