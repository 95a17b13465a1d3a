"""A function's docstring, as a tool's description and its parameters'."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

_GOOGLE_SECTION = re.compile(
    r"^(args|arguments|parameters|params|returns?|raises|yields?|examples?|notes?|attributes|see also|warnings?):\s*$",
    re.IGNORECASE,
)
_GOOGLE_PARAMETER = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_NUMPY_RULE = re.compile(r"^-{3,}\s*$")
_NUMPY_PARAMETER = re.compile(r"^\*{0,2}(\w+(?:\s*,\s*\w+)*)\s*(?::.*)?$")
_SPHINX_FIELD = re.compile(r"^:(\w+)([^:]*):\s*(.*)$")
_PARAMETER_SECTIONS = {"args", "arguments", "parameters", "params", "other parameters"}
_SPHINX_PARAMETERS = {"param", "parameter", "arg", "argument", "key", "keyword"}


@dataclass(frozen=True, slots=True)
class Docstring:
    """`description`: the text before the first section. `parameters`: one line of text for each that is described."""

    description: str
    parameters: dict[str, str]


def parse_docstring(text: str | None) -> Docstring:
    """Read a docstring in Google's, NumPy's or Sphinx's style; what follows none of them is description."""
    if not text:
        return Docstring("", {})
    lines = inspect.cleandoc(text).splitlines()
    description: list[str] = []
    parameters: dict[str, str] = {}
    at = 0
    while at < len(lines) and not _begins_section(lines, at):
        description.append(lines[at])
        at += 1
    while at < len(lines):
        if _SPHINX_FIELD.match(lines[at]):
            at = _read_sphinx(lines, at, parameters)
        elif _is_numpy_section(lines, at):
            at = _read_numpy(lines, at, parameters)
        elif _GOOGLE_SECTION.match(lines[at]):
            at = _read_google(lines, at, parameters)
        else:
            at += 1
    return Docstring(re.sub(r"\n{3,}", "\n\n", "\n".join(description)).strip(), parameters)


def _begins_section(lines: list[str], at: int) -> bool:
    line = lines[at]
    return bool(_GOOGLE_SECTION.match(line) or _SPHINX_FIELD.match(line) or _is_numpy_section(lines, at))


def _is_numpy_section(lines: list[str], at: int) -> bool:
    follows = lines[at + 1] if at + 1 < len(lines) else ""
    return bool(lines[at].strip() and not lines[at][0].isspace() and _NUMPY_RULE.match(follows))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _read_google(lines: list[str], at: int, parameters: dict[str, str]) -> int:
    describes = lines[at].strip().rstrip(":").lower() in _PARAMETER_SECTIONS
    at += 1
    name, base = None, None
    while at < len(lines) and (not lines[at].strip() or lines[at][0].isspace()):
        line = lines[at]
        at += 1
        if not describes or not line.strip():
            continue
        base = _indent(line) if base is None else base
        match = _GOOGLE_PARAMETER.match(line.strip()) if _indent(line) <= base else None
        if match:
            name = match[1]
            parameters[name] = match[2].strip()
        elif name is not None:
            parameters[name] = f"{parameters[name]} {line.strip()}".strip()
    return at


def _read_numpy(lines: list[str], at: int, parameters: dict[str, str]) -> int:
    describes = lines[at].strip().lower() in _PARAMETER_SECTIONS
    at += 2
    names: list[str] = []
    while at < len(lines) and not _is_numpy_section(lines, at):
        line = lines[at]
        at += 1
        if not describes or not line.strip():
            continue
        if not line[0].isspace():
            match = _NUMPY_PARAMETER.match(line)
            names = [name.strip() for name in match[1].split(",")] if match else []
            for name in names:
                parameters[name] = ""
        else:
            for name in names:
                parameters[name] = f"{parameters[name]} {line.strip()}".strip()
    return at


def _read_sphinx(lines: list[str], at: int, parameters: dict[str, str]) -> int:
    match = _SPHINX_FIELD.match(lines[at])
    assert match is not None
    words = match[2].split()
    name = words[-1].lstrip("*") if match[1] in _SPHINX_PARAMETERS and words else None
    text = [match[3].strip()]
    at += 1
    while at < len(lines) and lines[at].strip() and lines[at][0].isspace():
        text.append(lines[at].strip())
        at += 1
    if name is not None:
        parameters[name] = " ".join(part for part in text if part)
    return at
