"""How a template cuts blank edges off the texts it is given."""

from __future__ import annotations

from collections.abc import Callable

from tokenspeed.sessions.formats.template import FormatError

Trim = Callable[[str], str]

_TRIMS: tuple[Trim, ...] = (
    lambda text: text,
    str.strip,
    str.lstrip,
    str.rstrip,
    lambda text: text.strip("\n"),
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n"),
)

_CORE = 'probe\n\t <core> & "é"'
_PADDED = f"\n \t\n{_CORE}\n \t\n"


def find_trim(render: Callable[[str], str], name: str) -> Trim:
    """The cut that `render` makes to a text.

    Raises:
        FormatError: it does something else to the text, or leaves it out.
    """
    bare, padded = render(_CORE), render(_PADDED)
    if bare.count(_CORE) != 1:
        raise FormatError(f"the chat template does not write the {name} text exactly once")
    for trim in _TRIMS:
        if bare.replace(_CORE, trim(_PADDED)) == padded:
            return trim
    raise FormatError(f"the chat template changes the {name} text in an unknown way")
