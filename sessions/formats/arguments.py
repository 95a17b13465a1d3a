"""Types of tool parameters: how a value's text becomes JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tokenspeed.client.protocol.items import FunctionTool

_TYPES = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_WORDS = {"True": "true", "False": "false", "None": "null"}
_DEPTH = 8  # references and unions followed before a schema counts as saying nothing


class ParameterTypes:
    """The JSON types that each tool's schema allows for each parameter."""

    def __init__(self, tools: Iterable[FunctionTool]) -> None:
        self._schemas = {tool.name: tool.parameters for tool in tools}

    def of(self, tool: str, parameter: str) -> frozenset[str]:
        """`{"string"}` for tools, parameters and schemas that say nothing."""
        root = self._schemas.get(tool, {})
        properties = root.get("properties")
        schema = properties.get(parameter) if isinstance(properties, dict) else None
        return frozenset(_types(schema, root, _DEPTH)) or frozenset({"string"})


def json_text(value: str, types: frozenset[str]) -> str:
    """A parameter's value as JSON: the text itself where it is JSON of an allowed type, otherwise a string of it.

    Where strings are allowed every value is one, but for `null` where that is allowed too. `True`, `False` and `None`
    count as JSON's words: some templates of the family write past calls so, and the model learns it from them.
    """
    candidate = value.strip()
    candidate = _WORDS.get(candidate, candidate)
    if "string" in types:
        return candidate if candidate == "null" and "null" in types else quoted(value)
    try:
        parsed = json.loads(candidate, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return quoted(value)
    return candidate if _type_of(parsed) & types else quoted(value)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any, root: dict[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, dict) or depth == 0:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _types(_referred(reference, root), root, depth - 1)
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    found = {name for name in names if isinstance(name, str) and name in _TYPES}
    if found:
        return found
    for union in ("anyOf", "oneOf", "allOf"):
        members = schema.get(union)
        for member in members if isinstance(members, list) else []:
            found |= _types(member, root, depth - 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    for value in values if isinstance(values, list) else []:
        found |= _type_of(value)
    return found


def _referred(reference: str, root: dict[str, Any]) -> Any:
    if not reference.startswith("#/"):
        return None
    schema: Any = root
    for step in reference[2:].split("/"):
        schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return schema


def _type_of(value: Any) -> set[str]:
    """The JSON types of a value; an integer is a number too."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
