"""Tools of a session: which ones the model is offered, and which of its calls run here."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from tokenspeed.client.protocol.items import FunctionCallItem, FunctionCallOutputItem, FunctionTool
from tokenspeed.client.schema import function_name, function_tool, parameters

Tool = Callable[..., Any] | FunctionTool | Mapping[str, Any]
"""A Python function, or a schema in the style of the Responses API or of Chat Completions."""


class Function:
    """A Python function that the model may call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function_name(function)
        self.call = function
        self.is_async = inspect.iscoroutinefunction(function)
        signature = inspect.signature(function)
        self._annotations = parameters(function)
        self._required = [
            name for name in self._annotations if signature.parameters[name].default is inspect.Parameter.empty
        ]

    def bind(self, arguments: str) -> dict[str, Any]:
        """Keyword arguments from a call's JSON text, converted to the parameters' types; text that holds a number, as
        models sometimes write one, is taken for the number.

        Raises:
            ValueError: no JSON object, or a value of another type.
            TypeError: an argument is missing or unknown.
        """
        try:
            values = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ValueError(f"the arguments are no JSON object: {error}") from None
        unknown = [name for name in values if name not in self._annotations]
        missing = [name for name in self._required if name not in values]
        if unknown or missing:
            parts = [f"unknown argument {name!r}" for name in unknown] + [f"missing argument {n!r}" for n in missing]
            raise TypeError(f"{self.name}: {', '.join(parts)}")
        return {name: self._convert(name, value) for name, value in values.items()}

    def _convert(self, name: str, value: Any) -> Any:
        try:
            return msgspec.convert(value, self._annotations[name], strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"argument {name!r}: {error}") from None


class Toolset:
    """A session's tools.

    Attributes:
        offered: what the server is told.
        functions: those that run here, by name.
    """

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self.offered: list[FunctionTool] = []
        self.functions: dict[str, Function] = {}
        for tool in tools:
            if isinstance(tool, FunctionTool):
                offered = tool
            elif isinstance(tool, Mapping):
                offered = _from_schema(tool)
            elif callable(tool):
                offered = function_tool(tool)
                self.functions[offered.name] = Function(tool)
            else:
                raise TypeError(f"a tool is a function or a schema, not {type(tool).__name__}")
            if any(offered.name == other.name for other in self.offered):
                raise ValueError(f"two tools are named {offered.name!r}")
            self.offered.append(offered)

    def refuse_async(self) -> None:
        """Raise TypeError if one of the functions is `async`: the blocking client has no loop to run it."""
        for function in self.functions.values():
            if function.is_async:
                raise TypeError(f"{function.name} is async; use AsyncClient, or give a plain function")

    def runs(self, call: FunctionCallItem) -> bool:
        """Whether `call` is answered here: by a function, or by the error that it was not understood. What is left is
        the caller's, who gave a schema without a function."""
        schema_only = {tool.name for tool in self.offered} - self.functions.keys()
        return call.parse_error is not None or call.name not in schema_only

    def run(self, call: FunctionCallItem) -> FunctionCallOutputItem:
        """Run the function; an exception becomes the result's text, `error: ValueError: …`."""
        try:
            function, arguments = self._prepare(call)
            return tool_output(call, function.call(**arguments))
        except Exception as error:
            return tool_output(call, _error_text(error))

    async def run_async(self, call: FunctionCallItem) -> FunctionCallOutputItem:
        """As `run`; a plain function runs in a thread, so that it does not hold up the event loop."""
        try:
            function, arguments = self._prepare(call)
            if function.is_async:
                return tool_output(call, await function.call(**arguments))
            return tool_output(call, await asyncio.to_thread(function.call, **arguments))
        except Exception as error:
            return tool_output(call, _error_text(error))

    def _prepare(self, call: FunctionCallItem) -> tuple[Function, dict[str, Any]]:
        if call.parse_error is not None:
            raise ValueError(f"the call could not be read: {call.parse_error}")
        function = self.functions.get(call.name)
        if function is None:
            raise NameError(f"there is no tool {call.name!r}; there are: {', '.join(self.functions) or 'none'}")
        return function, function.bind(call.arguments)


def tool_output(call: FunctionCallItem | str, value: Any) -> FunctionCallOutputItem:
    """The item that answers a tool call: input for the session's next turn.

    Args:
        call: the call, or its `call_id`.
        value: text is passed on unchanged; anything else as JSON, or by `str` where JSON has no form for it.
    """
    call_id = call if isinstance(call, str) else call.call_id
    return FunctionCallOutputItem(call_id, value if isinstance(value, str) else _as_text(value))


def _as_text(value: Any) -> str:
    try:
        return msgspec.json.encode(value, enc_hook=str).decode()
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return str(value)


def _error_text(error: Exception) -> str:
    return f"error: {type(error).__name__}: {error}"


def _from_schema(schema: Mapping[str, Any]) -> FunctionTool:
    inner = schema.get("function")
    flat = {**inner, "type": "function"} if isinstance(inner, Mapping) else {"type": "function", **schema}
    try:
        return msgspec.convert(flat, FunctionTool)
    except msgspec.ValidationError as error:
        raise ValueError(f"a tool's schema: {error}") from None
