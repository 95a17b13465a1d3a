"""Bounds on what clients give, checked before anything is built from it."""

from __future__ import annotations

from typing import Any

from tokenspeed.client.protocol.errors import SessionError
from tokenspeed.client.protocol.items import FunctionTool

MAX_INSTRUCTIONS = 1_000_000
MAX_TOOLS = 256
MAX_TOOL_NAME = 128
MAX_TOOL_SIZE = 100_000
"""Characters and values of a tool's description and schema together."""
MAX_TOOLS_SIZE = 1_000_000
MAX_SCHEMA_DEPTH = 32
MAX_LABELS = 32
MAX_LABEL_NAME = 64
MAX_LABEL_VALUE = 512
MAX_FORKS = 64
MAX_ANSWERS = 64
MAX_ITEMS = 4096
MAX_PAGE = 1000


def check_number(name: str, number: int, most: int, least: int = 0) -> None:
    """Raises: SessionError `bad_request`, naming the number and the limit."""
    if not least <= number <= most:
        detail = {"number": number, "limit": most if number > most else least}
        raise SessionError("bad_request", f"{name} is {number}; it must be between {least} and {most}", detail=detail)


def check_instructions(instructions: str | None) -> None:
    check_number("the length of instructions", len(instructions or ""), MAX_INSTRUCTIONS)


def check_tools(tools: list[FunctionTool]) -> int:
    """Their size in all. Raises: SessionError `bad_request`."""
    check_number("the number of tools", len(tools), MAX_TOOLS)
    names: set[str] = set()
    size = 0
    for tool in tools:
        check_number("the length of a tool's name", len(tool.name), MAX_TOOL_NAME, 1)
        if tool.name in names:
            raise SessionError("bad_request", f"the tool name {tool.name!r} is given more than once")
        names.add(tool.name)
        size += _check_tool(tool)
        check_number("the size of all tools", size, MAX_TOOLS_SIZE)
    return size


def check_labels(labels: dict[str, str]) -> None:
    check_number("the number of labels", len(labels), MAX_LABELS)
    for name, value in labels.items():
        check_number("the length of a label's name", len(name), MAX_LABEL_NAME, 1)
        check_number(f"the length of label {name!r}", len(value), MAX_LABEL_VALUE)


def _check_tool(tool: FunctionTool) -> int:
    size = len(tool.description or "")
    waiting: list[tuple[Any, int]] = [(tool.parameters, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_SCHEMA_DEPTH and isinstance(value, dict | list):
            message = f"the schema of tool {tool.name!r} is nested {depth} deep; at most {MAX_SCHEMA_DEPTH} are allowed"
            raise SessionError("bad_request", message, detail={"number": depth, "limit": MAX_SCHEMA_DEPTH})
        size += len(value) if isinstance(value, str) else 1
        if isinstance(value, dict):
            size += sum(len(str(key)) for key in value)
            waiting += [(entry, depth + 1) for entry in value.values()]
        elif isinstance(value, list):
            waiting += [(entry, depth + 1) for entry in value]
    check_number(f"the size of tool {tool.name!r}", size, MAX_TOOL_SIZE)
    return size
