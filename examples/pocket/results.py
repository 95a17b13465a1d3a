"""What tools return, and the sentence that answers with it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from phrasing import ACKS, ERRORS, capital, small
from render import QUOTED, Piece, as_text
from tools import Spec, Tool
from values import Values

NUMBERS = frozenset(("temperature", "integer", "percent", "count", "money", "decimal"))  # kinds that are JSON numbers


@dataclass
class Result:
    """A tool's text, the answering sentence, the values that it must quote, and the result's fields, if it has any."""

    text: str
    sentence: list[Piece]
    quotes: list[str]
    fields: dict[str, str] = field(default_factory=dict)
    failed: bool = False


def quoting(before: str, value: str) -> list[Piece]:
    """A sentence that ends with a value."""
    return [Piece(before), Piece(value, QUOTED), Piece(".")]


def result_of(values: Values, tool: Tool, arguments: dict[str, Any]) -> Result:
    """One of the things that the tool may return."""
    spec = tool.spec
    shown = {
        str(number): as_text(arguments[argument.key])
        for number, argument in enumerate(tool.arguments)
        if argument.key in arguments
    }
    if values.chance(0.07):
        return failure(values, shown)
    if spec.done or not (spec.fields or spec.arithmetic):
        return deed(values, tool, shown)
    if spec.listing:
        return findings(values, spec)
    fields = fields_of(values, spec, arguments)
    if values.chance(0.12) and not spec.arithmetic:
        text = prose(values, fields, shown)
        return Result(text, quoting("The result is: ", text), [text])
    return report(values, tool, arguments, fields, shown)


def failure(values: Values, shown: dict[str, str]) -> Result:
    """An error."""
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
    return Result(text, quoting("The tool reported an error: ", message), [message], failed=True)


def deed(values: Values, tool: Tool, shown: dict[str, str]) -> Result:
    """The acknowledgement of something done, sometimes with a reference."""
    done = "It is done"
    if complete(tool.spec.done, shown):
        form = tool.spec.done or "it is done"
        done = capital(form.format(*[shown.get(str(number), "") for number in range(len(tool.arguments))]))
    if values.chance(0.2):
        number = values.of("code")
        key = values.pick(("id", "id", "number", "reference", "key"))
        text = json_text(values, {key: number, **({"status": "created"} if values.chance(0.3) else {})})
        return Result(text, quoting(f"Done, {small(done)}; the {key} is ", number), [number], {key: number})
    return Result(values.pick(ACKS), [Piece(f"Done, {small(done)}.")], [])


def findings(values: Values, spec: Spec) -> Result:
    """A list, possibly empty."""
    keys, kind = spec.fields[0]
    items = list(dict.fromkeys(values.of(kind) for _ in range(values.random.choice((0, 1, 1, 2, 2, 3)))))
    roll = values.random.random()
    if roll < 0.45:
        text = json_text(values, {values.pick(keys.split("|")): items})
    elif roll < 0.8 or not items:
        text = json.dumps(items, ensure_ascii=False)
    else:
        text = "\n".join(items) if values.chance(0.5) else "\n".join(f"- {item}" for item in items)
    if not items:
        return Result(text, [Piece("I found nothing.")], [])
    pieces = [Piece("I found ")]
    for number, item in enumerate(items):
        pieces.append(Piece("" if not number else " and " if number == len(items) - 1 else ", "))
        pieces.append(Piece(item, QUOTED))
    return Result(text, [*pieces, Piece(".")], items)


def report(
    values: Values, tool: Tool, arguments: dict[str, Any], fields: dict[str, Any], shown: dict[str, str]
) -> Result:
    """Fields, as an object or bare; answered in the tool's own words where it returned just what those need."""
    spec = tool.spec
    names, texts = list(fields), [as_text(value) for value in fields.values()]
    opaque = values.chance(0.12) or (tool.opaque and values.chance(0.3))
    if opaque:
        names = [values.opaque(2) for _ in names]
    wording = spec.answers[0] if spec.answers and complete(spec.answers[0], shown) else ""
    if len(names) == 1 and values.chance(0.4):
        own = wording and "{b}" not in wording
        sentence = filled(wording, shown, texts) if own else quoting("The result is ", texts[0])
        return Result(texts[0], sentence, texts, {"result": texts[0]})
    if len(names) == 2 and values.chance(0.12):
        text = f"{texts[1]}, {texts[0]}"
        return Result(text, quoting("The result is: ", text), texts)
    whole = bool(wording) and not opaque and len(names) == max(1, len(spec.fields))
    if (not whole and values.chance(0.25)) or values.chance(0.06):
        names.append(values.opaque(2))
        texts.append(values.of(values.pick(("code", "thing", "integer"))))
        whole = False
    data: dict[str, Any] = dict(zip(names, list(fields.values()) + texts[len(fields) :], strict=True))
    if values.chance(0.12):
        data = {**{key: value for key, value in arguments.items() if key not in data}, **data}
    text = json_text(values, data)
    named = dict(zip(names, texts, strict=True))
    if whole:
        return Result(text, filled(values.pick(spec.answers[:1]), shown, texts), texts, named)
    pieces = []
    for number, (name, value) in enumerate(zip(names, texts, strict=True)):
        joint = "The " if not number else " and the " if number == len(names) - 1 else ", the "
        pieces += [Piece(f"{joint}{name.replace('_', ' ')} is "), Piece(value, QUOTED)]
    return Result(text, [*pieces, Piece(".")], texts, named)


def prose(values: Values, fields: dict[str, Any], shown: dict[str, str]) -> str:
    """A result in words."""
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


def json_text(values: Values, data: dict[str, Any]) -> str:
    """A result as JSON text, in the spacings that clients use."""
    if values.chance(0.05):
        data = {values.pick(("data", "result", "response")): data}
    if values.chance(0.2):
        return json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(data, ensure_ascii=values.chance(0.1))


def fields_of(values: Values, spec: Spec, arguments: dict[str, Any]) -> dict[str, Any]:
    """The result's fields: keys drawn from their wordings, numbers as numbers, sums computed."""
    if spec.arithmetic:
        left, right = list(arguments.values())[:2]
        if spec.arithmetic == "/":
            outcome = round(left / (right or 1), 2)
        else:
            outcome = {"+": left + right, "-": left - right, "*": left * right}[spec.arithmetic]
        return {values.pick(("result", "sum" if spec.arithmetic == "+" else "value", "answer")): outcome}
    chosen = {}
    for keys, kind in spec.fields if values.chance(0.75) else spec.fields[:1]:
        text = values.of(kind)
        number: Any = text
        if kind in NUMBERS and values.chance(0.85):
            number = float(text) if "." in text else int(text)
        chosen[values.pick(keys.split("|"))] = number
    return chosen


def complete(form: str, shown: dict[str, str]) -> bool:
    """Whether all arguments that a wording needs were given."""
    return all(f"{{{number}}}" not in form or str(number) in shown for number in range(4))


def filled(form: str, shown: dict[str, str], results: list[str]) -> list[Piece]:
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
