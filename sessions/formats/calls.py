"""The ways of writing tool calls, and which of them a template uses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from tokenspeed.sessions.formats.arguments import ParameterTypes
from tokenspeed.sessions.formats.call import CallBody
from tokenspeed.sessions.formats.json_call import JsonCallBody
from tokenspeed.sessions.formats.xml_call import XmlCallBody


@dataclass(frozen=True)
class CallFormat:
    """A way of writing a call's body.

    Attributes:
        shape: for people.
        unfinished: what is said of a call whose closing tag comes too early.
    """

    shape: str
    unfinished: str
    body: Callable[[ParameterTypes], CallBody]

    def reads(self, text: str, name: str, arguments: dict[str, str]) -> bool:
        """Whether `text` is a call of `name` with `arguments` in this format."""
        body = self.body(ParameterTypes([]))
        body.feed(text)
        return body.done and body.name == name and json.loads(body.arguments) == arguments


XML = CallFormat("<tool_call><function=…><parameter=…>", "the call ends before </function>", XmlCallBody)
JSON = CallFormat(
    '<tool_call>{"name": …, "arguments": …}', "the call ends before its object does", lambda types: JsonCallBody()
)
CALL_FORMATS = (XML, JSON)
