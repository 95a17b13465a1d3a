from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.client.protocol.items import FunctionTool
from tokenspeed.sessions.formats.arguments import ParameterTypes, json_text

SCHEMAS: list[tuple[Any, set[str]]] = [
    ({"type": "integer"}, {"integer"}),
    ({"type": ["integer", "null"]}, {"integer", "null"}),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
    ({"allOf": [{"$ref": "#/$defs/size"}]}, {"number"}),
    ({"$ref": "#/$defs/loop"}, {"string"}),
    ({"$ref": "#/$defs/absent"}, {"string"}),
    ({"$ref": "https://example.com/x"}, {"string"}),
    ({"enum": ["a", "b"]}, {"string"}),
    ({"enum": [1, 2, None]}, {"integer", "number", "null"}),
    ({"const": True}, {"boolean"}),
    ({"type": "thing"}, {"string"}),
    ({}, {"string"}),
    (True, {"string"}),
]


@pytest.mark.parametrize(("schema", "expected"), SCHEMAS)
def test_types_of_a_schema(schema: Any, expected: set[str]) -> None:
    definitions = {"size": {"type": "number"}, "loop": {"$ref": "#/$defs/loop"}}
    tool = FunctionTool("f", parameters={"properties": {"p": schema}, "$defs": definitions})
    assert ParameterTypes([tool]).of("f", "p") == expected


def test_unknown_tools_and_parameters_take_strings() -> None:
    types = ParameterTypes([FunctionTool("f", parameters={"properties": ["p"]}), FunctionTool("g")])
    for tool, parameter in [("f", "p"), ("g", "p"), ("h", "p")]:
        assert types.of(tool, parameter) == {"string"}


@pytest.mark.parametrize(
    ("value", "types", "expected"),
    [
        ("5", {"integer"}, "5"),
        (" 5\n", {"integer"}, "5"),
        ("5.0", {"integer"}, "5.0"),
        ("5.5", {"integer"}, '"5.5"'),
        ("12345678901234567890123", {"integer"}, "12345678901234567890123"),
        ("1.50", {"number"}, "1.50"),
        ("5", {"number"}, "5"),
        ("NaN", {"number"}, '"NaN"'),
        ("five", {"integer"}, '"five"'),
        ("true", {"boolean"}, "true"),
        ("1", {"boolean"}, '"1"'),
        ("true", {"integer"}, '"true"'),
        ("True", {"boolean"}, "true"),
        ("None", {"integer", "null"}, "null"),
        ("None", {"integer"}, '"None"'),
        ("False", {"string"}, '"False"'),
        ("null", {"null", "string"}, "null"),
        ("null", {"string"}, '"null"'),
        ("5", {"integer", "string"}, '"5"'),
        ('{"a" : [1]}', {"object"}, '{"a" : [1]}'),
        ('{"a": ', {"object"}, '"{\\"a\\": "'),
        ("[" * 100_000, {"array"}, '"' + "[" * 100_000 + '"'),
        ("", {"integer"}, '""'),
    ],
)
def test_a_value_as_json(value: str, types: set[str], expected: str) -> None:
    assert json_text(value, frozenset(types)) == expected


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner)))
def test_json_of_an_allowed_type_comes_back(value: Any) -> None:
    types = frozenset({"null", "boolean", "integer", "number", "array", "object"})
    found = json.loads(json_text(json.dumps(value), types))
    assert found == (json.dumps(value) if isinstance(value, str) else value)
