"""A checkpoint's chat template, rendered as transformers renders it."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from tokenspeed.sessions.formats.segments import Contents, Segment

Message = dict[str, Any]
"""A message as templates read it: `role`, `content` and, of the assistant, `reasoning_content` and `tool_calls`."""


class FormatError(ValueError):
    """A chat template cannot be read, fails to render, or is of an unknown format; the message says why."""


class ChatTemplate:
    """Renders messages to text, or to segments that tell the format's own text from what people and tools wrote."""

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None) -> None:
        if Contents.occurs_in(source):
            raise FormatError("the chat template uses the private characters that mark contents")
        self._special_tokens = special_tokens or {}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise FormatError(f"the chat template is not valid: {error}") from error

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate:
        """The template of a model directory: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`
        (a text, or a list of named ones of which `default` is taken).

        Raises:
            FormatError: there is none, or it is not valid.
        """
        config = _read_config(directory / "tokenizer_config.json")
        try:
            source: Any = (directory / "chat_template.jinja").read_text(encoding="utf-8")
        except FileNotFoundError:
            source = config.get("chat_template")
        except (OSError, UnicodeDecodeError) as error:
            raise FormatError(f"{directory / 'chat_template.jinja'} cannot be read: {error}") from error
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            raise FormatError(f"{directory} has no chat template (chat_template.jinja or tokenizer_config.json)")
        return cls(source, _special_tokens(config))

    def text(self, messages: list[Message], tools: list[Any] | None = None, **options: Any) -> str:
        """The template's own output. `options`: `add_generation_prompt`, `preserve_thinking`, ….

        Raises:
            FormatError: the template refused or failed.
        """
        return self._render(messages, tools, options)

    def segments(
        self, messages: list[Message], contents: Contents, tools: list[Any] | None = None, **options: Any
    ) -> list[Segment]:
        """The same for messages whose texts were put into `contents`; JSON that the template writes joins them."""
        return contents.split(self._render(messages, tools, options | {_CONTENTS: contents}))

    def _render(self, messages: list[Message], tools: list[Any] | None, options: dict[str, Any]) -> str:
        try:
            return self._template.render(
                **self._special_tokens | {"messages": messages, "tools": tools or None} | options
            )
        except jinja2.TemplateError as error:
            raise FormatError(f"the chat template says: {error.message or type(error).__name__}") from error
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise FormatError(f"the chat template failed: {type(error).__name__}: {error}") from error


_CONTENTS = "contents_of_this_rendering"


@jinja2.pass_context
def _tojson(context: jinja2.runtime.Context, value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    contents: Contents | None = context.get(_CONTENTS)
    if contents is None:
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)
    return contents.mark(json.dumps(contents.restore(value), ensure_ascii=ensure_ascii, **layout))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} cannot be read: {error}") from error
    return config if isinstance(config, dict) else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, …: a text, or an object whose `content` is it."""
    found: dict[str, str] = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if re.fullmatch(r"(bos|eos|pad|unk|sep|cls|mask)_token", key) and isinstance(text, str):
            found[key] = text
    return found
