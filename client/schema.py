"""JSON Schema of a function's parameters, from its signature."""

from __future__ import annotations

import collections.abc
import enum
import inspect
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from tokenspeed.client.docstrings import parse_docstring
from tokenspeed.client.protocol.items import FunctionTool

Schema = dict[str, Any]

_SIMPLE: dict[Any, Schema] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    type(None): {"type": "null"},
}
_ARRAYS = (list, set, frozenset, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Set)
_OBJECTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def function_tool(function: Callable[..., Any]) -> FunctionTool:
    """The tool that a Python function is to a model: its name, its docstring's summary, and a JSON Schema of its
    parameters (annotations, defaults, and what the docstring says of each).

    Raises:
        TypeError: a parameter that a call by name cannot give (positional-only, `*args`, `**kwargs`), or a type that
            has no JSON Schema.
    """
    name = function_name(function)
    docstring = parse_docstring(inspect.getdoc(function))
    properties: dict[str, Schema] = {}
    required: list[str] = []
    for parameter, annotation in parameters(function).items():
        try:
            schema = schema_of(annotation)
        except TypeError as error:
            raise TypeError(f"{name}: parameter {parameter!r}: {error}") from None
        default = inspect.signature(function).parameters[parameter].default
        if default is inspect.Parameter.empty:
            required.append(parameter)
        else:
            schema = _with_default(schema, default)
        if parameter in docstring.parameters and "description" not in schema:
            schema["description"] = docstring.parameters[parameter]
        properties[parameter] = schema
    described: Schema = {"type": "object", "properties": properties, "required": required}
    return FunctionTool(name, docstring.description or None, described)


def function_name(function: Callable[..., Any]) -> str:
    """The name under which a model calls `function`. Raises TypeError if it has none, or is a lambda."""
    name = getattr(function, "__name__", None)
    if not isinstance(name, str) or name == "<lambda>":
        raise TypeError(f"{function!r} has no name that a model could call; give a function made with def")
    return name


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Each parameter's annotation; one without has that of its default, or `Any`.

    Raises:
        TypeError: a parameter that cannot be given by name, or an annotation that cannot be resolved.
    """
    name = function_name(function)
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(f"{name}: an annotation cannot be resolved: {error}") from None
    found: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{name}: parameter {parameter} cannot be given by name, so no model can fill it")
        found[parameter.name] = hints.get(parameter.name, Any)
        if parameter.name not in hints and type(parameter.default) in (str, bool, int, float):
            found[parameter.name] = type(parameter.default)
    return found


def schema_of(annotation: Any) -> Schema:
    """A JSON Schema for a Python type. Raises TypeError if it has none."""
    if annotation is Any:
        return {}
    if annotation in _SIMPLE:
        return dict(_SIMPLE[annotation])
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _enum([member.value for member in annotation])
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _annotated(arguments)
    if origin is Literal:
        return _enum(list(arguments))
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(argument) for argument in arguments]}
    bare = origin or annotation
    if bare in _ARRAYS or (bare is tuple and (not arguments or arguments[-1] is Ellipsis)):
        return {"type": "array", "items": schema_of(arguments[0])} if arguments else {"type": "array"}
    if bare in _OBJECTS:
        return {"type": "object", "additionalProperties": schema_of(arguments[1])} if arguments else {"type": "object"}
    return _structured(annotation)


def _annotated(arguments: tuple[Any, ...]) -> Schema:
    schema = schema_of(arguments[0])
    for note in arguments[1:]:
        if isinstance(note, str):
            schema["description"] = note
        elif isinstance(note, msgspec.Meta) and note.description is not None:
            schema["description"] = note.description
    return schema


def _enum(values: list[Any]) -> Schema:
    kinds = {type(value) for value in values}
    kind = kinds.pop() if len(kinds) == 1 else None
    return {**_SIMPLE.get(kind, {}), "enum": values}


def _structured(annotation: Any) -> Schema:
    """Dataclasses, typed dicts, structs and whatever else msgspec can describe, with `$defs` beside them."""
    try:
        (schema,), definitions = msgspec.json.schema_components([annotation], ref_template="#/$defs/{name}")
    except (TypeError, ValueError) as error:
        raise TypeError(f"{annotation!r} has no JSON Schema: {error}") from None
    reference = schema.pop("$ref", None)
    if reference is not None:
        schema |= definitions.pop(reference.rpartition("/")[2])
    return {**schema, "$defs": definitions} if definitions else schema


def _with_default(schema: Schema, default: Any) -> Schema:
    """`schema` of a parameter that may be left out. None as a default is what leaving it out means, so it is no value
    that the model need write."""
    choices = schema.get("anyOf")
    if default is None:
        if choices is not None:
            kept = [choice for choice in choices if choice != {"type": "null"}]
            rest = {key: value for key, value in schema.items() if key != "anyOf"}
            return {**kept[0], **rest} if len(kept) == 1 else {"anyOf": kept, **rest}
        return schema
    try:
        return {**schema, "default": msgspec.to_builtins(default)}
    except TypeError:
        return schema
