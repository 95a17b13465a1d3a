"""What the user can mend, told in one line."""

from __future__ import annotations


class CommandError(Exception):
    """A command that cannot go on; the message says why and what to do."""


def one_line(error: Exception) -> str:
    """The message without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
