from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Annotated, Any, Literal, Optional, TypedDict

import pytest

from tokenspeed.client.schema import function_tool, schema_of


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Place:
    street: str
    number: int = 1


class Address(TypedDict):
    place: Place
    tags: list[str]


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (Any, {}),
        (list, {"type": "array"}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (tuple[str, ...], {"type": "array", "items": {"type": "string"}}),
        (Sequence[float], {"type": "array", "items": {"type": "number"}}),
        (dict, {"type": "object"}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[1, "b"], {"enum": [1, "b"]}),
        (Colour, {"type": "string", "enum": ["red", "blue"]}),
        (Level, {"type": "integer", "enum": [1, 2]}),
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP045
        (list[Literal["x"]], {"type": "array", "items": {"type": "string", "enum": ["x"]}}),
        (Annotated[int, "How many."], {"type": "integer", "description": "How many."}),
    ],
)
def test_schema_of_a_type(annotation: Any, expected: dict[str, Any]) -> None:
    assert schema_of(annotation) == expected


def test_a_structure_brings_its_definitions() -> None:
    schema = schema_of(Address)
    assert schema["required"] == ["place", "tags"]
    assert schema["properties"]["place"] == {"$ref": "#/$defs/Place"}
    assert schema["$defs"]["Place"]["properties"]["number"] == {"type": "integer", "default": 1}


def test_a_function_becomes_a_tool() -> None:
    def book(name: str, seats: int = 2, colour: Colour = Colour.RED, note: str | None = None, *, fast=False) -> str:
        """Book a table.

        Args:
            name: Whose table it is.
            note: What to tell the cook.
        """
        return name

    tool = function_tool(book)
    assert (tool.name, tool.description) == ("book", "Book a table.")
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "Whose table it is."},
            "seats": {"type": "integer", "default": 2},
            "colour": {"type": "string", "enum": ["red", "blue"], "default": "red"},
            "note": {"type": "string", "description": "What to tell the cook."},
            "fast": {"type": "boolean", "default": False},
        },
        "required": ["name"],
    }


def test_a_bound_method_has_no_self() -> None:
    class Shop:
        def price(self, article: str) -> float:
            """What it costs."""
            return 1.0

    assert list(function_tool(Shop().price).parameters["properties"]) == ["article"]


def test_what_no_model_could_call_is_refused() -> None:
    def rest(*names: str) -> None: ...
    def options(**names: str) -> None: ...
    def positional(name: str, /) -> None: ...
    def unknown(handle: Thread) -> None: ...

    for function in (rest, options, positional):
        with pytest.raises(TypeError, match="cannot be given by name"):
            function_tool(function)
    with pytest.raises(TypeError, match=r"parameter 'handle'.*no JSON Schema"):
        function_tool(unknown)
    with pytest.raises(TypeError, match="no name"):
        function_tool(lambda name: name)
